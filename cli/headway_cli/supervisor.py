"""The processes that `headway up` runs: started, watched, restarted when they die, and stopped without a trace."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

START_LIMIT = 600.0
"""Seconds until a runtime's first answer: loading large weights takes minutes, not longer."""

_PR_SET_PDEATHSIG = 1
_RESTART_BACKOFF = (1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_AFTER = 60.0
"""Seconds alive after which a process counts as healthy and its backoff starts anew."""

_UNHEALTHY_LIMIT = 30.0
"""Seconds after which a running process that is not reported healthy counts as hung; a busy machine needs fewer."""
_LAST_BYTES = 64 * 1024
"""Read of the end of a log, which may have grown for weeks."""


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def why_not_listen(host: str, port: int) -> str | None:
    """Why a server could not listen there, in words; None when it could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
    return None


def _die_with_parent() -> None:
    """Runs in the child before exec: even if `headway up` is killed outright, the kernel ends its children (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(slots=True)
class Child:
    """One process: `arguments` after ``python -m``, its log file, and how often it died."""

    name: str
    arguments: Sequence[str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    deaths: int = 0
    restart_at: float | None = None
    healthy_at: float = 0.0
    """When it was last known to be healthy."""
    _log: IO[bytes] | None = field(default=None, repr=False)

    def start(self, now: float) -> None:
        """Starts it; its output is appended to the log file."""
        self._log = self._log or self.log_path.open("ab")
        # A group of its own: Ctrl-C in the terminal reaches `headway up` alone, which then stops the others in order.
        self.process = subprocess.Popen(
            [sys.executable, "-m", *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 -- no thread is started before, and it only calls prctl
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.started_at, self.healthy_at, self.restart_at = now, now, None

    def postpone(self, now: float) -> float:
        """Counts one more failure, and sets the time of the next start; returns the seconds until then."""
        pause = _RESTART_BACKOFF[min(self.deaths, len(_RESTART_BACKOFF) - 1)]
        self.deaths += 1
        self.restart_at = now + pause
        return pause

    @property
    def alive(self) -> bool:
        """Started and not ended."""
        return self.process is not None and self.process.poll() is None

    def last_lines(self, count: int = 15) -> str:
        """The end of its log, for a message about its death."""
        if self._log is not None:
            self._log.flush()
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                end = log.read(_LAST_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(end.splitlines()[-count:])

    def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


class Supervisor:
    """Keeps children running. `check` and `end_hung`, called often, return what happened in words; `stop` ends all."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)

    def start(self, now: float) -> None:
        """Starts every child."""
        for child in self.children:
            child.start(now)

    def check(self, now: float) -> list[str]:
        """Restarts what died, with a growing pause. Returns a line for each death and each restart."""
        lines = []
        for child in self.children:
            if child.alive or child.process is None:
                continue
            if child.restart_at is None:
                if now - child.started_at > _STEADY_AFTER:
                    child.deaths = 0
                pause = child.postpone(now)
                lines.append(
                    f"{child.name} ended ({_how(child.process.returncode)}); starting it again in {pause:.0f} "
                    f"s; log: {child.log_path}"
                )
            elif now >= child.restart_at:
                try:
                    child.start(now)
                except OSError as error:  # no memory, processes or disk for it now: the others go on
                    lines.append(
                        f"{child.name} could not be started ({error.strerror}); trying again in "
                        f"{child.postpone(now):.0f} s"
                    )
                else:
                    lines.append(f"{child.name} started again")
        return lines

    def end_hung(self, healthy: Collection[str], now: float) -> list[str]:
        """Ends what runs and was not in `healthy` (names) for too long, for `check` to restart. A line for each."""
        lines = []
        for child in self.children:
            if child.name in healthy or not child.alive:
                child.healthy_at = now
            elif now - child.healthy_at > _UNHEALTHY_LIMIT and child.process is not None:
                kill_group(child.process)
                lines.append(
                    f"{child.name} has not been healthy for {now - child.healthy_at:.0f} s and was ended; log: "
                    f"{child.log_path}"
                )
        return lines

    def stop(self, grace: float) -> None:
        """SIGTERM in the order of the list, `grace` seconds for each to drain, then SIGKILL to its whole group."""
        for child in self.children:
            if child.process is not None and child.alive:
                child.process.terminate()
                _wait(child.process, grace)
            if child.process is not None:
                kill_group(child.process)
            child.close()

    def kill(self) -> None:
        """Ends all at once."""
        for child in self.children:
            if child.process is not None:
                kill_group(child.process)
            child.close()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to whatever is left of the process's group, then reaps it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
