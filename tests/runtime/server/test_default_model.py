"""The default model, as a user gets it: it answers sensibly."""

import threading

import pytest

QUESTIONS = [
    ("What is the capital of France?", "Paris"),
    ("What colour is the sky on a clear day?", "blue"),
    ("Which planet do we live on?", "Earth"),
]


@pytest.fixture(scope="module")
def default(start_runtime):
    return start_runtime(None)


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
    threads = [
        threading.Thread(target=lambda: texts.append(default.completion(**body).json()["choices"][0]["text"]))
        for _ in range(4)
    ]
    threads += [threading.Thread(target=lambda: default.chat("Tell me a story.", max_tokens=30)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone] * 4
