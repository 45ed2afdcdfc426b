"""Text to token ids and back: tokenizers, chat templates, stop strings. Knows no HTTP and imports no torch."""
