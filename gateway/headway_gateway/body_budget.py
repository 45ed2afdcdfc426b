"""Room for large bodies on their way in, from their first bytes until they have been read: no number of uploads takes
the gateway's memory.

A body of usual size takes none, so that those who send large ones, or never finish, refuse each other and nobody else.
"""

from __future__ import annotations

from typing import Self

from headway_core.contract.header_names import ShedReason
from headway_core.json_document import LARGE_BYTES

from headway_gateway import error_responses

_RETRY_AFTER = 1


class BodyBudget:
    """What large bodies may take together: `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        """Bytes that large bodies hold now."""


class BodyReservation:
    """One body's place in the room, given back where the context ends."""

    __slots__ = ("_room", "_taken")

    def __init__(self, room: BodyBudget) -> None:
        self._room = room
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.taken -= self._taken
        self._taken = 0

    def grow(self, size: int) -> None:
        """The body holds `size` bytes now.

        Raises:
            Refused: 429, it is large and there is no room for it.
        """
        if size < LARGE_BYTES:
            return
        room = self._room
        if room.taken - self._taken + size > room.limit:
            raise error_responses.not_now(ShedReason.QUEUE_FULL, _RETRY_AFTER, contended=True)
        room.taken += size - self._taken
        self._taken = size
