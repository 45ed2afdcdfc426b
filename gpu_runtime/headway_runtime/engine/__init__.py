"""The engine process: schedule, execute, account. Knows token ids and counts; no text, no HTTP."""
