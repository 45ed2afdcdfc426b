"""Chance without a seed: every choice of a request has its own, whether `n` or a repeated prompt asks for it."""


def test_a_prompt_asked_several_times_is_answered_independently_unless_a_seed_says_otherwise(runtime):
    def texts(**more):
        answer = runtime.completion(prompt=["hello"] * 6, max_tokens=8, ignore_eos=True, **more).json()
        return [choice["text"] for choice in answer["choices"]]

    assert len(set(texts())) > 1
    assert len(set(texts(seed=3))) == 1
