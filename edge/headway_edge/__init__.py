"""The HTTP edge that gateway and runtime share: listening sockets, client connections, watched policy files.

It knows no admission, no engine, no torch, no routes and no FastAPI: its user says what is served and what a policy
changes. It imports the core and uvicorn.
"""
