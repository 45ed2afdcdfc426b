"""Loads the fixtures that every folder of tests may use; `tests/e2e/cluster/README.md` tells which."""

import signal

pytest_plugins = ["cluster.fixtures"]


def pytest_configure():
    """A run in the background of a shell inherits that Ctrl-C is ignored, and so would every process that tests start
    and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
