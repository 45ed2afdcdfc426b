"""The engine process: opens the model, measures it, then steps for as long as the server's end of the channel is open.

Started as ``python -m headway_runtime.engine.process FD`` with one end of a socket pair. It ignores SIGINT and SIGTERM,
which a terminal or a container sends to the whole group: the server ends it by closing the channel.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.scheduling_policies import by_name
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import EngineLimits
from headway_core.errors import HeadwayError
from headway_core.latency import StepTimeModel

from headway_runtime.engine.calibration import LEAST_BUDGET, LONGEST_ITERATION, Calibration
from headway_runtime.engine.engine import Engine, StepRecord
from headway_runtime.engine.engine_stats import EngineStats
from headway_runtime.engine.kv_sizing import choose_num_blocks
from headway_runtime.ipc.channel import ChannelClosed, EngineChannel
from headway_runtime.ipc.messages import Commands, Ready, StepReport
from headway_runtime.model.checkpoint import Checkpoint, open_checkpoint
from headway_runtime.model.kernels.library import kernels
from headway_runtime.model.model_runner import ModelRunner
from headway_runtime.pace import Pace
from headway_runtime.settings import EngineSettings, SettingsError

LOAD_INTERVAL = 0.05
"""Seconds between two snapshots of the load while steps follow one another."""
GPU_BUDGET, CPU_BUDGET = 8192, 512
"""Most prefill tokens that an unset budget becomes."""
_SPINS_ALLOWED = 1000


class EngineLoop:
    """An engine with its statistics, its step-time model and its log; built from settings, run on a channel.

    `report_progress` is called with a line of text at each step of the start.
    """

    def __init__(self, settings: EngineSettings, eos_ids: list[int], report_progress: Callable[[str], None]) -> None:
        began = time.monotonic()
        checkpoint = open_checkpoint(Path(settings.model), settings.dtype, settings.device)
        max_model_len, num_blocks = _sizes(settings, checkpoint)
        dtype = str(checkpoint.dtype).removeprefix("torch.")
        report_progress(
            f"loading {checkpoint.name} ({checkpoint.config.num_layers} layers, {dtype}) on {settings.device}"
        )
        runner = ModelRunner(
            checkpoint,
            max_num_seqs=settings.max_num_seqs + 1,  # calibration runs a prefill beside a full batch
            num_blocks=num_blocks,
            block_size=settings.block_size,
            max_model_len=max_model_len,
            device=settings.device,
            threads=settings.threads,
            eos_ids=eos_ids,
        )
        report_progress(
            f"loaded in {time.monotonic() - began:.1f} s; {num_blocks} KV blocks hold "
            f"{num_blocks * settings.block_size} tokens"
        )
        report_progress(f"layout of the matrices: {runner.layouts}")
        if settings.device == "cpu" and checkpoint.dtype == torch.float32 and isinstance(reason := kernels(), str):
            report_progress(f"serving without our own kernels, which is slower: {reason}")
        model = StepTimeModel()
        budget = _calibrate(settings, runner, model, num_blocks, max_model_len, report_progress)
        self.limits = EngineLimits(settings.max_num_seqs, budget, max_model_len, settings.block_size, num_blocks)
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=settings.block_size,
            knobs=Knobs(settings.max_num_seqs, budget),
            policy=by_name(settings.scheduling_policy, model),
            prefix_caching=settings.prefix_caching,
        )
        self.engine = Engine(
            runner,
            scheduler,
            model,
            limits=self.limits,
            prefix_caching=settings.prefix_caching,
            pad=None if settings.pace is None else Pace.parse(settings.pace).pad,
        )
        self._stats = EngineStats(scheduler, model, self.limits)
        self._runner = runner
        self._log: IO[str] | None = None
        if settings.iteration_log is not None:
            self._log = Path(settings.iteration_log).open("a", buffering=1)  # noqa: SIM115 -- open as long as the process
        self._applied = 0
        self._load_at = 0.0

    def ready(self) -> Ready:
        """What the server needs to know."""
        runner = self._runner
        return Ready(self.limits, runner.vocab_size, tuple(sorted(runner.eos_ids)), runner.kv_bytes_per_token)

    def run(self, channel: EngineChannel) -> None:
        """Steps until the channel closes; then ChannelClosed is raised."""
        spins = 0
        channel.send(StepReport(self._applied, load=self._stats.snapshot(time.monotonic())).pack())
        while True:
            if self.engine.idle:
                self._stats.mark_idle()
            messages = channel.receive(wait=self.engine.idle)
            for message in messages:
                self._apply(Commands.unpack(message))
            step = self.engine.step()
            spins = 0 if step is not None or self.engine.idle else spins + 1
            if spins > _SPINS_ALLOWED:
                raise RuntimeError("the scheduler holds sequences and plans nothing")
            if step is not None or messages:
                channel.send(self._report(step, after_commands=bool(messages)).pack())

    def _apply(self, commands: Commands) -> None:
        for finished in self.engine.apply(commands):
            self._stats.record_finished(finished)
        self._applied = commands.number

    def _report(self, step: StepRecord | None, *, after_commands: bool) -> StepReport:
        now = time.monotonic()
        if step is None:
            return StepReport(self._applied, ended=self.engine.take_ended(), load=self._stats.snapshot(now))
        for finished in step.finished:
            self._stats.record_finished(finished)
        self._stats.record_iteration(step.plan, step.load, began=step.began, ended=step.began + step.elapsed)
        if self._log is not None:
            try:
                self._log.write(json.dumps(self._log_entry(step)) + "\n")
            except OSError as error:  # a full disk is no reason to end requests
                log_progress(f"--iteration-log is written no further: {error}")
                self._log = None
        load = None
        if after_commands or self.engine.idle or now - self._load_at >= LOAD_INTERVAL:
            load, self._load_at = self._stats.snapshot(now), now
        return StepReport(self._applied, step.tokens, step.ended, step.elapsed, step.predicted, load)

    def _log_entry(self, step: StepRecord) -> dict[str, Any]:
        return {
            "plan": step.plan.plan_id,
            "began": round(step.began, 6),
            "seconds": round(step.elapsed, 6),
            "predicted": None if step.predicted is None else round(step.predicted, 6),
            "shape": asdict(step.plan.shape),
            "knobs": asdict(step.knobs),
            "running": step.load.running,
            "waiting": step.load.waiting,
            "freeBlocks": step.load.free_blocks,
        }


def log_progress(text: str) -> None:
    """A line of progress for whoever started this. Lost when the disk is full: serving goes on."""
    with contextlib.suppress(OSError):
        print(f"headway-runtime: engine: {text}", file=sys.stderr, flush=True)  # noqa: T201 -- progress is meant for people


def _sizes(settings: EngineSettings, checkpoint: Checkpoint) -> tuple[int, int]:
    """(max_model_len, num_blocks). Raises SettingsError when they cannot be had."""
    positions = checkpoint.config.max_positions
    if settings.max_model_len is not None and settings.max_model_len > positions:
        raise SettingsError(f"the model has {positions} positions, {settings.max_model_len} is more", "--max-model-len")
    wanted_len = settings.max_model_len or positions
    num_blocks = choose_num_blocks(settings, checkpoint, wanted_len)
    pool_tokens = num_blocks * settings.block_size
    remedy = "raise --kv-cache-memory-bytes or --num-blocks"
    if settings.max_model_len is not None and settings.max_model_len > pool_tokens:
        raise SettingsError(
            f"the KV pool holds {pool_tokens} tokens, {settings.max_model_len} is more: {remedy}", "--max-model-len"
        )
    if pool_tokens < 2:
        raise SettingsError(f"the KV pool would hold {pool_tokens} tokens: {remedy}", "--num-blocks")
    return min(wanted_len, pool_tokens), num_blocks


def _calibrate(
    settings: EngineSettings,
    runner: ModelRunner,
    model: StepTimeModel,
    num_blocks: int,
    max_model_len: int,
    report_progress: Callable[[str], None],
) -> int:
    """Teaches `model` how long iterations take; returns the prefill budget: the given one, or one that fits."""
    given = settings.prefill_token_budget
    if not settings.calibrate and given is not None:
        return given
    calibration = Calibration(
        runner,
        max_num_seqs=settings.max_num_seqs,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        pace=None if settings.pace is None else Pace.parse(settings.pace),
    )
    began = time.monotonic()
    at_most = CPU_BUDGET if settings.device == "cpu" else GPU_BUDGET
    guess = given or calibration.largest_budget(at_most)
    report_progress("measuring how long iterations take (some seconds)")

    def progress(done: int, shapes: int) -> None:
        if done and done % 6 == 0:
            report_progress(f"measured {done} of {shapes} shapes")

    calibration.run(model, guess, progress)
    budget = given
    if budget is None:
        fitting = model.largest_prefill(
            LONGEST_ITERATION, settings.max_num_seqs // 2, settings.max_num_seqs * 128, at_most=guess
        )
        budget = max(min(LEAST_BUDGET, guess), (fitting or 0) // 16 * 16)
    report_progress(f"measured in {time.monotonic() - began:.1f} s; prefill token budget {budget}")
    return budget


def _exit_with_server(server: socket.socket) -> None:
    """Ends this process when the server's end of the channel closes: loading and measuring read no messages."""
    poll = select.poll()
    poll.register(server, 0)  # A hang-up is reported whatever is asked for.
    poll.poll()
    os._exit(0)


def main() -> int:
    """Runs the process; exit status 0 when the channel closed, 2 when the model or the settings cannot be served."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_with_server, args=(server,), daemon=True).start()
    channel = EngineChannel(server)

    def report_progress(text: str) -> None:
        log_progress(text)
        channel.send({"progress": text})

    try:
        start = channel.receive(wait=True)[0]
        loop = EngineLoop(EngineSettings(**start["settings"]), start["eos_ids"], report_progress)
        gc.collect()
        gc.freeze()  # what is here by now stays: a collection that walked all of torch would hold up a step
        channel.send(loop.ready().pack())
        loop.run(channel)
    except ChannelClosed:
        return 0
    except HeadwayError as error:
        log_progress(f"cannot serve this: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
