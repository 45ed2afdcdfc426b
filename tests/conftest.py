"""Loads the fixtures that every folder of tests may use; `tests/e2e/cluster/README.md` tells which."""

pytest_plugins = ["cluster.fixtures"]
