"""How one request wants its tokens chosen: `SamplingParams`, validated once, then only read.

Nothing here knows logits, tensors or HTTP. JSON forms (null as "unset", ``stop`` strings, ``n``) are the server's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headway_core.errors import RequestError

GREEDY_BELOW = 1e-6
"""A temperature under this is greedy: a gap of 1e-4 between two logits is then already e^100 in odds."""
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
BIAS_LIMIT = 100.0
SEED_RANGE = (-(2**63), 2**63 - 1)
_WIDEST = 2**31 - 1
"""No vocabulary and no context reaches it, and the channel to the engine carries no number beyond 64 bits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the sampler. Raises RequestError, `field` naming the parameter, for a wrong type or range.

    The order of effects is: repetition, presence and frequency penalty; logit bias; `min_tokens`; temperature; then
    top-k, top-p and min-p, each over the survivors of the one before. At least one token always survives.
    """

    temperature: float = 1.0
    """0 … 100. Below `GREEDY_BELOW` the most likely token is taken, the lowest id among equals."""
    top_p: float = 1.0
    """0 … 1: the smallest set of most likely tokens that holds this probability. 0 keeps one token, so it is greedy."""
    top_k: int = 0
    """How many of the most likely tokens to keep; 0 and -1 mean all, and more than the vocabulary means all."""
    min_p: float = 0.0
    """0 … 1: tokens less likely than this fraction of the most likely one are dropped."""
    repetition_penalty: float = 1.0
    """0.01 … 100: divides the positive and multiplies the negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """-2 … 2, subtracted once from the logit of each token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 … 2, subtracted once for each time the output holds the token."""
    seed: int | None = None
    """Any int64; drawn on acceptance where the client gave none, so that a recomputed token is the same token."""
    choice: int = 0
    """Which of the request's `n` completions this is: choices of one seed differ."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, -100 … 100) pairs, added to the logits."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output besides the model's own end tokens."""
    ignore_eos: bool = False
    """The model's end tokens do not end the output; `stop_token_ids` still do."""
    min_tokens: int = 0
    """No token that would end the output is sampled before the output holds this many."""
    max_tokens: int | None = None
    """At most this many tokens; None where the request did not say."""
    logprobs: int | None = None
    """None: no log-probabilities. k ≥ 0: that of the chosen token and of the k most likely ones."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, MAX_TEMPERATURE),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            object.__setattr__(self, name, _number(getattr(self, name), name, low, high))
        object.__setattr__(self, "top_k", min(_whole(self.top_k, "top_k", -1, None), _WIDEST))
        _whole(self.choice, "choice", 0, _WIDEST)
        _whole(self.min_tokens, "min_tokens", 0, _WIDEST)
        if self.seed is not None:
            _whole(self.seed, "seed", *SEED_RANGE)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 1, None)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"must not exceed max_tokens: {self.min_tokens} > {self.max_tokens}", "min_tokens")
        if self.logprobs is not None:
            _whole(self.logprobs, "logprobs", 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"must be true or false, not {self.ignore_eos!r}", "ignore_eos", "invalid_type")
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """No randomness: the most likely token (after penalties and bias) is taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalized(self) -> bool:
        """The logits depend on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError for an id that the model does not have."""
        biased = [token for token, _ in self.logit_bias]
        for name, ids in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise RequestError(
                        f"token id {token} is not in the vocabulary: ids run from 0 to {vocab_size - 1}", name
                    )

    def ending_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end this output, given the model's own end tokens."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | frozenset(eos_ids)


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """The JSON form ``{"<token id>": bias}`` as pairs. Raises RequestError."""
    if not isinstance(value, Mapping):
        raise RequestError(
            f"must be an object of token ids and numbers, not {type(value).__name__}", "logit_bias", "invalid_type"
        )
    pairs: list[tuple[int, float]] = []
    for key, bias in value.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise RequestError(f"keys must be token ids written as whole numbers, not {text[:40]!r}", "logit_bias")
        pairs.append((int(text), bias))
    return _bias_pairs(pairs)


def _number(value: object, name: str, low: float, high: float) -> float:
    rule = f"must be a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{rule}, not {_shown(value)}", name, "invalid_type")
    if not low <= value <= high:  # NaN is not within any range
        raise RequestError(f"{rule}, not {_shown(value)}", name)
    return float(value)


def _whole(value: object, name: str, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"must be a whole number, not {_shown(value)}", name, "invalid_type")
    if value < low:
        raise RequestError(f"must be at least {low}, not {_shown(value)}", name)
    if high is not None and value > high:
        raise RequestError(f"must be at most {high}, not {_shown(value)}", name)
    return value


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _stop_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"must be a list of token ids, not {type(value).__name__}", "stop_token_ids", "invalid_type")
    if len(value) > MAX_STOP_TOKENS:
        raise RequestError(f"holds {len(value)} ids, at most {MAX_STOP_TOKENS} are allowed", "stop_token_ids")
    return tuple(_whole(token, "stop_token_ids", 0, _WIDEST) for token in value)


def _bias_pairs(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"must be (token id, bias) pairs, not {type(value).__name__}", "logit_bias")
    pairs: dict[int, float] = {}
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RequestError("must be (token id, bias) pairs", "logit_bias")
        token = _whole(pair[0], "logit_bias", 0, _WIDEST)
        if token in pairs:
            raise RequestError(f"names token id {token} twice", "logit_bias")
        pairs[token] = _number(pair[1], "logit_bias", -BIAS_LIMIT, BIAS_LIMIT)
    return tuple(pairs.items())
