"""Prompts that end just before, on and just after a block or a chunk: nothing is sampled early, and nobody notices the
cut."""

from __future__ import annotations

import pytest
import torch

BLOCK = 16
BUDGETS = [1, 7, 16, 64, 1 << 20]
LENGTHS = sorted(
    {1, BLOCK - 1, BLOCK, BLOCK + 1}
    | {length for budget in BUDGETS[:-1] for length in (budget, budget + 1, 2 * budget)}
    | {6, 63}
)
OUTPUT = 6


@pytest.fixture(scope="session", params=["llama", "qwen2"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def boundary_answers(oracle, family):
    return oracle(family).answers(LENGTHS, OUTPUT, seed=11)


@pytest.fixture(scope="session")
def decoders(oracle, family):
    """Five requests that decode all the while."""
    return oracle(family).answers([3, 5, 9, 14, 20], 30, seed=13)


def teacher_logprobs(model, answer):
    """transformers' log-probability of each output token, in one plain pass."""
    tokens = [*answer.prompt, *answer.output]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    at = range(len(answer.prompt) - 1, len(tokens) - 1)
    return [float(logits[position].log_softmax(-1)[tokens[position + 1]]) for position in at]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"budget{budget if budget < 1 << 20 else '∞'}")
@pytest.mark.parametrize("company", ["alone", "beside five decoders"])
def test_every_length_at_every_budget(
    budget, company, family, oracle, boundary_answers, decoders, make_loop, make_request
):
    loop = make_loop(oracle(family).folder, block_size=BLOCK, num_blocks=64, max_num_seqs=8)
    beside = decoders if company != "alone" else []
    for answer in boundary_answers:
        requests = [make_request(one, logprobs=0) for one in beside] + [
            make_request(answer, arrival=6 if beside else 0, logprobs=0)
        ] * 2
        record = loop.run(requests, budget=budget, prefix_caching=True)
        for request, output in zip(requests, record.outputs, strict=True):
            assert output == list(request.answer.output)
        assert record.first_sampled == record.last_chunk
        expected = teacher_logprobs(oracle(family).model, answer)
        for logprobs in record.logprobs[-2:]:
            assert max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True)) < 1e-3
