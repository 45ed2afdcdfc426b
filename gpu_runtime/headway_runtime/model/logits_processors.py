"""The logits processors of a request: penalties, bias, and end tokens held back until `min_tokens`.

The state of a slot is sparse: the ids it has seen, each once. Only a slot with penalties also holds one int32 count per
vocabulary entry (192 KiB at 49,152 entries), on the host, until it is freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_runtime.ipc.sampling_params import SamplingParams

_UNSEEN = -1


class LogitsProcessors:
    """One request's: fixed bias and held-back ids, and the tokens seen so far if it has penalties."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        ending_ids: Collection[int],
        prompt: NDArray[np.int32],
        output: NDArray[np.int32],
    ) -> None:
        self.params = params
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.held_back = np.array(sorted(ending_ids) if params.min_tokens else (), dtype=np.int64)
        self.output_length = len(output)
        self._counts: NDArray[np.int32] | None = None
        self._seen = np.empty(0, dtype=np.int64)
        self._num_seen = 0
        if params.penalized:
            self._counts = np.full(vocab_size, _UNSEEN, dtype=np.int32)
            sources = (prompt, output) if params.repetition_penalty != 1.0 else (output,)
            self._seen = np.unique(np.concatenate(sources)).astype(np.int64)
            self._num_seen = len(self._seen)
            self._counts[self._seen] = 0
            np.add.at(self._counts, output, 1)

    @property
    def idle(self) -> bool:
        """Nothing to change in the next logits."""
        return not len(self.bias_ids) and self._counts is None and not self.holds_back

    @property
    def holds_back(self) -> bool:
        """The output is still shorter than `min_tokens`."""
        return len(self.held_back) > 0 and self.output_length < self.params.min_tokens

    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids that the penalties touch, each once, and how often the output holds them."""
        if self._counts is None:
            return self._seen, np.empty(0, dtype=np.float32)
        ids = self._seen[: self._num_seen]
        return ids, self._counts[ids].astype(np.float32)

    def record(self, token: int) -> None:
        """The output has grown by `token`. Amortised O(1)."""
        self.output_length += 1
        if self._counts is None:
            return
        if self._counts[token] == _UNSEEN:
            self._counts[token] = 0
            if self._num_seen == len(self._seen):
                self._seen = np.concatenate([self._seen, np.empty(max(64, len(self._seen)), dtype=np.int64)])
            self._seen[self._num_seen] = token
            self._num_seen += 1
        self._counts[token] += 1


def apply(logits: Tensor, processors: Sequence[LogitsProcessors | None]) -> None:
    """Changes logits (R, V) in place, row i by processors[i]: penalties first, then bias, then -inf for held-back ids.

    Repetition: x / r for x > 0, else x · r (Keskar et al.: CTRL, 2019). Presence and frequency: x - presence · [c > 0]
    - frequency · c, for c occurrences in the output. One scatter per kind for all rows; pinned tables on CUDA.
    """
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    active = [(index * vocab_size, one) for index, one in enumerate(processors) if one is not None and not one.idle]
    places: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.float32]] = []  # (3, n) each: repetition, presence and frequency terms of each place
    for base, one in active:
        ids, counts = one.seen()
        if len(ids):
            params = one.params
            minus = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
            places.append(ids + base)
            numbers.append(np.stack([np.full_like(counts, params.repetition_penalty), minus.astype(np.float32)]))
    if places:
        where = to_device(np.concatenate(places), logits.device)
        repetition, minus_all = to_device(np.concatenate(numbers, axis=1), logits.device)
        values = flat[where]
        flat[where] = torch.where(values > 0, values / repetition, values * repetition) - minus_all
    biased = [(one.bias_ids + base, one.biases) for base, one in active if len(one.bias_ids)]
    if biased:
        where = to_device(np.concatenate([ids for ids, _ in biased]), logits.device)
        flat[where] += to_device(np.concatenate([biases for _, biases in biased]), logits.device)
    held = [one.held_back + base for base, one in active if one.holds_back]
    if held:
        flat[to_device(np.concatenate(held), logits.device)] = -torch.inf


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """The array as a tensor there, without waiting for the device: a copy from pinned memory is only queued."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
