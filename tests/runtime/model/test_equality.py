"""Whatever is batched, cut, evicted or reused around it, a greedy request gets exactly the tokens that `generate` gives
it alone.

Each run drives the real scheduler and the real runner. Runs are chosen so that every pair of settings meets; that
choice is tested too.
"""

from __future__ import annotations

import random
from itertools import accumulate, combinations, product

import numpy as np
import pytest
import torch
from headway_runtime.model import attention_compiled, linear
from headway_runtime.model.architecture import decoder
from headway_runtime.model.kernels.library import kernels
from headway_runtime.model.linear import WeightLayouts, known_layouts

UNLIMITED = 1 << 20
SETTINGS = {
    "family": ("llama", "mistral", "qwen2", "qwen3"),
    "budget": (1, 7, 16, 64, UNLIMITED),
    "block_size": (1, 16, 32),
    "pressure": ("blocks", "slots"),
    "prefix_caching": (False, True),
    "kernels": (True, False),
}
LENGTHS = [1, 3, 8, 15, 16, 17, 31, 32, 33, 44, 50, 64, 65, 70, 90, 130]
OUTPUT = 40
LEAST_PREEMPTIONS = 20


def pairs_of(run):
    """Every two settings that meet in a run."""
    return set(combinations(sorted(zip(SETTINGS, run, strict=True)), 2))


def pairwise():
    """A small set of runs in which every two settings meet: each next run is the one that adds most pairs."""
    runs = list(product(*SETTINGS.values()))
    missing = set().union(*(pairs_of(run) for run in runs))
    chosen = []
    while missing:
        best = max(runs, key=lambda run: len(pairs_of(run) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


RUNS = pairwise()


def name(run):
    family, budget, block_size, pressure, prefix_caching, compiled = run
    limit = "∞" if budget == UNLIMITED else budget
    parts = (family, f"budget{limit}", f"blocks{block_size}", pressure, "reuse" if prefix_caching else "noreuse")
    return "-".join((*parts, "kernels" if compiled else "torch"))


def test_the_runs_make_every_pair_of_settings_meet():
    met = set().union(*(pairs_of(run) for run in RUNS))
    for (one, ones), (other, others) in combinations(SETTINGS.items(), 2):
        for pair in product(ones, others):
            assert tuple(sorted(zip((one, other), pair, strict=True))) in met
    assert len(RUNS) < 30


@pytest.fixture(scope="session")
def answers(oracle):
    """Sixteen prompts of a family and their continuations; the longer ones begin with one of two common prefixes."""
    made = {}

    def of(family):
        if family not in made:
            prefixes = [[(7 * index + shift) % 200 + 10 for index in range(40)] for shift in (0, 3)]
            made[family] = oracle(family).answers(LENGTHS, OUTPUT, seed=7, prefixes=prefixes)
        return made[family]

    return of


def requests_under_pressure(run, known, make_loop, make_request):
    """A loop's settings and requests that evict as often, and at such moments, as the run is there to show. Found
    without computing."""
    _, budget, block_size, pressure, prefix_caching, _ = run
    for seed in range(300):
        draw = random.Random(seed)
        pool_of = known[: draw.choice((10, 13, 16))]
        count, gaps = draw.choice((40, 60)), draw.choice(((0, 1, 2), (0, 1, 1, 2, 3, 5, 8), (1, 10, 20, 40)))
        arrivals = list(accumulate(draw.choice(gaps) for _ in range(count)))
        # Each newcomer outranks all before it where slots are short, some do where blocks are: those evict whatever is
        # in their way.
        priorities = [index if pressure == "slots" or draw.random() < 0.5 else 0 for index in range(count)]
        requests = [
            make_request(draw.choice(pool_of), priority=priority, arrival=at)
            for priority, at in zip(priorities, arrivals, strict=True)
        ]
        longest = max(len(request.answer.prompt) for request in requests) + OUTPUT
        pool = {
            "block_size": block_size,
            "num_blocks": -(
                -int(longest * draw.choice((1, 1.5, 2, 3) if pressure == "blocks" else (2, 3, 6))) // block_size
            ),
            "max_num_seqs": draw.choice((4, 8, 16)) if pressure == "blocks" else 2,
        }
        record = make_loop(None, **pool).run(requests, budget=budget, prefix_caching=prefix_caching)
        if puts_to_the_test(run, record):
            return pool, requests
    raise AssertionError("no set of requests puts these settings under the pressure that the test is about")


def puts_to_the_test(run, record):
    _, budget, _, pressure, prefix_caching, _ = run
    preemptions = record.block_preemptions if pressure == "blocks" else record.slot_preemptions
    moments = {"after the first token", "on a block boundary"} | ({"mid-prefill"} if budget < UNLIMITED else set())
    return (
        preemptions >= LEAST_PREEMPTIONS
        and record.recomputed_tokens > 0
        and moments <= set(record.victims)
        and (record.hit_tokens > 0) == prefix_caching
    )


@pytest.mark.parametrize("run", RUNS, ids=name)
def test_every_request_gets_the_tokens_of_generate(run, answers, oracle, make_loop, make_request, monkeypatch):
    family, budget, _, _, prefix_caching, compiled = run
    if not compiled:
        monkeypatch.setattr(linear, "kernels", lambda: "not in this run")
        monkeypatch.setattr(attention_compiled, "kernels", lambda: "not in this run")
    elif isinstance(kernels(), str):
        pytest.skip(f"no kernels here: {kernels()}")
    pool, requests = requests_under_pressure(run, answers(family), make_loop, make_request)
    record = make_loop(oracle(family).folder, **pool).run(requests, budget=budget, prefix_caching=prefix_caching)

    assert record.outputs == [list(request.answer.output) for request in requests]
    assert puts_to_the_test(run, record)


@pytest.mark.parametrize("layout", known_layouts(torch.float32), ids=lambda layout: layout.name)
def test_in_every_layout_of_the_matrices(layout, answers, oracle, make_loop, make_request, monkeypatch):
    monkeypatch.setattr(decoder, "choose_layouts", lambda *_: WeightLayouts(layout, layout))
    requests = [make_request(answer) for answer in answers("qwen2")]
    record = make_loop(oracle("qwen2").folder, block_size=16, num_blocks=60, max_num_seqs=8).run(requests, budget=64)
    assert record.outputs == [list(request.answer.output) for request in requests]


def a_block_late(runner):
    """Each row reads its second block where its first should be."""
    append = runner._append_blocks

    def off_by_one(item):
        append(item)
        held = int(runner._num_blocks[item.slot])
        runner._tables[item.slot, :held] = np.roll(
            runner._tables[item.slot, :held], 1 if held > 1 and item.start else 0
        )

    runner._append_blocks = off_by_one


def a_position_late(runner):
    """Single tokens are rotated by one position too many."""
    at = runner._decoder.rope.at
    runner._decoder.rope.at = lambda positions: at(positions + 1 if len(positions) == 1 else positions)


def a_window_wider(runner):
    """Sliding layers see one token more than they should."""
    runner._attention._windows = tuple(window and window + 1 for window in runner._attention._windows)


def a_stale_row(runner):
    """A row that is bound again keeps one token of the sequence before."""
    bind = runner.bind

    def stale(row, tokens, params, num_prompt):
        before = int(runner._tokens[row, 0])
        bind(row, tokens, params, num_prompt)
        runner._tokens[row, 0] = before

    runner.bind = stale


@pytest.mark.parametrize("fault", [None, a_block_late, a_position_late, a_window_wider, a_stale_row])
def test_the_comparison_notices_a_fault(fault, answers, oracle, make_loop, make_request):
    loop = make_loop(oracle("mistral").folder, block_size=16, num_blocks=40, max_num_seqs=2)
    if fault is not None:
        fault(loop.runner)
    requests = [make_request(answer) for answer in answers("mistral")[4:12]]
    record = loop.run(requests, budget=16)
    wrong = sum(output != list(request.answer.output) for request, output in zip(requests, record.outputs, strict=True))
    assert (wrong > 0) == (fault is not None)
