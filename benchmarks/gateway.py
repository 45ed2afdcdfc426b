"""What the gateway costs: CPU per relayed chunk beside a bare byte relay, added latency, requests per core beside a
peer, streams held.

    python benchmarks/gateway.py chunks            100 streams, one chunk each every 20 ms, all at the same instant
    python benchmarks/gateway.py requests          small JSON answers; --litellm PATH/TO/bin/litellm adds the peer
    python benchmarks/gateway.py held              more and more streams, one chunk each per second

Every part runs in a process of its own: a scripted runtime, the relay under test, and the load. Only the relay's CPU
time is counted. The baseline of each table is measured in the same run; compare ratios, the machine is shared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MODEL = "m"
OTHER_FILES = 100
"""Files that a relay opens beside the two sockets of each stream: at most so many."""
_PROCESS_CPU_CLOCK = 2
"""In a clock's number behind the process's: CPUCLOCK_SCHED, see clock_getcpuclockid(3)."""
TRAFFIC = Path(__file__).with_name("gateway_traffic.py")


# ---------------------------------------------------------------- putting a run together


@contextlib.contextmanager
def process(*command: object) -> Iterator[tuple[psutil.Process, list[int]]]:
    """A part in a process of its own, once it has printed its ports."""
    running = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)
    try:
        yield psutil.Process(running.pid), [int(word) for word in running.stdout.readline().split()]
    finally:
        running.terminate()
        running.wait()


def part(*arguments: object) -> tuple[object, ...]:
    return (sys.executable, TRAFFIC, *arguments)


@contextlib.contextmanager
def gateway(ports: list[int]) -> Iterator[tuple[psutil.Process, int]]:
    with process(*part("gateway", *ports)) as (running, (port,)):
        time.sleep(1.0)
        yield running, port


def measured(relay: psutil.Process | None, *load: object, whole: bool = False) -> dict[str, float]:
    """Runs a load. `cpu` is what the relay used while it measured; with `whole`, from the load's first connection
    on."""
    before = _cpu(relay)
    running = subprocess.Popen([str(word) for word in part(*load)], stdout=subprocess.PIPE, text=True)
    running.stdout.readline()
    before = before if whole else _cpu(relay)
    result = json.loads(running.stdout.readline())
    result["cpu"] = _cpu(relay) - before
    result["rss"] = relay.memory_info().rss / 2**20 if relay else 0.0
    running.wait()
    return result


def _cpu(relay: psutil.Process | None) -> float:
    """CPU seconds so far, from the kernel's clock of that process: what psutil reads goes in steps of 10 ms, a tenth of
    a round."""
    return time.clock_gettime((~relay.pid << 3) | _PROCESS_CPU_CLOCK) if relay else 0.0


def chunks(rounds: int, each: int) -> None:
    """CPU per chunk and added latency, synchronised streams; the arms alternate."""
    streams = 100
    print(
        f"{streams} streams x {each} chunks every 20 ms, all at the same instant; {rounds} rounds, arms alternating\n"
    )
    print("| relay | chunks/s | p50 / p99 ms | added p50 / p99 ms | CPU us per chunk | over bare |")
    print("|---|---|---|---|---|---|")
    sums: dict[str, list[dict[str, float]]] = {"none": [], "bare": [], "gateway": []}
    with contextlib.ExitStack() as stack:
        _, ports = stack.enter_context(process(*part("upstream", each, 0.02, 0)))
        bare_process, (bare_port,) = stack.enter_context(process(*part("bare", ports[0])))
        gateway_process, gateway_port = stack.enter_context(gateway(ports))
        for _ in range(rounds + 1):
            sums["none"].append(measured(None, "streams", ports[0], streams, 0, whole=True))
            sums["bare"].append(measured(bare_process, "streams", bare_port, streams, 0, whole=True))
            sums["gateway"].append(measured(gateway_process, "streams", gateway_port, streams, 0, whole=True))
    costs = {}
    for arm, (_, *results) in sums.items():  # the first round warms up
        count = sum(result["chunks"] for result in results)
        rate = count / sum(result["seconds"] for result in results)
        p50, p99 = (sorted(result[name] for result in results)[len(results) // 2] for name in ("p50", "p99"))
        if arm == "none":
            direct = (p50, p99)
        costs[arm] = sum(result["cpu"] for result in results) / count * 1e6
        ratio = f"{costs[arm] / costs['bare']:.2f}" if arm != "none" else ""
        added = "" if arm == "none" else f"{p50 - direct[0]:.2f} / {p99 - direct[1]:.2f}"
        cost = "" if arm == "none" else f"{costs[arm]:.0f}"
        print(f"| {arm} | {rate:.0f} | {p50:.2f} / {p99:.2f} | {added} | {cost} | {ratio} |")


def requests(litellm: Path | None, seconds: float) -> None:
    """Small JSON answers, closed loop: requests per second of one core."""
    connections = 32
    print(f"{connections} connections, closed loop, {seconds:g} s each\n")
    print("| relay | requests/s | requests per CPU-second | p50 / p99 ms | CPU us per request |")
    print("|---|---|---|---|---|")
    with process(*part("upstream", 1, 1.0, 0)) as (_, ports):
        with process(*part("bare", ports[0])) as (running, (port,)):
            _request_row("bare", measured(running, "requests", port, connections, seconds, ""))
        with gateway(ports) as (running, port):
            _request_row("gateway", measured(running, "requests", port, connections, seconds, ""))
        if litellm is not None:
            with peer(litellm, ports[0]) as (running, port):
                _request_row(
                    "litellm proxy", measured(running, "requests", port, connections, seconds, "sk-bench-1234")
                )


def _request_row(name: str, result: dict[str, float]) -> None:
    rate, per_cpu = result["requests"] / result["seconds"], result["requests"] / result["cpu"]
    print(f"| {name} | {rate:.0f} | {per_cpu:.0f} | {result['p50']:.2f} / {result['p99']:.2f} | {1e6 / per_cpu:.0f} |")


@contextlib.contextmanager
def peer(litellm: Path, upstream_port: int) -> Iterator[tuple[psutil.Process, int]]:
    """litellm's proxy with one worker, before the same scripted runtime."""
    port = 4519
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"openai/{MODEL}",
                    "api_base": f"http://127.0.0.1:{upstream_port}/v1",
                    "api_key": "x",
                },
            }
        ],
        "general_settings": {"master_key": "sk-bench-1234"},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps(config))
        command = [
            str(litellm),
            "--config",
            str(file),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--num_workers",
            "1",
            "--telemetry",
            "False",
        ]
        running = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "LITELLM_LOG": "ERROR"}
        )
        try:
            _until_listening(port)
            yield psutil.Process(running.pid), port
        finally:
            running.terminate()
            running.wait()


def _until_listening(port: int) -> None:
    for _ in range(240):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            time.sleep(2.0)
            return
        time.sleep(0.5)
    raise SystemExit("litellm did not start")


def held(seconds: float) -> None:
    """Streams held at once: one chunk per second each, spread over the second, as many as the limit of open files
    permits up to 10,000."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(10_000, (files - OTHER_FILES) // 2)
    print(
        f"one chunk per second and stream, spread over the second; a process may open {files} files, so a relay "
        f"holds {most} streams\n"
    )
    print("| streams | relay | chunks/s | p50 / p99 ms | p50 over bare | CPU of one core | memory MiB |")
    print("|---|---|---|---|---|---|---|")
    with process(*part("upstream", 100_000, 1.0, 1)) as (_, ports):
        for count in (*(step for step in (100, 1_000, 2_500, 5_000) if step < most), most):
            with process(*part("bare", ports[0])) as (running, (port,)):
                direct = measured(running, "streams", port, count, seconds)
            _held_row(count, "bare", direct, direct)
            with gateway(ports) as (running, port):
                _held_row(count, "gateway", measured(running, "streams", port, count, seconds), direct)


def _held_row(count: int, relay: str, result: dict[str, float], bare: dict[str, float]) -> None:
    broken = f" ({result['broken']} broken)" if result["broken"] else ""
    over = "" if result is bare else f"{result['p50'] / bare['p50']:.2f}"
    print(
        f"| {count}{broken} | {relay} | {result['chunks'] / result['seconds']:.0f} | {result['p50']:.2f} / "
        f"{result['p99']:.2f} | {over} "
        f"| {result['cpu'] / result['seconds']:.0%} | {result['rss']:.0f} |",
        flush=True,
    )
    time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chunks", "requests", "held"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=64, help="chunks per stream")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--litellm", type=Path)
    given = parser.parse_args()
    if given.what == "chunks":
        chunks(given.rounds, given.each)
    elif given.what == "requests":
        requests(given.litellm, given.seconds)
    else:
        held(given.seconds)


if __name__ == "__main__":
    main()
