"""The server process: HTTP, requests, text in and out, and the client of the engine process. Imports no torch."""
