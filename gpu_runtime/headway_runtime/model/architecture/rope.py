"""Rotary position embeddings: reading their many spellings, and the frequencies that they stand for.

Formulas: RoPE, arXiv 2104.09864; linear scaling divides the frequencies by `factor`; YaRN, arXiv 2309.00071
(NTK-by-parts and the attention factor 0.1·ln(s) + 1); llama3, the piecewise rule of Llama 3.1. `dynamic` changes its
frequencies with the length, cached keys do not: it is accepted up to the original length, where it is the plain form.

Nothing here knows of tensors' names, of attention or of a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from headway_core.errors import CheckpointError

_KNOWN = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """One model's rotary embedding. Fields that a kind does not use keep their defaults."""

    kind: str
    theta: float
    factor: float = 1.0
    original_length: int = 0
    """Positions that the model was first trained on."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def max_positions(self, declared: int) -> int:
        """Positions that this embedding can serve, given the config's `max_position_embeddings`.

        linear: declared · factor; yarn: original · factor; others: as declared (of llama3 that is the extended length).
        """
        if self.kind == "linear":
            return int(declared * self.factor)
        if self.kind == "yarn":
            return int(self.original_length * self.factor)
        return declared


def read_rope(config: Mapping[str, Any], path: str, max_positions: int) -> Rope:
    """The rotary embedding of a config.json: of `rope_scaling` (with `type` or `rope_type`), or the newer
    `rope_parameters` (with `rope_theta` too). Raises CheckpointError for a kind or a value that we do not compute."""
    scaling, parameters = config.get("rope_scaling"), config.get("rope_parameters")
    where = "rope_scaling" if scaling else "rope_parameters"
    given = scaling or parameters or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(path, where, f"must be an object or null, not {given!r}")
    if scaling and parameters and _kind(scaling) != _kind(parameters):
        reason = f"contradicts rope_parameters: {_kind(scaling)!r} here, {_kind(parameters)!r} there; remove one"
        raise CheckpointError(path, where, reason)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise CheckpointError(
            path, where, "a different embedding for each layer type is not supported: give one for all layers"
        )

    def number(key: str, default: float | None) -> float:
        value = given.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(path, f"{where}.{key}", f"must be a number above 0, not {value!r}")
        return float(value)

    kind = _kind(given)
    if kind not in _KNOWN:
        raise CheckpointError(path, f"{where}.rope_type", f"must be one of {', '.join(_KNOWN)}, not {kind!r}")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(
            path, "partial_rotary_factor", f"rotating a part of each head is not supported: must be 1, not {partial!r}"
        )
    theta = given.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        theta = 10000.0
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
        raise CheckpointError(path, "rope_theta", f"must be a number above 0, not {theta!r}")
    if kind in ("default", "dynamic"):
        return Rope(kind, float(theta), original_length=max_positions)
    factor = number("factor", None)
    if factor < 1:
        raise CheckpointError(path, f"{where}.factor", f"must be at least 1, not {factor}")
    if kind == "linear":
        return Rope(kind, float(theta), factor, max_positions)
    original = config.get("original_max_position_embeddings")
    original = original or int(number("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = number("low_freq_factor", None), number("high_freq_factor", None)
        if high <= low:
            raise CheckpointError(
                path, f"{where}.high_freq_factor", f"must be above low_freq_factor = {low}, not {high}"
            )
        return Rope(kind, float(theta), factor, original, low, high)
    return Rope(
        kind,
        float(theta),
        factor,
        original,
        beta_fast=number("beta_fast", None) if given.get("beta_fast") else 32.0,
        beta_slow=number("beta_slow", None) if given.get("beta_slow") else 1.0,
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=bool(given.get("truncate", True)),
    )


def _kind(given: Mapping[str, Any]) -> Any:
    return given.get("rope_type", given.get("type", "default"))


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(float(given["mscale"])) / mscale(float(given["mscale_all_dim"]))
    return mscale(1.0)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of a head's dimensions: float32 (head_dim / 2,)."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = (rope.original_length / wavelength - low) / (high - low)
        smooth = smooth.clamp(0, 1)  # 0: long waves, fully scaled; 1: short waves, untouched
        return (1 - smooth) * plain / rope.factor + smooth * plain
    if rope.kind == "yarn":
        low, high = (_dimension_of(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        ramp = ramp.clamp(0, 1)
        return plain / rope.factor * ramp + plain * (1 - ramp)
    return plain


def _dimension_of(turns: float, rope: Rope, head_dim: int) -> float:
    """The dimension whose wave makes `turns` turns over the original length (YaRN, section 3.2)."""
    return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class RopeTable:
    """cos and sin of every position served, (positions, head_dim) each, halves alike, the attention factor applied."""

    def __init__(self, rope: Rope, head_dim: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
        angles = torch.cat((angles, angles), dim=-1)  # (positions, head_dim)
        self.cos = (angles.cos() * rope.attention_factor).to(device, dtype)
        self.sin = (angles.sin() * rope.attention_factor).to(device, dtype)
        self.sin[:, : head_dim // 2].neg_()  # so that x·cos + swap_halves(x)·sin rotates

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for these positions, ready to multiply (tokens, heads, head_dim)."""
        return self.cos.index_select(0, positions).unsqueeze(1), self.sin.index_select(0, positions).unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (tokens, heads, head_dim) by (tokens, 1, head_dim) of `RopeTable.at`, pairing i with i + head_dim / 2."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
