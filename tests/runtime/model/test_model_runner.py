"""Rows and blocks pass from one sequence to the next, and what was in them before harms nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headway_core.batching.iteration_plan import PlanItem
from headway_runtime.ipc.sampling_params import SamplingParams
from headway_runtime.model.checkpoint import open_checkpoint
from headway_runtime.model.model_runner import ModelRunner

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LENGTHS = [3, 15, 16, 40]


@pytest.fixture(scope="module")
def answers(oracle):
    return oracle("llama").answers(LENGTHS, 20, seed=23)


@pytest.fixture
def runner(tiny_llama):
    return ModelRunner(open_checkpoint(tiny_llama), max_num_seqs=4, num_blocks=24, block_size=BLOCK, max_model_len=96)


def generate(runner, answers, first_block=0):
    """Prefill all at once, then decode together; each row has six blocks. Outputs, and errors by row."""
    outputs, errors = [[] for _ in answers], {}
    for row, answer in enumerate(answers):
        runner.bind(row, np.array(answer.prompt, dtype=np.int32), GREEDY, len(answer.prompt))
    for step in range(len(answers[0].output)):
        items = []
        for row, answer in enumerate(answers):
            if row in errors:
                continue
            start, count = (0, len(answer.prompt)) if step == 0 else (len(answer.prompt) + step - 1, 1)
            blocks = tuple((first_block + 6 * row + index) % 24 for index in range(6)) if step == 0 else ()
            items.append(PlanItem(row, 0, row, start, count, True, blocks))
        result = runner.execute(items)
        for index, item in enumerate(items):
            if index in result.errors:
                errors[item.slot] = result.errors[index]
            else:
                outputs[item.slot].append(int(result.ids[index]))
    for row in range(len(answers)):
        runner.free(row)
    return outputs, errors


def test_rows_and_blocks_are_used_again_and_again(runner, answers):
    for order, first_block in (([0, 1, 2, 3], 0), ([3, 1, 0, 2], 5), ([2, 3, 1, 0], 11)):
        chosen = [answers[index] for index in order]
        assert generate(runner, chosen, first_block) == ([list(answer.output) for answer in chosen], {})


def test_blocks_that_held_broken_numbers_harm_nobody(runner, answers):
    with torch.inference_mode():
        runner._cache.data.fill_(torch.nan)
    assert generate(runner, answers) == ([list(answer.output) for answer in answers], {})


def test_a_sequence_whose_numbers_break_ends_alone(runner, answers):
    others = {token for index in (0, 2, 3) for token in (*answers[index].prompt, *answers[index].output)}
    poison = next(token for token in answers[1].prompt if token not in others)
    with torch.inference_mode():
        runner._decoder.embedding[poison] = torch.nan
    outputs, errors = generate(runner, answers)
    assert list(errors) == [1] and "not numbers" in errors[1]
    assert outputs[1] == []
    for index in (0, 2, 3):
        assert outputs[index] == list(answers[index].output)


def test_an_inner_chunk_samples_nothing(runner, answers):
    prompt = answers[3].prompt
    runner.bind(0, np.array(prompt, dtype=np.int32), GREEDY, len(prompt))
    assert len(runner.execute([PlanItem(0, 0, 0, 0, 39, False, (1, 2, 3))]).ids) == 0
    assert runner.execute([PlanItem(0, 0, 0, 39, 1, True, ())]).ids.tolist() == [answers[3].output[0]]


def test_it_says_what_it_holds(runner):
    assert runner.vocab_size == 270
    assert runner.eos_ids == {1, 3}
    assert runner.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head_dim, bytes
