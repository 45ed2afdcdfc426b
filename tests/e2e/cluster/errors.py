"""What can go wrong around a test cluster."""

from __future__ import annotations


class ClusterError(Exception):
    """Root of the harness's errors."""


class CannotRun(ClusterError):
    """This machine lacks something; the message names it and the remedy. Tests skip on it."""


class NotReady(ClusterError):
    """Something did not come up in time; the message holds the end of its log."""


class CommandFailed(ClusterError):
    """kubectl, helm or another command ended with an error; the message holds what it said."""
