"""What server and engine process say to each other: dataclasses, and the plain maps that `ipc.channel` carries.

The server sends `Commands`; the engine sends `Ready` once and then a `StepReport` after each iteration (and one
whenever it applied commands without one). Token ids travel as int32 bytes. No text, no HTTP, no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from headway_core.contract.policy import Knobs
from headway_core.contract.reports import ClassLoad, EngineLimits, Mix, StepTimeReport

from headway_runtime.ipc.sampling_params import SamplingParams

TokenIds = npt.NDArray[np.int32]


class EndReason(Enum):
    """Why the engine ended a sequence by itself."""

    STOP = "stop"
    """An end token or a stop token; it is the last token reported."""
    LENGTH = "length"
    ERROR = "error"
    """This sequence alone cannot go on; the reason is in words."""


@dataclass(frozen=True, slots=True)
class AddSequence:
    """One sequence to generate. `arrival` is on the monotonic clock, which all processes of a machine share."""

    seq_id: int
    priority: int
    arrival: float
    group: int | None
    salt: bytes
    prompt: TokenIds
    max_tokens: int
    params: SamplingParams
    ttft_target: float | None = None
    tpot_target: float | None = None
    """Its class's targets in the policy in force, seconds, for scheduling policies that use them."""


@dataclass(frozen=True, slots=True)
class Commands:
    """All that the server wants since its last message; `number` counts these: see `StepReport.applied`."""

    number: int
    add: tuple[AddSequence, ...] = ()
    cancel: tuple[int, ...] = ()
    knobs: Knobs | None = None

    def pack(self) -> dict[str, Any]:
        """As a map for the channel."""
        return {
            "number": self.number,
            "add": [
                (
                    one.seq_id,
                    one.priority,
                    one.arrival,
                    one.group,
                    one.salt,
                    one.prompt.astype("<i4").tobytes(),
                    one.max_tokens,
                    {field.name: getattr(one.params, field.name) for field in fields(one.params)},
                    one.ttft_target,
                    one.tpot_target,
                )
                for one in self.add
            ],
            "cancel": list(self.cancel),
            "knobs": None if self.knobs is None else astuple(self.knobs),
        }

    @classmethod
    def unpack(cls, data: Mapping[str, Any]) -> Commands:
        """The inverse of `pack`."""
        return cls(
            number=data["number"],
            add=tuple(
                AddSequence(
                    seq_id,
                    priority,
                    arrival,
                    group,
                    salt,
                    np.frombuffer(prompt, "<i4"),
                    max_tokens,
                    SamplingParams(**params),
                    *targets,
                )
                for seq_id, priority, arrival, group, salt, prompt, max_tokens, params, *targets in data["add"]
            ),
            cancel=tuple(data["cancel"]),
            knobs=None if data["knobs"] is None else Knobs(*data["knobs"]),
        )


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's first message: what it was started with and what the server needs to check requests."""

    limits: EngineLimits
    vocab_size: int
    eos_ids: tuple[int, ...]
    kv_bytes_per_token: int

    def pack(self) -> dict[str, Any]:
        """As a map for the channel."""
        return {
            "limits": astuple(self.limits),
            "vocab_size": self.vocab_size,
            "eos_ids": list(self.eos_ids),
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }

    @classmethod
    def unpack(cls, data: Mapping[str, Any]) -> Ready:
        """The inverse of `pack`."""
        limits, eos_ids = EngineLimits(*data["limits"]), tuple(data["eos_ids"])
        return cls(limits, data["vocab_size"], eos_ids, data["kv_bytes_per_token"])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: of the token itself, and of the most likely ones, highest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One new token of a sequence. `cached` prompt tokens (from the prefix cache) come with the first one."""

    seq_id: int
    token: int
    cached: int | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that the engine holds no more. Cancelled ones are not reported: who cancelled knows."""

    seq_id: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load at one moment. Counters grow from boot."""

    running: int
    waiting: int
    free_slots: int
    free_blocks: int
    """Free plus cached and unreferenced."""
    cached_blocks: int
    """Unreferenced blocks that still hold a reusable prefix; part of `free_blocks`."""
    knobs: Knobs
    """In force, both set."""
    classes: tuple[ClassLoad, ...]
    prefill_rate: float | None
    completion_rate: float | None
    block_release_rate: float | None
    iteration_seconds: float | None
    longest_step_seconds: float | None
    """Predicted length of the heaviest iteration that the limits allow: the yardstick of health."""
    step_time: StepTimeReport | None
    mix: Mix | None
    iterations: int
    prompt_tokens: int
    output_tokens: int
    finished: int
    cached_prompt_tokens: int
    recomputed_tokens: int
    preemptions: Mapping[str, int]
    """``kind/cause`` → count."""

    def pack(self) -> dict[str, Any]:
        """As a map for the channel."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["knobs"] = astuple(self.knobs)
        data["classes"] = [astuple(one) for one in self.classes]
        data["step_time"] = None if self.step_time is None else astuple(self.step_time)
        data["mix"] = None if self.mix is None else astuple(self.mix)
        data["preemptions"] = dict(self.preemptions)
        return data

    @classmethod
    def unpack(cls, data: dict[str, Any]) -> EngineLoad:
        """The inverse of `pack`."""
        own = {
            "knobs": Knobs(*data["knobs"]),
            "classes": tuple(ClassLoad(*one) for one in data["classes"]),
            "step_time": None if data["step_time"] is None else StepTimeReport(*data["step_time"]),
            "mix": None if data["mix"] is None else Mix(*data["mix"]),
        }
        return cls(**data | own)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one iteration brought (or, without `elapsed`, what applying commands did)."""

    applied: int
    """Number of the last `Commands` taken in."""
    tokens: tuple[TokenOut, ...] = ()
    ended: tuple[Ended, ...] = ()
    elapsed: float | None = None
    predicted: float | None = None
    """Seconds that the step-time model had predicted for this iteration, before it ran."""
    load: EngineLoad | None = None

    def pack(self) -> dict[str, Any]:
        """As a map for the channel: token columns as int32 bytes, the rare rest as short lists."""
        return {
            "applied": self.applied,
            "seqs": np.array([one.seq_id for one in self.tokens], dtype="<i8").tobytes(),
            "ids": np.array([one.token for one in self.tokens], dtype="<i4").tobytes(),
            "cached": [(at, one.cached) for at, one in enumerate(self.tokens) if one.cached is not None],
            "logprobs": [
                (at, one.logprobs.logprob, one.logprobs.top)
                for at, one in enumerate(self.tokens)
                if one.logprobs is not None
            ],
            "ended": [(one.seq_id, one.reason.value, one.message) for one in self.ended],
            "elapsed": self.elapsed,
            "predicted": self.predicted,
            "load": None if self.load is None else self.load.pack(),
        }

    @classmethod
    def unpack(cls, data: Mapping[str, Any]) -> StepReport:
        """The inverse of `pack`."""
        seqs = np.frombuffer(data["seqs"], "<i8").tolist()
        ids = np.frombuffer(data["ids"], "<i4").tolist()
        cached = dict(data["cached"])
        logprobs = {
            at: TokenLogprobs(logprob, tuple((token, value) for token, value in top))
            for at, logprob, top in data["logprobs"]
        }
        return cls(
            applied=data["applied"],
            tokens=tuple(
                TokenOut(seq_id, token, cached.get(at), logprobs.get(at))
                for at, (seq_id, token) in enumerate(zip(seqs, ids, strict=True))
            ),
            ended=tuple(Ended(seq_id, EndReason(reason), message) for seq_id, reason, message in data["ended"]),
            elapsed=data["elapsed"],
            predicted=data["predicted"],
            load=None if data["load"] is None else EngineLoad.unpack(data["load"]),
        )
