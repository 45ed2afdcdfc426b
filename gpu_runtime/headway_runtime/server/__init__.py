"""The server process: HTTP, requests in flight, metrics and reports. Runs no model and imports no torch."""
