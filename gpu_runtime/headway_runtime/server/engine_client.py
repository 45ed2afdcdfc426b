"""The client of the engine process: starts it, sends commands, delivers the tokens of its reports to their listeners.

All methods run on the server's event loop. Commands of one iteration of the loop go out as one message. When the engine
process ends, for whatever reason, `died` is set and every listener's `on_engine_died` is called.
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

from headway_core.contract.policy import Knobs
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
"""Seconds without a finished step that never count as a stall: a page fault or a busy machine takes that long."""
_EXIT_SECONDS = 5.0

log = logging.getLogger("headway.runtime")


def engine_environment(threads: int) -> dict[str, str]:
    """Variables for an engine process besides its parent's: `threads` of the CPU, and huge pages for tensors."""
    return {"OMP_NUM_THREADS": str(threads), "THP_MEM_ALLOC_ENABLE": "1"}


class TokenListener(Protocol):
    """Receives the tokens of one sequence."""

    def on_token(self, out: TokenOut, hidden: bool) -> None:
        """A token; `hidden` when it is the end token, which counts but is no text."""

    def on_ended(self, ended: Ended) -> None:
        """The engine has freed the sequence."""

    def on_engine_died(self) -> None:
        """The engine process has ended, and the sequence with it."""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """A sequence in a command that the engine has not applied yet, so that its load does not show it."""

    number: int
    priority: int
    prompt_tokens: int


class EngineClient:
    """One engine process. `on_report` gets each report after its tokens, `on_progress` each message about the start."""

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
        self._last_sent = 0
        self._last_applied = 0
        self._add: list[AddSequence] = []
        self._cancel: list[int] = []
        self._knobs: Knobs | None = None
        self._flush_scheduled = False
        self._last_report_at = time.monotonic()
        self.unconfirmed: deque[Unconfirmed] = deque()
        self.load: EngineLoad | None = None
        self.ready: Ready | None = None
        self.died = asyncio.Event()

    async def start(self) -> Ready:
        """Spawns the process and waits until its model is loaded and calibrated.

        Raises EngineDied when the process ends before; it has then written the reason to standard error.
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
            self._on_process_end()
            raise EngineDied("the engine process ended before it was ready") from None
        self._reader_task = asyncio.create_task(self._read(messages))
        return self.ready

    def new_ids(self, count: int) -> list[int]:
        """`count` sequence ids, unique in this process. Never derived from what a client sends."""
        first = self._next_id
        self._next_id += count
        return list(range(first, first + count))

    def add(self, sequences: list[AddSequence], listeners: list[TokenListener]) -> None:
        """Adds sequences to the engine. Raises EngineDied when the engine process has ended."""
        if self.died.is_set():
            raise EngineDied("the engine process is gone")
        for sequence, listener in zip(sequences, listeners, strict=True):
            self._listeners[sequence.seq_id] = listener
        self._add += sequences
        for sequence in sequences:
            self.unconfirmed.append(Unconfirmed(self._last_sent + 1, sequence.priority, len(sequence.prompt)))
        self._schedule_flush()

    def cancel(self, seq_ids: Iterable[int]) -> None:
        """Cancels sequences; ids of sequences that have ended are ignored."""
        for seq_id in seq_ids:
            if self._listeners.pop(seq_id, None) is not None:
                self._cancel.append(seq_id)
                self._schedule_flush()

    def set_knobs(self, knobs: Knobs) -> None:
        """The knobs from the next iteration on; in force once `load` shows them."""
        self._knobs = knobs
        self._schedule_flush()

    def stalled_for(self, now: float) -> float | None:
        """Seconds since the last step if more than max(STALL_FLOOR, STALL_FACTOR · longest step); else None."""
        if not self._listeners and self._last_applied == self._last_sent:
            return None
        longest = self.load.longest_step_seconds if self.load is not None else None
        limit = max(STALL_FLOOR, STALL_FACTOR * (longest or 0.0))
        waited = now - self._last_report_at
        return waited if waited > limit else None

    async def stop(self) -> int:
        """Closes the channel, which ends the process, and kills it after 5 s. Its exit status, or 128 + signal."""
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

    async def _read(self, messages: object) -> None:
        try:
            async for message in messages:  # type: ignore[attr-defined]
                self._deliver(StepReport.unpack(message))
        except (ChannelClosed, OSError):
            pass  # The same as an orderly end of the stream: the process has ended.
        except Exception:
            log.exception("a report of the engine could not be delivered: without it nothing can go on")
        finally:
            self._on_process_end()

    def _deliver(self, report: StepReport) -> None:
        self._last_report_at = time.monotonic()
        self._last_applied = report.applied
        while self.unconfirmed and self.unconfirmed[0].number <= report.applied and report.load is not None:
            self.unconfirmed.popleft()
        if report.load is not None:
            self.load = report.load
        stopped = {ended.seq_id for ended in report.ended if ended.reason is EndReason.STOP}
        for out in report.tokens:
            if (listener := self._listeners.get(out.seq_id)) is not None:
                listener.on_token(out, out.seq_id in stopped)
        for ended in report.ended:
            if (listener := self._listeners.pop(ended.seq_id, None)) is not None:
                listener.on_ended(ended)
        self._on_report(report)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._writer is None or self.died.is_set():
            return
        if self._last_applied == self._last_sent and len(self._listeners) == len(self._add):
            self._last_report_at = time.monotonic()  # The engine was idle: the wait for a step starts now.
        self._last_sent += 1
        commands = Commands(self._last_sent, tuple(self._add), tuple(self._cancel), self._knobs)
        self._add, self._cancel, self._knobs = [], [], None
        self._writer.write(frame(commands.pack()))

    def _on_process_end(self) -> None:
        if self.died.is_set():
            return
        self.died.set()
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_engine_died()
