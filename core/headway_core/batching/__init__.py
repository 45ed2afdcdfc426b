"""One iteration of the engine: which sequences are in it, how many tokens of each, who is preempted.

Counts, ids and digests only: no token values, text, tensors or clock. Runtime and simulator run the same code.
"""
