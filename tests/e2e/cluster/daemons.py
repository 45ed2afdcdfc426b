"""Long-running programs of a cluster: started detached, found again by whoever takes the cluster down, never mistaken
for a stranger."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from cluster.errors import NotReady


class Daemon:
    """One program with its log `<name>.log` and its record `<name>.json` (pid and start time) in `folder`."""

    def __init__(self, folder: Path, name: str, *, bound: bool = False) -> None:
        """`bound`: the kernel kills it when the process that started it dies, so a killed test run leaves nothing
        behind."""
        self.name = name
        self.log = folder / f"{name}.log"
        self._record = folder / f"{name}.json"
        self._bound = bound
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts `command` in a session of its own, so that Ctrl-C at the terminal reaches only the one who takes it
        down."""
        prefix = ("setpriv", "--pdeathsig", "KILL", "--") if self._bound else ()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=env,
            )
        self._record.write_text(
            json.dumps({"pid": self._child.pid, "started": psutil.Process(self._child.pid).create_time()})
        )

    def process(self) -> psutil.Process | None:
        """The running process, or None: a process id that the system gave to somebody else does not count."""
        if self._child is not None and self._child.poll() is not None:
            return None
        try:
            record = json.loads(self._record.read_text())
            process = psutil.Process(record["pid"])
            same = abs(process.create_time() - record["started"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, ValueError, psutil.NoSuchProcess):
            return None
        return process if same else None

    def stop(self, *, kill: bool = False, patience: float = 10.0) -> None:
        """Ends it (SIGTERM, and SIGKILL after `patience` seconds) and returns when it is gone. Nothing running: nothing
        done."""
        process = self.process()
        if process is not None:
            _end(process, kill=kill, patience=patience)
        if self._child is not None:
            self._child.wait()
            self._child = None
        self._record.unlink(missing_ok=True)

    def wait_until(self, condition: Callable[[], bool], what: str, *, patience: float = 60.0) -> None:
        """Polls until `condition` holds. Raises NotReady with the end of the log when the program dies or the patience
        ends."""
        deadline = time.monotonic() + patience
        while not condition():
            if self.process() is None:
                raise NotReady(f"{self.name} ended before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise NotReady(f"{what}: not within {patience:.0f} s; the end of {self.log}:\n{self.tail()}")
            time.sleep(0.05)

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"


def _end(process: psutil.Process, *, kill: bool, patience: float) -> None:
    # A program inside a node is the child of the nsenter that brought it there, and nsenter passes no signal on.
    try:
        processes = [*process.children(), process] if process.name() == "nsenter" else [process]
    except psutil.NoSuchProcess:
        return
    for signal_number in (signal.SIGKILL,) if kill else (signal.SIGTERM, signal.SIGKILL):
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal_number)
        deadline = time.monotonic() + patience
        while any(map(_alive, processes)) and time.monotonic() < deadline:
            time.sleep(0.02)


def _alive(process: psutil.Process) -> bool:
    # Dead and not yet waited for is dead: not every first process of a container is quick at that.
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port that the system found free a moment ago."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
