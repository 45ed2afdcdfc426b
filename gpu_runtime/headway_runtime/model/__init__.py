"""The forward pass: checkpoints, paged KV cache, attention, sampling. Knows tensors; no scheduling, no text."""
