"""`headway up` and `headway calibrate` where things go wrong around them: a tiny model, real processes."""

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest
import tiny_model
from headway_cli.supervisor import free_port
from transformers import LlamaConfig, LlamaForCausalLM

HEADWAY = [sys.executable, "-m", "headway_cli"]
NAME = "someone's model with spaces"
SMALL = ("--max-num-seqs", "4", "--num-blocks", "64", "--threads", "1")
AT_ONCE = ("--", *SMALL, "--no-calibration", "--prefill-token-budget", "64")


def until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what()}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """One whose iterations take so long that measuring them takes longer than anybody waits here."""
    folder = tiny_model.write(tmp_path_factory.mktemp("models") / "large")
    config = LlamaConfig.from_pretrained(
        folder, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Running:
    """A command of `headway` with its output in a file, and the processes that it started."""

    def __init__(self, folder, *arguments, stdout=None):
        self.folder = folder
        self.output = folder / "output"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        # Nothing can be made in that home: a folder that is only read would be written all the same by root.
        env = {**os.environ, "HOME": "/proc/self", "TMPDIR": str(self.temporary)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*HEADWAY, *map(str, arguments)], stdout=stdout or output, stderr=output, env=env
            )

    @property
    def said(self):
        return self.output.read_text()

    def wait_for(self, pattern, seconds=120):
        return until(lambda: re.search(pattern, self.said), seconds, lambda: f"{pattern!r} in:\n{self.said}")

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name):
        """The process that runs for replica `name`, or None while there is none."""
        return next((child for child in self.children() if name in " ".join(_command(child))), None)

    def interrupt(self):
        """Ctrl-C; the exit status, once nothing that was started is left."""
        children = self.children()
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(60)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive, f"left behind: {alive}"
        return status


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return ()


@pytest.fixture
def headway(tmp_path):
    """`headway(name, *arguments)`: starts a command, and ends it if the test did not."""
    started = []

    def start(name, *arguments, **options):
        folder = tmp_path / name
        folder.mkdir()
        started.append(Running(folder, *arguments, **options))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()


def up(model, port):
    return ("up", "--model", model, "--port", port, "--drain-seconds", "1")


def ask(port):
    body = {"model": NAME, "prompt": "river stone", "max_tokens": 2}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code


@pytest.mark.slow
def test_two_at_a_time_serve_on_though_a_replica_is_killed_and_killed_again_and_logs_and_output_find_no_room(
    headway, tmp_path, model
):
    state, ports = tmp_path / "state", [free_port(), free_port()]
    state.mkdir()
    for log in ("gateway.log", "replica-1.log"):
        (state / log).symlink_to("/dev/full")
    first = headway("first", *up(model, ports[0]), "--state", state, *AT_ONCE)
    second = headway("second", *up(model, ports[1]), *AT_ONCE, stdout=subprocess.PIPE)
    assert f"starting 1 x {NAME}".encode() in second.process.stdout.readline()
    second.process.stdout.close()  # As `| head -1` does.
    first.wait_for("ready: http")
    assert ask(ports[0]) == 200
    curl = re.search(r"^curl .*$", first.said, re.MULTILINE)[0]
    printed = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60)
    assert '"chat.completion"' in printed.stdout, "the curl that was printed works as it stands"
    for kill in range(3):
        until(lambda: first.child("headway_runtime"), 60, lambda: "the replica").kill()
        until(
            lambda kill=kill: first.said.count("replica-1 ended (signal SIGKILL)") == kill + 1, 60, lambda: first.said
        )
        until(lambda kill=kill: first.said.count("replica-1 started again") == kill + 1, 60, lambda: first.said)
    until(lambda: ask(ports[0]) == 200, 60, lambda: f"an answer after three kills; said:\n{first.said}")
    until(lambda: ask(ports[1]) == 200, 60, lambda: "an answer of the one that nobody listens to")
    assert first.interrupt() == second.interrupt() == 0
    assert not list(second.temporary.iterdir()), "its state was a folder of its own, which goes with it"
    assert "Traceback" not in first.said + second.said


@pytest.mark.parametrize("phase", ["starting", "loading", "measuring"])
def test_ctrl_c_before_it_is_ready_leaves_nothing_behind(headway, slow_model, phase):
    running = headway("up", *up(slow_model, free_port()))
    if phase == "starting":
        running.wait_for("starting 1 x")
    elif phase == "loading":
        running.wait_for(r"\[ *\d+\.\d s\] replica-1: the model is being loaded")
    else:
        # Minutes, with a large model, in which a person wants to see that something happens.
        running.wait_for(r"\[ *\d+\.\d s\] replica-1: (measuring how long iterations take|measured \d+ of)")
    assert running.interrupt() == 0
    assert "stopping" in running.said and "ready: http" not in running.said and "Traceback" not in running.said
    assert not list(running.temporary.iterdir())


def test_ctrl_c_while_it_measures_leaves_nothing_behind_and_says_so(headway, slow_model, tmp_path):
    running = headway("calibrate", "calibrate", "--model", slow_model, "--json", tmp_path / "replica.json")
    running.wait_for("the model is being loaded")
    running.wait_for("measuring how long iterations take|measured [0-9]+ of")
    assert running.interrupt() == 130
    assert "headway calibrate: interrupted" in running.said and "Traceback" not in running.said
    assert not list(running.temporary.iterdir()) and not (tmp_path / "replica.json").exists()
