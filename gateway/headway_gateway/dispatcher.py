"""One pool's door at work: what `headway_core.admission.PoolAdmission` decides, turned into tasks that go on, wait, or
are refused.

The door decides; here are the futures that requests wait on and the one task that asks again while anybody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from headway_core.admission import AdmissionResult, Dispatch, PoolAdmission, PredictionSample, Request, Shed

from headway_gateway import error_responses

log = logging.getLogger("headway.gateway.dispatcher")

_AFTER_FAILURE = 0.1
TICK = 0.01
"""Seconds between two looks while somebody waits; reports, answers and ends are looked at as they come."""


class Grant:
    """A request's right to be sent to one replica now. A context: leaving it tells the door that the request is over
    there."""

    def __init__(self, dispatcher: Dispatcher, dispatch: Dispatch) -> None:
        self.request = dispatch.request
        self.replica = dispatch.replica
        self.number = dispatch.number
        self.priority = dispatch.priority
        self.failed = False
        """Set when the replica, not the client, is to blame for the end."""
        self._dispatcher = dispatcher

    def first_token(self) -> tuple[PredictionSample, ...]:
        """Its first content came: what this says about predictions."""
        return self._dispatcher.door.first_token(self.request.request_id, asyncio.get_running_loop().time())

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.ended(self.request.request_id, self.failed)


class Dispatcher:
    """The queue worker of one pool."""

    def __init__(self, door: PoolAdmission) -> None:
        self.door = door
        self._asked: dict[int, asyncio.Future[Dispatch | Shed]] = {}
        self._look = asyncio.Event()

    async def turn(self, request: Request, waits: Callable[[bool], None]) -> Grant:
        """A newcomer's turn: at once, or after having waited. `waits` is told when it begins to wait and when it no
        longer does.

        Raises:
            Refused: it was shed, at once or later.
        """
        return await self._answer(request, waits, lambda now: self.door.offer(request, now))

    async def another(self, request: Request, tried: Sequence[str], waits: Callable[[bool], None]) -> Grant:
        """A turn on a replica not in `tried`, after a try that failed. Raises Refused when there is none, or none in
        time."""
        return await self._answer(request, waits, lambda now: self.door.again(request, now, tried))

    async def _answer(
        self, request: Request, waits: Callable[[bool], None], ask: Callable[[float], AdmissionResult]
    ) -> Grant:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Dispatch | Shed] = loop.create_future()
        self._asked[request.request_id] = answer
        try:
            self._act(ask(loop.time()))
            if not answer.done():
                waits(True)
                self.look()
            told = await answer
        except BaseException:
            # Dispatched in the same instant or still waiting: either way it is over.
            self.ended(request.request_id, False)
            raise
        finally:
            waits(False)
            del self._asked[request.request_id]
        if isinstance(told, Shed):
            raise error_responses.shed(told)
        return Grant(self, told)

    def ended(self, request_id: int, server_error: bool) -> None:
        """The request is over, wherever it was."""
        self.door.ended(request_id, asyncio.get_running_loop().time(), server_error)
        self.look()

    def look(self) -> None:
        """Something was learned about a replica: see who can go now, if anybody waits."""
        if len(self.door.queue):
            self._look.set()

    async def run(self) -> None:
        """Gives turns until cancelled."""
        loop = asyncio.get_running_loop()
        complaint = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK if len(self.door.queue) else None):
                    await self._look.wait()
            self._look.clear()
            if not len(self.door.queue):
                continue
            try:
                self._act(self.door.turns(loop.time()))
                complaint = ""
            except Exception as error:
                # Whoever waits depends on this loop: it goes on, and what waits ends by its own time limits at the
                # latest.
                if complaint != repr(error):
                    log.exception("giving turns failed; said again when it fails in another way")
                complaint = repr(error)
                await asyncio.sleep(_AFTER_FAILURE)

    def _act(self, decided: AdmissionResult) -> None:
        for dispatch in decided.dispatches:
            self._tell(dispatch.request.request_id, dispatch)
        for shed in decided.shed:
            self._tell(shed.request_id, shed)

    def _tell(self, request_id: int, answer: Dispatch | Shed) -> None:
        asked = self._asked.get(request_id)
        if asked is None or asked.done():
            # Its task is on its way out.
            self.door.ended(request_id, asyncio.get_running_loop().time())
        else:
            asked.set_result(answer)
