import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from headway_cli.supervisor import Child, Supervisor, free_port, why_not_listen


@pytest.fixture
def module_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sleeper.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    (tmp_path / "failing.py").write_text("print('the reason'); raise SystemExit(3)")
    (tmp_path / "stubborn.py").write_text(
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-m', 'sleeper']); print(child.pid, flush=True); time.sleep(600)"
    )
    return tmp_path


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_child_that_dies_is_restarted_after_a_growing_pause_and_said_so(module_folder):
    child = Child("replica 1", ["failing"], module_folder / "log")
    supervisor = Supervisor([child])
    supervisor.start(0.0)
    now, pauses = 0.0, []
    for _ in range(3):
        until(lambda: not child.alive)
        (told,) = supervisor.check(now)
        assert "exit code 3" in told and str(child.log_path) in told
        pauses.append(child.restart_at - now)
        assert supervisor.check(child.restart_at - 0.01) == []
        now = child.restart_at
        assert supervisor.check(now) == ["replica 1 started again"]
    assert pauses == sorted(pauses) and pauses[0] < pauses[-1]
    assert "the reason" in child.last_lines()
    supervisor.kill()


def test_a_child_that_cannot_be_started_again_is_tried_later_and_its_neighbour_stays(module_folder):
    folder = module_folder / "logs"
    folder.mkdir()
    gone, steady = (
        Child("replica 1", ["failing"], folder / "log"),
        Child("replica 2", ["sleeper"], module_folder / "log"),
    )
    supervisor = Supervisor([gone, steady])
    supervisor.start(0.0)
    until(lambda: not gone.alive)
    supervisor.check(0.0)
    gone.close()
    shutil.rmtree(folder)
    first = gone.restart_at
    (told,) = supervisor.check(first)
    assert "replica 1 could not be started (No such file or directory)" in told
    assert gone.restart_at > first and steady.alive
    folder.mkdir()
    assert supervisor.check(gone.restart_at) == ["replica 1 started again"]
    supervisor.kill()


def test_a_child_that_hangs_is_ended_and_restarted_and_one_that_recovers_is_not(module_folder):
    hung, slow = (
        Child("replica 1", ["sleeper"], module_folder / "1"),
        Child("replica 2", ["sleeper"], module_folder / "2"),
    )
    supervisor = Supervisor([hung, slow])
    supervisor.start(100.0)
    first = hung.process.pid
    for now in range(101, 130):
        assert supervisor.end_hung([], float(now)) == []
    assert supervisor.end_hung(["replica 2"], 130.0) == []
    (told,) = supervisor.end_hung([], 131.0)
    assert told.startswith("replica 1 has not been healthy for 31 s")
    assert gone(first) and slow.alive
    supervisor.check(131.0)
    assert supervisor.check(hung.restart_at) == ["replica 1 started again"]
    assert supervisor.end_hung(["replica 2"], hung.started_at + 29) == []
    supervisor.kill()


def test_stop_ends_even_what_ignores_sigterm_and_its_children(module_folder):
    child = Child("gateway", ["stubborn"], module_folder / "log")
    supervisor = Supervisor([child])
    supervisor.start(0.0)
    until(lambda: re.match(r"\d+\s", child.last_lines() + " "))
    grandchild = int(child.last_lines().split()[0])
    supervisor.stop(grace=0.2)
    assert not child.alive
    until(lambda: gone(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_end_when_the_parent_is_killed_outright(module_folder):
    program = (
        "import time; from pathlib import Path; from headway_cli.supervisor import Child, Supervisor\n"
        f"child = Child('x', ['sleeper'], Path({str(module_folder / 'log')!r})); Supervisor([child]).start(0.0)\n"
        "print(child.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    until(lambda: "up" in (module_folder / "log").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(pid))


def test_ports_are_probed():
    port = free_port()
    assert why_not_listen("127.0.0.1", port) is None
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert why_not_listen("127.0.0.1", port) == "is taken"
    assert "cannot be had" in why_not_listen("999.1.1.1", port)
