"""The runtime's own tests of the official client, run once more through a gateway: their parts are loaded from
there."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

RUNTIME_TESTS = Path(__file__).parents[2] / "runtime"


def _load(path):
    spec = importlib.util.spec_from_file_location(f"loaded_for_gateway_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_checkpoints = _load(RUNTIME_TESTS / "conftest.py")
_runtimes = _load(RUNTIME_TESTS / "server" / "conftest.py")

tiny_checkpoint = _checkpoints.tiny_checkpoint
eventual = _runtimes.eventual
older_client = _runtimes.older_client
run_client = _runtimes.run_client


@pytest.fixture(scope="session")
def two_runtimes(tmp_path_factory, tiny_checkpoint):
    """Two replicas of one tiny model."""
    runtimes = _runtimes.Runtimes(tmp_path_factory.mktemp("replicas"))
    folder = tiny_checkpoint("llama", max_position_embeddings=4096)
    both = [runtimes(folder, "--num-blocks", 1024, "--replica-id", name, wait=False) for name in ("tiny-0", "tiny-1")]
    try:
        for runtime in both:
            runtimes.await_ready(runtime)
        yield both
    finally:
        runtimes.close()


@pytest.fixture(scope="session")
def gateway_url(two_runtimes, tmp_path_factory):
    """A gateway process in front of them, ready."""
    places = ",".join(f"127.0.0.1:{runtime.address[1]}/{runtime.control.rsplit(':', 1)[1]}" for runtime in two_runtimes)
    log_path = tmp_path_factory.mktemp("gateway") / "log"
    command = [
        sys.executable,
        "-m",
        "headway_gateway",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--control-port",
        "0",
        "--pool",
        f"p={places}",
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    port = _runtimes.eventually(lambda: _serving_port(log_path.read_text()), 30, "the gateway's start")
    url = f"http://127.0.0.1:{port}"
    _runtimes.eventually(lambda: httpx.get(f"{url}/status.json").json()["pools"][0]["ready"] == 2, 30, "both replicas")
    yield url
    process.terminate()
    assert process.wait(30) == 0


def _serving_port(text):
    return text.split("serving on http://127.0.0.1:")[1].split(" ")[0] if "serving on" in text else None
