"""Prompt tokens without a tokenizer: bytes per token, learned per model from the counts that the runtime returns."""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98
"""Weight of the past at each correction: about the last 50 prompts count."""
PRIOR_ASCII = 0.25
PRIOR_OTHER = 0.4
"""Tokens per byte before anything was learned: a quarter of a token a letter, a good one a CJK character."""
RIDGE = 256.0
"""Bytes that the prior counts for."""
_LEAST, _MOST = 1 / 64, 4.0


@dataclass(slots=True)
class _Model:
    """Decayed normal equations of tokens ≈ a·ascii + b·other, with a ridge to the prior that one prompt outweighs."""

    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    at: float = 0.0
    bt: float = 0.0

    def observe(self, ascii_bytes: int, other_bytes: int, tokens: int) -> None:
        # 1 / size weighs all prompts by their length alone, not by its square: a single long one must not decide.
        weight = 1.0 / (ascii_bytes + other_bytes)
        self.aa = self.aa * DECAY + weight * ascii_bytes * ascii_bytes
        self.ab = self.ab * DECAY + weight * ascii_bytes * other_bytes
        self.bb = self.bb * DECAY + weight * other_bytes * other_bytes
        self.at = self.at * DECAY + weight * ascii_bytes * tokens
        self.bt = self.bt * DECAY + weight * other_bytes * tokens

    def ratios(self) -> tuple[float, float]:
        aa, bb = self.aa + RIDGE, self.bb + RIDGE
        at, bt = self.at + RIDGE * PRIOR_ASCII, self.bt + RIDGE * PRIOR_OTHER
        # Positive: the ridge makes the matrix positive definite.
        determinant = aa * bb - self.ab * self.ab
        return _clip((at * bb - bt * self.ab) / determinant), _clip((bt * aa - at * self.ab) / determinant)


class TokenEstimator:
    """Estimates per model name. Only names given to `observe` are kept, from a closed set (the pools)."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def estimate(self, model: str, text: str | bytes) -> int:
        """Prompt tokens of `text`, at least 1."""
        ascii_bytes, other_bytes = byte_kinds(text)
        per_ascii, per_other = self._models.get(model, _UNTAUGHT).ratios()
        return max(1, round(ascii_bytes * per_ascii + other_bytes * per_other))

    def observe(self, model: str, text: str | bytes, tokens: int) -> None:
        """Corrects the estimate by an exact count (header `header_names.PROMPT_TOKENS`); ignores one below 1."""
        ascii_bytes, other_bytes = byte_kinds(text)
        if tokens >= 1 and ascii_bytes + other_bytes:
            self._models.setdefault(model, _Model()).observe(ascii_bytes, other_bytes, tokens)


def byte_kinds(text: str | bytes) -> tuple[int, int]:
    """Bytes of UTF-8 that are ASCII, and those that are not."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if data.isascii():
        return len(data), 0
    ascii_bytes = len(data) - len(data.translate(None, _ASCII))
    return ascii_bytes, len(data) - ascii_bytes


def _clip(ratio: float) -> float:
    return min(max(ratio, _LEAST), _MOST)


_UNTAUGHT = _Model()
_ASCII = bytes(range(128))
