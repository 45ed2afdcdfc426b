"""The default model, as a user gets it: it answers sensibly, and the replica knows how long its iterations take."""

import json
import random
import statistics
import threading

import pytest

QUESTIONS = [
    ("What is the capital of France?", "Paris"),
    ("What colour is the sky on a clear day?", "blue"),
    ("Which planet do we live on?", "Earth"),
]


@pytest.fixture(scope="module")
def default(start_runtime, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "iterations.jsonl"
    runtime = start_runtime(None, "--threads", 1, "--iteration-log", log, "--max-num-seqs", 8, "--prefill-token-budget", 64, quick=False)
    runtime.iteration_log = log
    return runtime


@pytest.mark.slow
@pytest.mark.parametrize(("question", "word"), QUESTIONS)
def test_it_answers_simple_questions(default, question, word):
    answer = default.chat(question, temperature=0, max_tokens=40).json()
    assert word.lower() in answer["choices"][0]["message"]["content"].lower()
    assert answer["usage"]["prompt_tokens"] > 20


@pytest.mark.slow
def test_greedy_text_begins_the_same_alone_in_company_and_again(default):
    body = {"prompt": "The three primary colours are", "temperature": 0, "max_tokens": 12}
    alone = default.completion(**body).json()["choices"][0]["text"]
    assert "red" in alone.lower() and "blue" in alone.lower()
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(default.completion(**body).json()["choices"][0]["text"])) for _ in range(4)]
    threads += [threading.Thread(target=lambda: default.chat("Tell me a story.", max_tokens=30)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone] * 4


def mixed_load(default, seed):
    """Short and long prompts, a few at a time, for as long as it takes to see some hundreds of iterations."""
    draw = random.Random(seed)

    def user(number):
        for _ in range(3):
            prompt = [draw.randrange(100, 40_000) for _ in range(draw.randrange(8, 300))]
            default.completion(prompt=prompt, max_tokens=draw.randrange(8, 40), ignore_eos=True, temperature=draw.choice([0, 1]))

    threads = [threading.Thread(target=user, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.slow
def test_iterations_take_as_long_as_was_predicted_one_step_ahead(default, record_property):
    """The median relative error under a mixed load, each prediction made before its iteration ran.

    Other work on the machine only ever makes it worse, so the best of three windows counts.
    """
    errors = []
    for window in range(3):
        before = len(default.iteration_log.read_text().splitlines())
        mixed_load(default, window)
        steps = [json.loads(line) for line in default.iteration_log.read_text().splitlines()[before:]]
        assert len(steps) > 60
        errors.append(statistics.median(abs(step["predicted"] - step["seconds"]) / step["seconds"] for step in steps))
        if errors[-1] <= 0.1:
            break
    record_property("median_relative_errors", errors)
    print(f"one-step-ahead median relative error by window: {[round(error, 3) for error in errors]}")
    assert min(errors) <= 0.1, errors
    assert default.load().step_time.relative_error is not None
    assert default.metric("headway_engine_step_prediction_relative_error_count") > 60
