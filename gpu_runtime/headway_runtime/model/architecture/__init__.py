"""Model families, driven by config.json. No sampling, no scheduling, no files: weights arrive as tensors."""
