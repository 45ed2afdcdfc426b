"""The decisions of Headway, as pure functions and plain state.

Standard library only. Nothing here does I/O, reads a clock (callers pass ``now`` in seconds), starts a thread, or
imports another package of this project or of anybody else. Gateway, runtime, operator and simulator all decide with
this code.

Units everywhere: seconds, tokens, bytes. They are converted only at the edges (``500ms`` in YAML, whole seconds in
``Retry-After``).
"""

__version__ = "0.1.0"
"""Of the whole project: pyproject.toml, the chart and the API documents take it from here."""
