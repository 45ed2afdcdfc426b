"""One iteration of the engine: which sequences are in it, how many tokens of each, who is preempted.

Counts, ids and digests only: no token values, no text, no tensors, no clock. The same code runs under the GPU loop and
under the simulator. What executes a plan lives elsewhere.
"""
