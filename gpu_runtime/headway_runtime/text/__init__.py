"""Text to token ids and back: tokenizers, chat templates, stop strings. Knows no HTTP, no tensors; imports no torch."""
