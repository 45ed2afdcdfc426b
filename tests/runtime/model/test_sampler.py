"""The sampler: each row's token is its own, the distribution is the one asked for, extremes harm nobody."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model import categorical
from headway_runtime.model.sampler import Sampler
from headway_runtime.model.uniforms import stream_key, uniforms

VOCAB = 1009  # not a multiple of any vector width


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_once(
    logits: torch.Tensor, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    sampler = Sampler(len(params), logits.shape[1])
    for row, one in enumerate(params):
        sampler.bind(row, one, prompts[row] if prompts else [])
    sampled = sampler.sample(logits.clone(), range(len(params)))
    assert not sampled.errors
    return sampled.ids


def kept_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution a row asks for, from the definition: a full sort in float64."""
    x = logits.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.lexsort((np.arange(len(p)), -p))
    alive = np.ones(len(p), bool)
    if params.top_k > 0:
        alive[order[params.top_k :]] = False
    q = p * alive
    q /= q.sum()
    if params.top_p < 1.0:
        cumulative_before = np.cumsum(q[order]) - q[order]
        alive[order[cumulative_before >= params.top_p]] = False
    alive &= p >= params.min_p * p.max()
    q = p * alive
    return q / q.sum()


DRAWS = {
    "plain": SamplingParams(seed=1),
    "cold": SamplingParams(seed=1, temperature=0.3),
    "hot": SamplingParams(seed=1, temperature=2.0),
    "min_p": SamplingParams(seed=1, min_p=0.05),
    "top_k": SamplingParams(seed=1, top_k=20),
    "top_k beyond the candidates": SamplingParams(seed=1, top_k=200, temperature=2.0),
    "top_p": SamplingParams(seed=1, top_p=0.9),
    "top_p beyond the candidates": SamplingParams(seed=1, top_p=0.97, temperature=3.0),
    "all": SamplingParams(seed=1, top_p=0.8, top_k=30, min_p=0.02, temperature=1.3),
}


@pytest.mark.parametrize("params", DRAWS.values(), ids=DRAWS.keys())
def test_tokens_follow_the_distribution_that_was_asked_for(params: SamplingParams) -> None:
    """Total variation between 6,000 draws and the definition stays within what chance allows."""
    draws = 6_000
    logits = logits_of(1)
    expected = kept_distribution(logits[0], params)
    rows = 64
    sampler = Sampler(rows, VOCAB)
    for row in range(rows):
        sampler.bind(row, dataclasses.replace(params, choice=row), [])
    counts = np.zeros(VOCAB)
    for _ in range(draws // rows):
        np.add.at(counts, sampler.sample(logits.expand(rows, -1).clone(), range(rows)).ids, 1)
    assert counts[expected == 0.0].sum() == 0
    observed = counts / counts.sum()
    # E|X - np| <= sqrt(np(1 - p)), so half the sum of sqrt(p / n) bounds the expected distance; a quarter more is out
    # of chance's reach.
    allowed = 1.25 * 0.5 * np.sqrt(expected / counts.sum()).sum()
    assert 0.5 * np.abs(observed - expected).sum() < allowed


@pytest.mark.parametrize(
    "params", [*DRAWS.values(), SamplingParams(seed=1, top_k=100), SamplingParams(seed=1, top_k=100, top_p=0.5)]
)
def test_tokens_are_the_inverse_cdf_in_the_documented_order(params: SamplingParams) -> None:
    """Against float64 from the definition, in a vocabulary wide enough for groups, blocks and cuts beyond the
    candidates."""
    vocab, draws = 8192, 256
    row = logits_of(1, vocab, scale=1.0)[0]
    q = kept_distribution(row, params)
    sorted_order = params.top_p < 1.0 or params.top_k > 0
    order = np.lexsort((np.arange(vocab), -row.numpy())) if sorted_order else np.arange(vocab)
    keys = np.array([stream_key(params.seed or 0, choice) for choice in range(draws)])
    numbers = uniforms(keys, np.zeros(draws, dtype=np.int64))
    expected = order[np.searchsorted(np.cumsum(q[order]), numbers, side="right")]
    ids = sample_once(row.expand(draws, -1), [dataclasses.replace(params, choice=choice) for choice in range(draws)])
    assert len(set(ids.tolist())) > 10
    assert (ids == expected).mean() > 0.99  # float32 weights may move a number that lies on an edge


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(seed=5, top_p=0.9),
    SamplingParams(seed=5, top_k=40),
    SamplingParams(seed=6, top_p=0.99, temperature=3.0),
    SamplingParams(seed=7, min_p=0.1),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(seed=8, logit_bias=((3, 8.0), (4, -100.0)), top_k=5, top_p=0.7),
]


@pytest.mark.parametrize("vocab", [VOCAB, 8192])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_gives_the_same_tokens_alone_and_beside_31_neighbours(vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    rows, steps = 32, 4
    params = [MIXED[row % len(MIXED)] for row in range(rows)]
    prompts = [[row, row + 1, row + 1] for row in range(rows)]
    together = Sampler(rows, vocab)
    for row in range(rows):
        together.bind(row, params[row], prompts[row])
    steps_logits = [logits_of(rows, vocab, seed=step) for step in range(steps)]
    batched = np.stack([together.sample(x.clone(), range(rows)).ids for x in steps_logits], axis=1)
    for row in range(rows):
        alone = Sampler(1, vocab)
        alone.bind(0, params[row], prompts[row])
        own = [int(alone.sample(x[row : row + 1].clone(), [0]).ids[0]) for x in steps_logits]
        assert own == batched[row].tolist(), params[row]


def test_a_row_rebound_with_its_output_goes_on_with_the_same_tokens() -> None:
    """What happens at a preemption: another row, other neighbours, the output so far given back."""
    for params in MIXED:
        steps = [logits_of(1, seed=step) for step in range(8)]
        whole = Sampler(1, VOCAB)
        whole.bind(0, params, [1, 2])
        expected = [int(whole.sample(x.clone(), [0]).ids[0]) for x in steps]
        first = Sampler(2, VOCAB)
        first.bind(1, params, [1, 2])
        output = [int(first.sample(x.clone(), [1]).ids[0]) for x in steps[:3]]
        first.free(1)
        first.bind(0, params, [1, 2], output)
        output += [int(first.sample(x.clone(), [0]).ids[0]) for x in steps[3:]]
        assert output == expected


def test_choices_and_seeds_draw_different_tokens_and_equal_ones_the_same() -> None:
    logits = torch.zeros(1, VOCAB)
    streams = {}
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        for choice in (0, 1, 2):
            sampler = Sampler(1, VOCAB)
            sampler.bind(0, SamplingParams(seed=seed, choice=choice), [])
            streams[seed, choice] = tuple(int(sampler.sample(logits.clone(), [0]).ids[0]) for _ in range(8))
    assert len(set(streams.values())) == 15
    keys = np.array([stream_key(seed, 0) for seed in range(2000)])
    numbers = uniforms(keys, np.zeros(2000, dtype=np.int64))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert np.abs(np.histogram(numbers, bins=10, range=(0, 1))[0] - 200).max() < 60


def test_extremes_in_one_batch_leave_greedy_rows_at_the_argmax() -> None:
    """Tiny temperatures, top-k at and beyond every edge, top-p near 0: all answer, and all that are nearly greedy are
    greedy."""
    params = [
        SamplingParams(seed=9, temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature in (0.0, 1e-300, 1e-12, 1e-5, 1e-4, 1.0, 2.0)
        for top_k in (-1, 0, 1, VOCAB - 1, VOCAB, 10**9, 10**30)
        for top_p in (0.0, 1e-9, 0.5, 1.0)
    ]
    logits = logits_of(1).expand(len(params), -1)
    ids = sample_once(logits, params)
    best = int(logits[0].argmax())
    for one, token in zip(params, ids, strict=True):
        assert 0 <= token < VOCAB
        if one.temperature <= 1e-4 or one.top_k == 1 or one.top_p <= 1e-9:
            assert token == best, one


def test_equal_logits_are_cut_by_id() -> None:
    """top-k 3 of a flat row is ids 0, 1, 2, although every logit ties; the lowest id is the greedy one."""
    rows = 200
    params = [SamplingParams(seed=seed, top_k=3) for seed in range(rows)]
    assert set(sample_once(torch.zeros(rows, 4096), params).tolist()) == {0, 1, 2}
    assert sample_once(torch.zeros(1, 4096), [SamplingParams(temperature=0)]).tolist() == [0]


def test_a_row_that_is_masked_or_not_a_number_fails_alone() -> None:
    logits = logits_of(6)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=5),
        SamplingParams(seed=1, top_p=0.9),
    ]
    expected = sample_once(logits[:4], params)
    spoilt = logits.clone()
    for row, value in ((1, -math.inf), (3, math.nan), (5, math.inf)):
        spoilt = torch.cat([spoilt[:row], torch.full((1, VOCAB), value), spoilt[row:]])
    order = [0, None, 1, None, 2, None, 3]
    sampler = Sampler(7, VOCAB)
    for row, source in enumerate(order):
        sampler.bind(row, params[source] if source is not None else params[row % 4], [])
    rows = torch.stack([logits[source] if source is not None else spoilt[row] for row, source in enumerate(order)])
    sampled = sampler.sample(rows, range(7))
    assert sorted(sampled.errors) == [1, 3, 5]
    assert "masked" in sampled.errors[1] and "not numbers" in sampled.errors[3] and "infinite" in sampled.errors[5]
    assert sampled.ids[[1, 3, 5]].tolist() == [-1, -1, -1]
    assert sampled.ids[[0, 2, 4, 6]].tolist() == expected.tolist()


def test_bias_forces_and_forbids() -> None:
    logits = logits_of(3)
    only = tuple((token, -100.0) for token in range(VOCAB) if token != 77)
    best, second = logits[1].topk(2).indices.tolist()
    params = [
        SamplingParams(seed=3, logit_bias=only),
        SamplingParams(temperature=0, logit_bias=((best, -100.0),)),
        SamplingParams(temperature=0, logit_bias=((5, 100.0),)),
    ]
    assert sample_once(logits, params).tolist() == [77, second, 5]


def test_penalties_match_their_formulas_while_the_output_grows() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3)
    prompt = [4, 4, 9, 500]
    sampler = Sampler(1, VOCAB)
    sampler.bind(0, params, prompt)
    output: list[int] = []
    base = logits_of(1, scale=1.0)[0]
    for _ in range(150):
        x = base.double().numpy().copy()
        for token in set(prompt) | set(output):
            x[token] = x[token] / 1.4 if x[token] > 0 else x[token] * 1.4
        for token in set(output):
            x[token] -= 0.7 + 0.3 * output.count(token)
        token = int(sampler.sample(base[None].clone(), [0]).ids[0])
        assert x[token] >= x.max() - 1e-5
        output.append(token)
    assert len(set(output)) > 20


def test_end_tokens_are_held_back_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9], logits[0, 3] = 50.0, 40.0, 30.0, 20.0
    for ignore_eos, expected in ((False, [3, 3, 7]), (True, [7, 7, 7])):
        sampler = Sampler(1, VOCAB, eos_ids=[7, 8])
        stops = () if ignore_eos else (9,)
        sampler.bind(0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=stops, ignore_eos=ignore_eos), [])
        assert [int(sampler.sample(logits.clone(), [0]).ids[0]) for _ in range(3)] == expected


def test_logprobs_are_the_models_own_whatever_the_request_did_to_the_logits() -> None:
    logits = logits_of(4)
    params = [
        SamplingParams(seed=1, temperature=2.0, logit_bias=((11, 100.0),), logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(seed=2, top_p=0.5, frequency_penalty=2.0, logprobs=5),
    ]
    sampler = Sampler(4, VOCAB)
    for row, one in enumerate(params):
        sampler.bind(row, one, [])
    sampled = sampler.sample(logits.clone(), range(4))
    truth = logits.double().log_softmax(1)
    assert sampled.logprobs is not None and sampled.top_ids is not None and sampled.top_logprobs is not None
    assert sampled.ids[0] == 11
    assert sampled.top_ids.shape == (4, 5)
    for row, count in ((0, 3), (2, 0), (3, 5)):
        assert sampled.logprobs[row] == pytest.approx(float(truth[row, sampled.ids[row]]), abs=1e-4)
        assert sampled.top_ids[row, :count].tolist() == truth[row].topk(count).indices.tolist()
        assert sampled.top_logprobs[row, :count] == pytest.approx(truth[row].topk(count).values.numpy(), abs=1e-4)
        assert (sampled.top_ids[row, count:] == -1).all() and np.isnan(sampled.top_logprobs[row, count:]).all()
    assert np.isnan(sampled.logprobs[1]) and (sampled.top_ids[1] == -1).all()


def test_a_random_row_without_a_seed_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="seed"):
        Sampler(1, VOCAB).bind(0, SamplingParams(), [])


def test_the_largest_of_each_row_are_found_through_groups() -> None:
    x = -torch.rand(5, 49152, generator=torch.Generator().manual_seed(1))
    values, columns = categorical.ordered(*categorical.largest(x, categorical.CANDIDATES))
    assert torch.equal(values, x.topk(categorical.CANDIDATES).values)
    assert torch.equal(x.gather(1, columns), values)


def test_no_vocabulary_is_sorted_for_a_batch_that_does_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed batch at 49,152 entries orders candidates only, and is several times as fast as sorting whole rows."""
    vocab, rows = 49152, 64
    widths: list[int] = []
    original = categorical.ordered

    def counting(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append(values.shape[1])
        return original(values, ids)

    monkeypatch.setattr(categorical, "ordered", counting)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=2, top_k=50),
        SamplingParams(seed=3),
    ]
    params = [kinds[row % 4] for row in range(rows)]
    logits = logits_of(rows, vocab, scale=1.0)
    logits[:, :40] += 12.0  # a distribution as peaked as a language model's
    sampler = Sampler(rows, vocab)
    for row, one in enumerate(params):
        sampler.bind(row, one, [])

    def lean() -> None:
        sampler.sample(logits.clone(), range(rows))

    def naive() -> None:
        values, ids = (logits / 1.0).sort(dim=1, descending=True)
        probabilities = values.softmax(1)
        before = probabilities.cumsum(1) - probabilities
        top_p = torch.tensor([one.top_p for one in params])[:, None]
        top_k = torch.tensor([one.top_k or vocab for one in params])[:, None]
        dropped = (before >= top_p) | (torch.arange(vocab)[None] >= top_k)
        drawn = values.masked_fill(dropped, -torch.inf).softmax(1).multinomial(1)
        torch.where(torch.tensor([one.greedy for one in params]), logits.argmax(1), ids.gather(1, drawn).squeeze(1))

    def seconds(work: object) -> float:
        start = time.perf_counter()
        work()  # type: ignore[operator]
        return time.perf_counter() - start

    lean()
    ratio = seconds(naive) / min(seconds(lean) for _ in range(3))
    assert widths and max(widths) == categorical.CANDIDATES
    assert ratio > 5.0  # 30 to 50 on an idle core


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_what_the_cpu_draws() -> None:
    rows = 32
    params = [MIXED[row % len(MIXED)] for row in range(rows)]
    logits = logits_of(rows, 49152)
    on_cpu = sample_once(logits, params)
    sampler = Sampler(rows, 49152, "cuda")
    for row, one in enumerate(params):
        sampler.bind(row, one, [])
    on_gpu = sampler.sample(logits.cuda(), range(rows)).ids
    assert (
        on_cpu == on_gpu
    ).mean() >= 0.9  # exp differs in the last bit, so a draw on an edge may fall to its neighbour
