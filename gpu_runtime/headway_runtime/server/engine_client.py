"""The server's side of the engine: starts the engine process, sends it commands, hands its reports to the requests they
belong to.

All methods run on the server's event loop. Commands of one turn of the loop go out as one message. When the engine
process ends, for whatever reason, every request in flight is told, and `died` is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Protocol

from headway_core.batching.plan import Limits
from headway_core.errors import EngineDied

from headway_runtime.ipc.channel import ChannelClosed, frame, read_messages
from headway_runtime.ipc.messages import (
    AddSequence,
    Commands,
    Ended,
    EndReason,
    EngineLoad,
    Ready,
    StepReport,
    TokenOut,
)
from headway_runtime.settings import EngineSettings

STALL_FACTOR = 10.0
STALL_FLOOR = 10.0
"""Seconds without a finished step, with work to do, that are never called a stall: a page fault or a busy machine is
none."""
_EXIT_SECONDS = 5.0

log = logging.getLogger("headway.runtime")


def engine_environment(threads: int) -> dict[str, str]:
    """What an engine process finds in its environment besides its parent's: `threads` of the CPU, and huge pages for
    torch's tensors."""
    return {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1"}


class TokenListener(Protocol):
    """Whoever waits for the tokens of one sequence."""

    def token(self, out: TokenOut, hidden: bool) -> None:
        """A token; `hidden` when it is the end token, which counts but is no text."""

    def ended(self, ended: Ended) -> None:
        """The engine holds the sequence no more."""

    def engine_died(self) -> None:
        """The engine is gone, and the sequence with it."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """Sequences in commands that the engine has not taken in yet, so that its own books do not show them."""

    number: int
    priority: int
    sequences: int
    prompt_tokens: int


class EngineClient:
    """One engine process. `on_report` sees every report after its tokens were handed out; `on_progress` hears how the
    start goes."""

    def __init__(
        self,
        settings: EngineSettings,
        eos_ids: Iterable[int],
        on_report: Callable[[StepReport], None],
        on_progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._eos_ids = sorted(eos_ids)
        self._on_report = on_report
        self._on_progress = on_progress
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._listeners: dict[int, TokenListener] = {}
        self._next_id = 0
        self._number = 0
        self._applied = 0
        self._add: list[AddSequence] = []
        self._cancel: list[int] = []
        self._limits: Limits | None = None
        self._flush_planned = False
        self._last_report_at = time.monotonic()
        self.unconfirmed: deque[Unconfirmed] = deque()
        self.load: EngineLoad | None = None
        self.ready: Ready | None = None
        self.died = asyncio.Event()

    async def start(self) -> Ready:
        """Spawns the process and waits until its model is loaded and calibrated.

        Raises EngineDied when it ends before; it has then said why on standard error.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 -- starting takes a millisecond, and it is ourselves
                [sys.executable, "-m", "headway_runtime.engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | engine_environment(self._settings.threads),
            )
        ours.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(frame({"settings": asdict(self._settings), "eos_ids": self._eos_ids}))
        messages = read_messages(reader)
        try:
            while "progress" in (message := await anext(messages)):
                self._on_progress(message["progress"])
            self.ready = Ready.unpack(message)
        except (StopAsyncIteration, ChannelClosed, OSError):
            self._gone()
            raise EngineDied("the engine process ended before it was ready") from None
        self._reader_task = asyncio.create_task(self._read(messages))
        return self.ready

    def new_ids(self, count: int) -> list[int]:
        """Numbers for sequences, unique in this process's life. What clients call their requests never becomes one."""
        first = self._next_id
        self._next_id += count
        return list(range(first, first + count))

    def add(self, sequences: list[AddSequence], listeners: list[TokenListener]) -> None:
        """Asks for sequences. Raises EngineDied when there is no engine."""
        if self.died.is_set():
            raise EngineDied("the engine process is gone")
        for sequence, listener in zip(sequences, listeners, strict=True):
            self._listeners[sequence.seq_id] = listener
        self._add += sequences
        for sequence in sequences:
            self.unconfirmed.append(Unconfirmed(self._number + 1, sequence.priority, 1, len(sequence.prompt)))
        self._plan_flush()

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Gives sequences up; those that have ended already are passed over."""
        for seq_id in seq_ids:
            if self._listeners.pop(seq_id, None) is not None:
                self._cancel.append(seq_id)
                self._plan_flush()

    def set_limits(self, limits: Limits) -> None:
        """The knobs from the next iteration on; in force once `load` shows them."""
        self._limits = limits
        self._plan_flush()

    @property
    def in_flight(self) -> int:
        """Sequences that somebody waits for."""
        return len(self._listeners)

    def stalled_for(self, now: float) -> float | None:
        """Seconds since the last finished step, when that is too long for the work at hand; None while all is well."""
        if not self._listeners and self._applied == self._number:
            return None
        longest = self.load.longest_step_seconds if self.load is not None else None
        limit = max(STALL_FLOOR, STALL_FACTOR * (longest or 0.0))
        waited = now - self._last_report_at
        return waited if waited > limit else None

    async def stop(self) -> int:
        """Closes the link, which ends the process, and kills it when it does not go. Returns its exit status, 128 +
        signal when killed."""
        if self._reader_task is not None:
            self._reader_task.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return 0
        deadline = time.monotonic() + _EXIT_SECONDS
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._process.kill()
            await asyncio.sleep(0.02)
        status = self._process.returncode
        return status if status >= 0 else 128 - status

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    async def _read(self, messages: object) -> None:
        try:
            async for message in messages:  # type: ignore[attr-defined]
                self._take(StepReport.unpack(message))
        except (ChannelClosed, OSError):
            pass  # The same as an orderly end of the stream: nobody is there any more.
        except Exception:
            log.exception("a report of the engine could not be handed out: without it nothing can go on")
        finally:
            self._gone()

    def _take(self, report: StepReport) -> None:
        self._last_report_at = time.monotonic()
        self._applied = report.applied
        while self.unconfirmed and self.unconfirmed[0].number <= report.applied and report.load is not None:
            self.unconfirmed.popleft()
        if report.load is not None:
            self.load = report.load
        stopped = {ended.seq_id for ended in report.ended if ended.reason is EndReason.STOP}
        for out in report.tokens:
            listener = self._listeners.get(out.seq_id)
            if listener is not None:
                listener.token(out, out.seq_id in stopped)
        for ended in report.ended:
            listener = self._listeners.pop(ended.seq_id, None)
            if listener is not None:
                listener.ended(ended)
        self._on_report(report)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if self._writer is None or self.died.is_set():
            return
        if self._applied == self._number and not self._listeners_before(self._add):
            self._last_report_at = time.monotonic()  # It was idle: the wait for a step starts now.
        self._number += 1
        commands = Commands(self._number, tuple(self._add), tuple(self._cancel), self._limits)
        self._add, self._cancel, self._limits = [], [], None
        self._writer.write(frame(commands.pack()))

    def _listeners_before(self, added: list[AddSequence]) -> int:
        return len(self._listeners) - len(added)

    def _gone(self) -> None:
        if self.died.is_set():
            return
        self.died.set()
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.engine_died()
