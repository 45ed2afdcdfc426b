"""The core under a virtual clock: traces in, report out. No sockets, no threads, no sleeping."""
