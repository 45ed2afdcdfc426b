"""A memory budget for large bodies until they are parsed, so that uploads cannot exhaust the gateway's memory.

A body of usual size takes nothing from it: large or unfinished bodies compete only with each other.
"""

from __future__ import annotations

from typing import Self

from headway_core.contract.header_names import ShedReason
from headway_core.json_document import LARGE_BYTES

from headway_gateway import error_responses

_RETRY_AFTER = 1


class BodyBudget:
    """What all large bodies together may take: `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.reserved = 0
        """Bytes that large bodies take now."""


class BodyReservation:
    """The part of the budget that one body takes, given back where the context ends."""

    __slots__ = ("_budget", "_reserved")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._reserved = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.reserved -= self._reserved
        self._reserved = 0

    def grow(self, size: int) -> None:
        """The body holds `size` bytes now.

        Raises:
            RequestFailed: 429, the body is large and the budget is spent.
        """
        if size < LARGE_BYTES:
            return
        budget = self._budget
        if budget.reserved - self._reserved + size > budget.limit:
            raise error_responses.shed(ShedReason.QUEUE_FULL, _RETRY_AFTER, contended=True)
        budget.reserved += size - self._reserved
        self._reserved = size
