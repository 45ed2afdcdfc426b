"""The admission of one pool at work: tasks go on, wait or end as `headway_core.admission.PoolAdmission` decides.

`PoolAdmission` decides. This module holds the futures of waiting requests, and one task that polls while any waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType

from headway_core.admission import AdmissionResult, Dispatch, PoolAdmission, PredictionSample, Request, Shed
from headway_core.admission.pool_admission import POLL_SECONDS

from headway_gateway import error_responses

log = logging.getLogger("headway.gateway.dispatcher")

_PAUSE_AFTER_ERROR = 0.1


class Grant:
    """Permission to send one request to one replica now. Leaving the context tells the admission that it has ended."""

    def __init__(self, dispatcher: Dispatcher, dispatch: Dispatch) -> None:
        self.request = dispatch.request
        self.replica_id = dispatch.replica_id
        self.number = dispatch.number
        self.priority = dispatch.priority
        self.failed = False
        """Set when the request ended through the replica's fault, not the client's."""
        self._dispatcher = dispatcher

    def first_token(self, now: float) -> tuple[PredictionSample, ...]:
        """The first content has come. Returns predicted against actual times to first token."""
        return self._dispatcher.admission.first_token(self.request.request_id, now)

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.ended(self.request.request_id, self.failed)


class Dispatcher:
    """The queue worker of one pool. `clock` gives the `now` of every decision, seconds."""

    def __init__(self, admission: PoolAdmission, clock: Callable[[], float]) -> None:
        self.admission = admission
        self._clock = clock
        self._decisions: dict[int, asyncio.Future[Dispatch | Shed]] = {}
        self._woken = asyncio.Event()

    async def acquire(self, request: Request, on_queued: Callable[[bool], None]) -> Grant:
        """The grant of a new request, at once or after a wait. `on_queued` gets True when a wait begins, then False.

        Raises:
            RequestFailed: it was shed, at once or later.
        """
        return await self._await_grant(request, on_queued, lambda now: self.admission.submit(request, now))

    async def reacquire(self, request: Request, tried: Sequence[str], on_queued: Callable[[bool], None]) -> Grant:
        """A grant for a replica not in `tried`, after a failed attempt.

        Raises:
            RequestFailed: it was shed: there is no such replica, or none was free in time.
        """
        return await self._await_grant(request, on_queued, lambda now: self.admission.resubmit(request, now, tried))

    async def _await_grant(
        self, request: Request, on_queued: Callable[[bool], None], submit: Callable[[float], AdmissionResult]
    ) -> Grant:
        future: asyncio.Future[Dispatch | Shed] = asyncio.get_running_loop().create_future()
        self._decisions[request.request_id] = future
        try:
            self._apply(submit(self._clock()))
            if not future.done():
                on_queued(True)
                self.wake()
            decision = await future
        except BaseException:
            # Dispatched in the same instant or still waiting: either way it is over.
            self.ended(request.request_id, False)
            raise
        finally:
            on_queued(False)
            del self._decisions[request.request_id]
        if isinstance(decision, Shed):
            raise error_responses.shed(decision.reason, decision.retry_after, decision.contended)
        return Grant(self, decision)

    def ended(self, request_id: int, server_error: bool) -> None:
        """The request is over, whether it was dispatched or waited."""
        self.admission.ended(request_id, self._clock(), server_error)
        self.wake()

    def wake(self) -> None:
        """Causes a poll if any request waits. Call it when something was learned about a replica."""
        if len(self.admission.queue):
            self._woken.set()

    async def run(self) -> None:
        """Dispatches what waits, until cancelled."""
        last_error = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS if len(self.admission.queue) else None):
                    await self._woken.wait()
            self._woken.clear()
            if not len(self.admission.queue):
                continue
            try:
                self._apply(self.admission.poll(self._clock()))
                last_error = ""
            except Exception as error:
                # Every waiting request depends on this loop, so it goes on; their own time limits end them at last.
                if last_error != repr(error):
                    log.exception("polling the admission failed; logged again when the error changes")
                last_error = repr(error)
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

    def _apply(self, result: AdmissionResult) -> None:
        for dispatch in result.dispatches:
            self._resolve(dispatch.request.request_id, dispatch)
        for shed in result.shed:
            self._resolve(shed.request_id, shed)

    def _resolve(self, request_id: int, decision: Dispatch | Shed) -> None:
        future = self._decisions.get(request_id)
        if future is None or future.done():
            # Its task is ending.
            self.admission.ended(request_id, self._clock())
        else:
            future.set_result(decision)
