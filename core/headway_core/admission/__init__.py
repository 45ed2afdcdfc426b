"""The door: who comes in, who waits, who is told "not now", and which replica serves.

Pure decisions over load reports and a clock that is passed in. No HTTP, no sockets, no tasks: the gateway and the simulator own those.
"""
