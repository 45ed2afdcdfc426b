"""Sampling parameters: what is refused names the parameter; what is accepted means what it says."""

from __future__ import annotations

import dataclasses
import math

import pytest
from headway_core.errors import RequestError
from headway_runtime.ipc.sampling_params import SamplingParams, parse_logit_bias

REFUSED: list[tuple[str, object]] = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e309),
    ("temperature", True),
    ("temperature", "0"),
    ("temperature", None),
    ("temperature", 10**400),
    ("top_p", 1.0001),
    ("top_p", -0.1),
    ("top_k", 0.01),
    ("top_k", 2.0),
    ("top_k", -2),
    ("top_k", True),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("seed", -(10**5000)),
    ("choice", -1),
    ("logit_bias", ((1, 101.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", ((1, 1.0), (1, 2.0))),
    ("logit_bias", {"1": 1}),
    ("stop_token_ids", [1, "2"]),
    ("stop_token_ids", 3),
    ("stop_token_ids", list(range(1000))),
    ("ignore_eos", 1),
    ("min_tokens", -1),
    ("min_tokens", 2**64),
    ("stop_token_ids", [2**64]),
    ("logit_bias", ((2**64, 1.0),)),
    ("choice", 2**64),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("logprobs", 21),
    ("logprobs", -1),
]


@pytest.mark.parametrize(
    ("name", "value"), REFUSED, ids=[f"{name}-{number}" for number, (name, _) in enumerate(REFUSED)]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert len(str(caught.value)) < 300


def test_edges_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=0, top_k=-1, min_p=1, seed=-(2**63), logprobs=0, max_tokens=10**9)
    SamplingParams(
        temperature=2, top_k=10**9, seed=2**63 - 1, logit_bias=((5, -100),), presence_penalty=-2, logprobs=20
    )


def test_more_than_any_vocabulary_is_all_of_it_and_stays_within_a_machine_word() -> None:
    assert 10**9 < SamplingParams(top_k=10**30).top_k < 2**32


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for params, field in (
        (SamplingParams(logit_bias=((100, 1.0),)), "logit_bias"),
        (SamplingParams(stop_token_ids=(100,)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match="0 to 99") as caught:
            params.check_vocabulary(100)
        assert caught.value.field == field
        params.check_vocabulary(101)


def test_parameters_survive_a_wire_that_knows_lists_only() -> None:
    params = SamplingParams(seed=3, logit_bias=((1, 2.0),), stop_token_ids=(4,))
    loose = dataclasses.asdict(params)
    loose["logit_bias"] = [[1, 2.0]]
    loose["stop_token_ids"] = [4]
    assert SamplingParams(**loose) == params
    hash(params)


def test_end_tokens_are_those_of_the_model_and_of_the_request() -> None:
    assert SamplingParams(stop_token_ids=(9,)).ending_ids([2, 7]) == {2, 7, 9}
    assert SamplingParams(stop_token_ids=(9,), ignore_eos=True).ending_ids([2, 7]) == {9}


def test_bias_in_json_form() -> None:
    assert parse_logit_bias({"5": 1, "7": -100.0}) == ((5, 1.0), (7, -100.0))
    for bad in ([1], "x", {"-1": 1}, {"a": 1}, {"1": "2"}, {"1": 200}, {"٣": 1}, {"9" * 5000: 1}):
        with pytest.raises(RequestError) as caught:
            parse_logit_bias(bad)
        assert caught.value.field == "logit_bias"
