"""The oracle, transformers' `generate` with a batch of one, and a loop that drives the real scheduler and the real
runner together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from headway_core.batching.digests import extend_digests
from headway_core.batching.iteration_plan import EventKind, ItemResult, IterationPlan, IterationResult, PlanItem
from headway_core.batching.scheduler import Scheduler
from headway_core.batching.sequence import Sequence
from headway_core.contract.policy import Knobs
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner
from transformers import AutoModelForCausalLM, PreTrainedModel

LEAST_MARGIN = 1e-3
"""Between the two best logits of every step: ten times the noise between two ways of batching."""
LEAST_DISTINCT = 0.3


def load_reference(folder: Path, **kwargs: Any) -> PreTrainedModel:
    """transformers' own model of a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


@dataclass(frozen=True)
class Answer:
    """A prompt and what `generate` continues it with."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Oracle:
    """Greedy continuations of one checkpoint that no rounding can change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = load_reference(folder)
        self.vocab_size = self.model.config.vocab_size

    def answer(self, prompt: list[int], length: int) -> Answer | None:
        """`generate` on this prompt alone; None when a margin is too small or the text repeats itself too much to prove
        anything."""
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=length,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        output = out.sequences[0, len(prompt) :].tolist()
        best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values  # (length, 2)
        if float((best[:, 0] - best[:, 1]).min()) < LEAST_MARGIN or len(set(output)) < LEAST_DISTINCT * min(
            length, self.vocab_size
        ):
            return None
        return Answer(tuple(prompt), tuple(output))

    def answers(
        self, lengths: list[int], output: int, seed: int, prefixes: list[list[int]] | None = None
    ) -> list[Answer]:
        """One answer for each prompt length; prompt i begins with as much of prefixes[i % n] as fits."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for index, length in enumerate(lengths):
            head = prefixes[index % len(prefixes)][: max(0, length - 1)] if prefixes else []
            for _ in range(20):
                tail = torch.randint(4, self.vocab_size, (length - len(head),), generator=generator).tolist()
                answer = self.answer(head + tail, output)
                if answer is not None:
                    found.append(answer)
                    break
            else:
                raise AssertionError(
                    f"no prompt of {length} tokens has a continuation that proves anything: change the seed"
                )
        return found

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocab) in one plain pass."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]


@dataclass
class Request:
    """What the loop is asked: `arrival` is the iteration before which it comes."""

    answer: Answer
    priority: int = 0
    arrival: int = 0
    logprobs: int | None = None


@dataclass
class Record:
    """What became of the requests, and what happened on the way."""

    outputs: list[list[int]]
    logprobs: list[list[float]]
    first_sampled: list[int]
    """Iteration of the first token."""
    last_chunk: list[int]
    """Iteration in which the prompt's last token was computed first."""
    hit_tokens: int = 0
    """Prompt tokens that a sequence found in the cache when it first started: another request's work."""
    block_preemptions: int = 0
    slot_preemptions: int = 0
    recomputed_tokens: int = 0
    victims: Counter[str] = field(default_factory=Counter)


class Loop:
    """schedule → execute → complete until all requests have all their tokens. Without a folder nothing is computed: the
    expected tokens stand in for the model, which shows in milliseconds what a set of requests will go through."""

    def __init__(
        self, folder: Path | None, *, block_size: int, num_blocks: int, max_num_seqs: int, max_model_len: int = 256
    ) -> None:
        self.runner = folder and ModelRunner(
            open_checkpoint(folder),
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
        )
        self._pool = {"num_blocks": num_blocks, "block_size": block_size}
        self._max_num_seqs = max_num_seqs

    def run(self, requests: list[Request], *, budget: int, prefix_caching: bool = False) -> Record:
        scheduler = Scheduler(**self._pool, knobs=Knobs(self._max_num_seqs, budget), prefix_caching=prefix_caching)
        count = len(requests)
        record = Record([[] for _ in requests], [[] for _ in requests], [-1] * count, [-1] * count)
        sequences: dict[int, Sequence] = {}
        bound: dict[int, int] = {}  # sequence → epoch that its row is bound for
        iteration = 0
        while len(sequences) < count or len(scheduler):
            now = iteration / 1000
            for index, request in enumerate(requests):
                if index not in sequences and request.arrival <= iteration:
                    sequences[index] = self._sequence(index, request, now)
                    scheduler.add(sequences[index], now)
            before = [
                (seq, seq.preemptions, seq.num_computed, seq.prefill_end, seq.num_outputs) for seq in sequences.values()
            ]
            plan = scheduler.schedule(now)
            for seq, preemptions, computed, prefill_end, outputs in before:
                if seq.preemptions > preemptions:
                    record.victims.update(self._phases(computed, prefill_end, outputs))
            iteration += 1
            if plan is None:
                assert len(sequences) < count, "the scheduler is stuck"
                continue
            if self.runner:
                self._bind(plan, requests, record, bound)
            for item in plan.items:
                if record.last_chunk[item.seq_id] < 0 and item.start + item.count == len(
                    requests[item.seq_id].answer.prompt
                ):
                    record.last_chunk[item.seq_id] = iteration
            sampling = [item for item in plan.items if item.samples]
            for item, token in zip(sampling, self._tokens(plan, requests, record, sampling), strict=True):
                if not record.outputs[item.seq_id]:
                    record.first_sampled[item.seq_id] = iteration
                record.outputs[item.seq_id].append(token)
                tokens = [*requests[item.seq_id].answer.prompt, *record.outputs[item.seq_id]]
                extend_digests(sequences[item.seq_id].digests, tokens, self._pool["block_size"])
            outcomes = tuple(ItemResult(item.seq_id, item.epoch, finished=False) for item in sampling)
            events = scheduler.complete(IterationResult(plan.plan_id, outcomes, None), now)
            assert sum(event.kind is EventKind.TOKEN for event in events) == len(sampling)
        scheduler.check()
        assert scheduler.load().free_blocks == self._pool["num_blocks"]
        counters = scheduler.counters
        record.block_preemptions = counters.preemptions_for_blocks
        record.slot_preemptions = counters.preemptions_for_slots
        record.recomputed_tokens = counters.recomputed_tokens
        record.hit_tokens = sum(seq.cached_tokens for seq in sequences.values())
        return record

    def _bind(self, plan: IterationPlan, requests: list[Request], record: Record, bound: dict[int, int]) -> None:
        for row in plan.freed_slots:
            self.runner.free(row)
        for item in plan.items:
            if bound.get(item.seq_id) != item.epoch:
                request = requests[item.seq_id]
                known = np.array([*request.answer.prompt, *record.outputs[item.seq_id]], dtype=np.int32)
                params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=request.logprobs)
                self.runner.bind(item.slot, known, params, len(request.answer.prompt))
                bound[item.seq_id] = item.epoch

    def _tokens(
        self, plan: IterationPlan, requests: list[Request], record: Record, sampling: list[PlanItem]
    ) -> list[int]:
        if not self.runner:
            return [requests[item.seq_id].answer.output[len(record.outputs[item.seq_id])] for item in sampling]
        output = self.runner.execute(plan.items)
        assert not output.errors
        if output.logprobs is not None:
            for item, logprob in zip(sampling, output.logprobs.tolist(), strict=True):
                record.logprobs[item.seq_id].append(logprob)
        return output.ids.tolist()

    def _sequence(self, index: int, request: Request, now: float) -> Sequence:
        prompt = request.answer.prompt
        digests: list[bytes] = []
        extend_digests(digests, prompt, self._pool["block_size"])
        return Sequence(
            seq_id=index,
            priority=request.priority,
            arrival=now,
            num_prompt=len(prompt),
            max_tokens=len(request.answer.output),
            digests=digests,
        )

    def _phases(self, computed: int, prefill_end: int, outputs: int) -> list[str]:
        """Where in its life a victim was."""
        phases = []
        if 0 < computed < prefill_end:
            phases.append("mid-prefill")
        if outputs == 1 and computed >= prefill_end:
            phases.append("after the first token")
        if computed and computed % self._pool["block_size"] == 0:
            phases.append("on a block boundary")
        return phases


@pytest.fixture(scope="session")
def oracle(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Oracle]:
    """The oracle of a family's tiny checkpoint."""
    made: dict[str, Oracle] = {}

    def of(family: str) -> Oracle:
        if family not in made:
            made[family] = Oracle(tiny_checkpoint(family))
        return made[family]

    return of


@pytest.fixture(scope="session")
def reference() -> Callable[..., PreTrainedModel]:
    """transformers' model of any folder, in float32."""
    return load_reference


@pytest.fixture(scope="session")
def make_loop() -> type[Loop]:
    """`Loop`, for tests that need pools of their own."""
    return Loop


@pytest.fixture(scope="session")
def make_request() -> type[Request]:
    """`Request`."""
    return Request
