"""One replica: an HTTP server and an engine process that runs a model with a paged KV cache.

Decisions about an iteration come from headway_core.batching. The only package that imports torch.
"""
