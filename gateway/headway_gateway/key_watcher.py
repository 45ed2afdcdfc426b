"""The key file, re-read when its content changes. After a broken edit the last good keys stay in force.

A file that is written in place can be read half: cut behind a line it has fewer keys, cut behind a hash it gives a key
every class. So a change counts once two readings in a row found the same.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from headway_core.errors import InvalidInput
from headway_edge.watched_files import read_files

from headway_gateway.keys import parse_keys

READ_SECONDS = 1.0

log = logging.getLogger("headway.gateway.keys")


class KeyWatcher:
    """Keeps `ring` up to date.

    Raises, when it is made:
        InvalidInput: a line is wrong. OSError: there is nothing to read. Without keys no gateway starts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = read_files(path, pipe=True)
        self._unsettled = False
        """The last reading found something new."""
        self._last_error: str | None = None
        self.ring = parse_keys(self._last)

    def read(self) -> None:
        """Reads the file once."""
        try:
            found = read_files(self._path)
            settled = self._unsettled and found == self._last
            self._unsettled, self._last = found != self._last, found
            if not settled:
                return
            ring = parse_keys(found)
            if len(self.ring) and not len(ring):
                # A half-written file looks like this. Delete its line to revoke a key; stop the gateway for the last.
                raise InvalidInput("holds no key any more")
            self.ring = ring
        except (InvalidInput, OSError) as error:
            if str(error) != self._last_error:
                log.warning("keys: %s; those read before stay in force", error)
            self._last_error = str(error)
            return
        self._last_error = None
        log.info("%d API keys are in force", len(self.ring))

    async def run(self) -> None:
        """Reads every `READ_SECONDS` until cancelled."""
        while True:
            await asyncio.sleep(READ_SECONDS)
            self.read()
