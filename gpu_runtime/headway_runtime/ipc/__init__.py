"""What the server process and the engine process say to each other, and the socket between them. Imports no torch."""
