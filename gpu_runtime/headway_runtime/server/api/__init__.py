"""The OpenAI-compatible surface: bodies to requests, results to answers. Knows HTTP and JSON; knows no tensors and no
scheduling."""
