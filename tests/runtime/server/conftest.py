"""Real runtimes as processes of their own: started through the command, asked over sockets, stopped by signals."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from headway_core.contract import documents

QUICK = ("--no-calibration", "--prefill-token-budget", "64", "--max-num-seqs", "8", "--threads", "1")
START_SECONDS = 120
ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements" / "openai-older.txt"


def eventually(condition, seconds=30.0, what="the condition"):
    """The first true value of `condition()`; fails the test when there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come true within {seconds} s")


@dataclass
class Runtime:
    """One started runtime."""

    process: subprocess.Popen
    log_path: object
    url: str = ""
    control: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    @property
    def log(self):
        return self.log_path.read_text()

    @property
    def address(self):
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def completion(self, **body):
        return self.client.post(f"{self.url}/v1/completions", json=body)

    def chat(self, text="hello world", **body):
        return self.client.post(
            f"{self.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": text}], **body}
        )

    def records(self, path, body, headers=None):
        """The data records of a stream, parsed; the last one must be [DONE] and is left out."""
        with self.client.stream(
            "POST", f"{self.url}{path}", json={**body, "stream": True}, headers=headers
        ) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def connect(self, body=None, *, path="/v1/completions", headers=(), raw=None):
        """A socket on which a request was sent (or the bytes of `raw`), its answer unread."""
        sock = socket.create_connection(self.address, timeout=60)
        if raw is None:
            payload = json.dumps(body).encode()
            head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(payload)}", *headers]
            raw = "\r\n".join(head).encode() + b"\r\n\r\n" + payload
        sock.sendall(raw)
        return sock

    def load(self):
        return documents.load_runtime_report(self.client.get(f"{self.control}/load").content)

    def metrics(self):
        return self.client.get(f"{self.control}/metrics").text

    def metric(self, name, **labels):
        """The value of one sample; 0 when it was never observed."""
        inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        sample = re.escape(f"{name}{{{inner}}}" if labels else name)
        found = re.search(rf"^{sample} (\S+)$", self.metrics(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def is_idle(self):
        report = self.load()
        return (report.running, report.waiting, report.free_blocks) == (0, 0, report.limits.total_blocks) and report

    def assert_idle(self, seconds=30.0):
        """Nothing runs, nothing waits, every block is free or reusable."""
        return eventually(self.is_idle, seconds, f"idleness (the report says {self.load()})")

    def children(self):
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


class Runtimes:
    """Starts runtimes, and ends those that a test left running."""

    def __init__(self, folder):
        self._folder = folder
        self._started = []

    def __call__(self, model, *flags, quick=True, wait=True, env=None):
        log_path = self._folder / f"runtime-{len(self._started)}.log"
        command = [
            sys.executable,
            "-m",
            "headway_runtime",
            "--port",
            "0",
            "--control-port",
            "0",
            "--served-model-name",
            "tiny",
        ]
        command += [*(() if model is None else ("--model", str(model))), *(QUICK if quick else ()), *map(str, flags)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, **(env or {})})
        runtime = Runtime(process, log_path)
        self._started.append(runtime)
        if wait:
            self.await_ready(runtime)
        return runtime

    def await_ready(self, runtime):
        def ready():
            assert runtime.process.poll() is None, runtime.log
            return "ready: http" in runtime.log

        eventually(ready, START_SECONDS, "readiness")
        found = re.search(r"listening on (http://\S+), control on (http://\S+)", runtime.log)
        runtime.url, runtime.control = found[1], found[2]

    def close(self):
        for runtime in self._started:
            runtime.client.close()
            if runtime.process.poll() is None:
                runtime.process.terminate()
        for runtime in self._started:
            try:
                runtime.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                for child in runtime.children():
                    child.kill()
                runtime.process.kill()
                runtime.process.wait()


@pytest.fixture(scope="session")
def eventual():
    return eventually


@pytest.fixture(scope="module")
def start_runtime(tmp_path_factory):
    """Starts a runtime for this module's tests: ``start_runtime(folder, "--num-blocks", 64)``."""
    runtimes = Runtimes(tmp_path_factory.mktemp("runtimes"))
    yield runtimes
    runtimes.close()


@pytest.fixture(scope="session")
def shared_runtime(tmp_path_factory, tiny_checkpoint):
    """One tiny runtime for every test that only asks and leaves nothing behind. Context 4,096, 8 slots, budget 64."""
    runtimes = Runtimes(tmp_path_factory.mktemp("shared"))
    yield runtimes(
        tiny_checkpoint("llama", max_position_embeddings=4096), "--num-blocks", 1024, "--max-body-bytes", "2MiB"
    )
    runtimes.close()


@pytest.fixture
def runtime(shared_runtime):
    """The shared runtime, idle before and after."""
    shared_runtime.assert_idle()
    yield shared_runtime
    shared_runtime.assert_idle()


@pytest.fixture(scope="session")
def older_client():
    """A folder with the older client in it, installed once from the pinned and hashed requirements."""
    version = next(
        line.split("==")[1].split()[0] for line in REQUIREMENTS.read_text().splitlines() if line.startswith("openai==")
    )
    folder = ROOT / ".cache" / f"openai-{version}"
    if not (folder / "openai" / "_version.py").is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
        ]
        subprocess.run([*command, "--target", str(folder), "-r", str(REQUIREMENTS)], check=True)
    return folder, version


@pytest.fixture(scope="session")
def run_client():
    """Runs a program of the client's against a server and returns the version that it used; what failed in it fails the
    test."""

    def run(url, folder=None, program="official_client.py"):
        env = {**os.environ, **({"PYTHONPATH": str(folder)} if folder else {})}
        command = [sys.executable, str(Path(__file__).with_name(program)), url]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run
