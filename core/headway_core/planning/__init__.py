"""From what was observed to the knobs and replicas that keep the promise, with reasons.

Pure: a snapshot in, actions out. No Kubernetes, no HTTP, no waiting: the operator and `headway up` carry actions out.
"""
