"""`headway up` as a person runs it: real gateway, real engine, the default model."""

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from headway_cli.slo_file import DEFAULT
from headway_cli.supervisor import free_port

UP = [sys.executable, "-m", "headway_cli", "up"]
BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12, "temperature": 0}


def until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what()}"
        time.sleep(0.1)
    return found


def processes_naming(text):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as command:
                    if text.encode() in command.read().replace(b"\0", b" "):
                        found.append(int(entry))
            except OSError:
                continue
    return found


class Up:
    """One running `headway up` with its log."""

    def __init__(self, folder):
        self.port = free_port()
        self.slo = folder / "slo.yaml"
        self.slo.write_text(DEFAULT.read_text())
        self.state = folder / "state"
        self.output = folder / "output"
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = [
            "--port",
            str(self.port),
            "--slo",
            str(self.slo),
            "--state",
            str(self.state),
            "--",
            "--max-num-seqs",
            "4",
        ]
        self.process = subprocess.Popen([*UP, *arguments], stdout=self.output.open("wb"), stderr=subprocess.STDOUT)

    @property
    def said(self):
        return self.output.read_text()

    def wait_for(self, pattern, seconds=300):
        return until(lambda: re.search(pattern, self.said), seconds, lambda: f"{pattern!r} in:\n{self.said}")

    def ask(self, **changes):
        return httpx.post(f"{self.url}/v1/chat/completions", json={"model": self.model, **BODY, **changes}, timeout=60)

    @property
    def model(self):
        return httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    up = Up(tmp_path_factory.mktemp("up"))
    try:
        yield up
    finally:
        if up.process.poll() is None:
            up.process.kill()
        up.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_start_to_a_changed_promise_to_a_clean_stop(running):
    up = running
    up.wait_for(r"ready: http://127\.0\.0\.1:\d+")

    # The first request after "ready" is answered, and the printed curl works as it stands.
    answer = up.ask()
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    curl = re.search(r"^curl .*$", up.said, re.M)[0]
    printed = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, check=True, timeout=60)
    assert "Paris" in printed.stdout

    # So does the printed plan. Whether this machine can keep the promise at all is for the plan to say: 0 or 1.
    plan = [
        sys.executable,
        "-m",
        "headway_cli",
        "plan",
        "--watch",
        "1",
        "--prompt-tokens",
        "40",
        "--output-tokens",
        "12",
        "--from",
    ]
    planned = subprocess.run(
        [*plan, re.search(r"headway plan --from (\S+)`", up.said)[1]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert planned.returncode in (0, 1), planned.stdout + planned.stderr
    assert "40 prompt tokens" in planned.stdout and "Feasible" in planned.stdout

    # A broken edit changes nothing and is named by its line; a good one is in force at once.
    good = up.slo.read_text()
    up.slo.write_text(good.replace("target: 2s", "target: 2.5s"))
    up.wait_for(r"the promise stays as it was: .*slo\.yaml:\d+: spec\.objectives\.ttft\.target")
    assert up.ask().status_code == 200
    impossible = good.replace("target: 2s, perThousandPromptTokens: 3s", "target: 1ms")
    up.slo.write_text(impossible)
    up.wait_for(r"slo\.yaml changed")
    shed = until(
        lambda: (answer := up.ask()).status_code == 429 and answer,
        15,
        lambda: "a request that cannot keep 1 ms to be shed",
    )
    assert int(shed.headers["retry-after"]) >= 0
    assert shed.headers["x-headway-shed-reason"]
    up.slo.write_text(good)
    until(lambda: up.ask().status_code == 200, 15, lambda: "the old promise to admit again")

    # A replica that dies is started again, and that is said.
    (runtime, *_) = [pid for pid in processes_naming("headway_runtime") if pid in processes_naming(str(up.state))]
    os.kill(runtime, signal.SIGKILL)
    up.wait_for(r"replica-1 ended \(signal SIGKILL\); starting it again")
    up.wait_for(r"replica-1 started again")
    until(lambda: up.ask().status_code == 200, 120, lambda: f"an answer from the restarted replica; said:\n{up.said}")

    # Ctrl-C ends everything.
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    until(lambda: not processes_naming(str(up.state)), 10, lambda: "every process to be gone")
    with pytest.raises(httpx.ConnectError):
        httpx.get(up.url, timeout=5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--slo", "{slo}"], r"slo\.yaml:6: spec\.objectives\.ttft\.target"),
        (["--replicas", "0"], "--replicas"),
        (["--port", "{taken}"], "is taken: choose"),
        (["--threads", "0"], "--threads"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--drain-seconds", "inf"], "--drain-seconds"),
        (["--host", "999.1.1.1"], "999.1.1.1 cannot be had"),
        (["--state", "{used}"], "another `headway up` runs with it"),
        (["--state", "/dev/null/state"], "--state /dev/null/state"),
        (["--", "--max-num-seqs", "0"], "--max-num-seqs: must be from 1"),
        (["--", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_heavy_starts(tmp_path, arguments, words):
    (tmp_path / "slo.yaml").write_text(
        DEFAULT.read_text().replace("{target: 2s,", "\n      {target: 0s,").replace("ttft: \n", "ttft:\n")
    )
    lines = (tmp_path / "slo.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "0s" in text)
    with socket.socket() as taken, (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        filled = [
            text.format(slo=tmp_path / "slo.yaml", taken=taken.getsockname()[1], used=tmp_path) for text in arguments
        ]
        done = subprocess.run([*UP, *filled], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert re.search(words.replace(":6:", f":{line}:"), done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_help_teaches():
    done = subprocess.run([*UP, "--help"], capture_output=True, text=True, timeout=30, check=True)
    for word in ("--model", "--replicas", "--slo", "examples:", "ServingSLO"):
        assert word in done.stdout
