"""What an emulated accelerator can carry, by pencil: the arithmetic that the product's decisions are held against.

It shares no code with the product. Iterations last exactly t(p, n, c) = a + b·p + d·n + e·c seconds for p prefill
tokens, n decoding sequences and c tokens of context, and all requests have the same lengths, so everything follows from
four numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Seconds: of an empty iteration, and for each prefill token, decoding sequence and token of context."""

    a: float
    b: float
    d: float
    e: float

    @property
    def pace(self) -> str:
        """As the runtime's --pace takes it."""
        return f"{self.a},{self.b},{self.d},{self.e}"

    def seconds(self, prefill: float, sequences: float, context: float) -> float:
        """t(p, n, c)."""
        return self.a + self.b * prefill + self.d * sequences + self.e * context


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one replica that keeps its promise and no more."""

    sequences: float
    """n*"""
    budget: float
    """p*: prefill tokens an iteration."""
    rate: float
    """λ*: requests per second."""

    def replicas(self, arrivals: float) -> int:
        """How many it takes for so many requests per second."""
        return math.ceil(arrivals / self.rate)


def solve(accelerator: Accelerator, *, prompt: int, output: int, tpot: float, share: float = 0.8) -> Answer:
    """n*, p* and λ* for requests of `prompt` and `output` tokens and a promise of `tpot` seconds a token.

    In each iteration n/output requests end and as many prompts are read, which may fill the `share` of the budget p. A
    full iteration (n sequences, p prompt tokens) lasts as long as was promised: T = a + b·p + d·n + e·n·context with p
    = n·prompt/(share·output).
    """
    context = prompt + (output + 1) / 2
    prefill_per_sequence = prompt / (share * output)
    sequences = (tpot - accelerator.a) / (
        accelerator.b * prefill_per_sequence + accelerator.d + accelerator.e * context
    )
    return Answer(sequences, sequences * prefill_per_sequence, sequences / (output * tpot))
