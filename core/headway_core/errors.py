"""Every error that Headway's own code raises on purpose.

::

    HeadwayError
    ├── InvalidInput            something a person or a client wrote cannot be honoured
    │   ├── SpecError           ... in a ServingSLO; `field` names the place
    │   ├── DocumentError       ... in a policy or a load report; `field` names the place
    │   └── RequestError        ... in one request; the server answers 400 and goes on
    ├── Unschedulable           a sequence that this pool can never hold, however long it waits
    ├── CheckpointError         a model that must not be served as it is; names the file and the field
    └── EngineDied              the engine process is gone; every request in flight ends with this

A message gives the rule, what arrived instead, and the remedy. `assert` is for invariants of this code, not for input.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Root of the tree: catch this to catch everything that Headway raises on purpose."""


class InvalidInput(HeadwayError):
    """Input that breaks a rule. `field`: a dotted path (``spec.objectives.ttft.target``); empty: no single field."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.reason = message


class SpecError(InvalidInput):
    """A ServingSLO that cannot be honoured."""


class DocumentError(InvalidInput):
    """A policy or a load report that does not have the shape of `headway_core.contract`."""


class RequestError(InvalidInput):
    """One bad request. `code` is a short machine-readable word such as ``context_length_exceeded``.

    Three of them have one meaning wherever a member is checked: ``missing_required_parameter``, it is absent or null
    and has to be there; ``invalid_type``, it is of another JSON type than the rule names; ``invalid_value``, the type
    is right and the value is not, a number out of range or an empty list.
    """

    def __init__(self, message: str, field: str = "", code: str = "invalid_value") -> None:
        super().__init__(message, field)
        self.code = code


class Unschedulable(HeadwayError):
    """The sequence needs more KV blocks than the pool has in all: waiting would never help."""

    def __init__(self, needed_tokens: int, pool_tokens: int) -> None:
        super().__init__(
            f"the request needs {needed_tokens} tokens and the KV pool holds {pool_tokens} in all: "
            "shorten the prompt, lower max_tokens, or start the runtime with a larger pool"
        )
        self.needed_tokens = needed_tokens
        self.pool_tokens = pool_tokens


class CheckpointError(HeadwayError):
    """A checkpoint that is refused at start. `path` is the file, `key` the field or tensor at fault."""

    def __init__(self, path: str, key: str, message: str) -> None:
        super().__init__(f"{path}: {key}: {message}" if key else f"{path}: {message}")
        self.path = path
        self.key = key


class EngineDied(HeadwayError):
    """The engine process ended while requests were in flight."""
