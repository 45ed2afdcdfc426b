"""The door as a program: an OpenAI-compatible HTTP gateway that admits, queues, routes, relays and keeps the books.

No torch and no Kubernetes client here; decisions come from headway_core.admission, this package does the I/O.
"""
