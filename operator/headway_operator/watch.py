"""Runs kopf in a thread and event loop of its own, so that its start, end and tasks never touch the loop that acts.

kopf ends when a watch is refused. Rights are then reviewed, and it starts again with the watches permitted by then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection

import kopf

from headway_operator.handlers import Take, registry

log = logging.getLogger(__name__)


class Watch:
    """One run of kopf over some resources and namespaces."""

    def __init__(self, take: Take, plurals: Collection[str], namespaces: tuple[str, ...]) -> None:
        self.plurals = frozenset(plurals)
        self._take = take
        self._namespaces = namespaces
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        """Returns at once; events arrive through `take`, in kopf's thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether events can still arrive."""
        return self._thread.is_alive()

    async def stop(self) -> None:
        """Ends every watch and waits for the thread."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 10.0)

    def _run(self) -> None:
        try:
            asyncio.run(
                kopf.operator(
                    registry=registry(self._take, self.plurals),
                    standalone=True,
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    stop_flag=self._stop,
                )
            )
        except Exception as error:  # whatever ends kopf, the loop starts it again
            log.warning("watching ended: %s: %s", type(error).__name__, error)


def quieten() -> None:
    """Silences kopf below warnings, and its warning that it does not handle signals here."""
    logging.getLogger("kopf").setLevel(logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
