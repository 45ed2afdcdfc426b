"""Traces: the published formats, and made-up ones that resemble them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest
from headway_core.errors import InvalidInput
from headway_sim.synthetic import synthetic
from headway_sim.traces import MOONCAKE_BLOCK, TraceRequest, at_rate, mean_rate, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:06.0000000,110,27
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 4000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 2]}
"""


def test_both_formats_are_read_in_order_of_arrival_from_zero(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    (tmp_path / "mooncake.jsonl").write_text(MOONCAKE)
    azure = read(tmp_path / "azure.csv")
    assert [(round(one.at, 3), one.prompt_tokens, one.output_tokens) for one in azure] == [
        (0, 4808, 10),
        (0.052, 3180, 8),
        (2.02, 110, 27),
    ]
    mooncake = read(tmp_path / "mooncake.jsonl")
    assert mooncake == [TraceRequest(0.0, 1000, 5, (0, 1)), TraceRequest(3.0, 1024, 1, (0, 2))]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", AZURE + "yesterday,1,2\n", "a.csv:5"),
        ("a.csv", "at,prompt\n1,2\n", "TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:17:07,-4,2\n", "a.csv:5"),
        ("a.csv", "", "no request"),
        ("a.jsonl", MOONCAKE + '{"timestamp": 1}\n', "a.jsonl:3"),
        ("a.csv", AZURE.splitlines()[0] + "\n", "no request"),
        ("a.csv", AZURE + "2023-11-16 18:17:07\n", "a.csv:5"),
        ("a.csv", AZURE + 'x"' + "y" * 200_000, "a.csv"),
        ("a.csv", AZURE + "\udcff\udcfe", "a.csv: is not text"),
        ("a.jsonl", "", "no request"),
        ("a.jsonl", "\udcff\udcfe", "a.jsonl: is not text"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1"),
        (
            "a.jsonl",
            MOONCAKE + '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": []}\n',
            "a.jsonl:3",
        ),
        ("a.jsonl", "[1, 2]\n", "a.jsonl:1"),
        ("a.txt", AZURE, ".csv or .jsonl"),
    ],
)
def test_what_is_not_a_trace_is_refused_by_file_and_line(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(InvalidInput, match=says):
        read(tmp_path / name)


# Rate, prompt mean / median / p99, output mean / median / p99, gap CV, busiest second over mean, ideal prefix hit, as
# published.
PUBLISHED = {
    "conv": (5.53, (1155, 1020, 4142), (211, 129, 601), 1.09, 2.9, 0.0),
    "code": (2.57, (2048, 1469, 7436), (28, 13, 251), 13.2, 26, 0.0),
    "mooncake": (3.40, (12035, 6909, 85400), (343, 350, 1119), 3.03, 8.2, 0.37),
}


@pytest.mark.parametrize("family", list(PUBLISHED))
def test_synthetic_traces_have_the_statistics_of_the_published_ones(family: str) -> None:
    rate, prompt, output, cv, busiest, hit = PUBLISHED[family]
    made = synthetic(family, 9000, seed=4)
    gaps = [later.at - earlier.at for earlier, later in pairwise(made)]
    seconds = Counter(int(request.at) for request in made)
    assert mean_rate(made) == pytest.approx(rate, rel=0.01)
    assert lengths([request.prompt_tokens for request in made]) == pytest.approx(prompt, rel=0.07)
    assert lengths([request.output_tokens for request in made]) == pytest.approx(output, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.2)
    assert max(seconds.values()) * (int(made[-1].at) + 1) / len(made) == pytest.approx(busiest, rel=0.3)
    assert ideal_hit(made) == pytest.approx(hit, abs=0.06)


def lengths(values: list[int]) -> tuple[float, float, float]:
    return fmean(values), median(values), sorted(values)[int(0.99 * (len(values) - 1))]


def ideal_hit(trace: Sequence[TraceRequest]) -> float:
    """Share of prompt tokens that an endless prefix cache would hold."""
    seen: set[int] = set()
    hit = 0
    for request in trace:
        known = 0
        while known < len(request.prefix) and request.prefix[known] in seen:
            known += 1
        seen.update(request.prefix)
        hit += min(known * MOONCAKE_BLOCK, request.prompt_tokens)
    return hit / sum(request.prompt_tokens for request in trace)


def test_a_seed_gives_one_trace_and_another_seed_another() -> None:
    assert synthetic("code", 50, seed=1) == synthetic("code", 50, seed=1) != synthetic("code", 50, seed=2)
    with pytest.raises(ValueError, match="conv, code, mooncake"):
        synthetic("prose", 50)


def test_a_rate_stretches_all_gaps_alike() -> None:
    trace = synthetic("conv", 300)
    quick = at_rate(trace, 50.0)
    assert mean_rate(quick) == pytest.approx(50.0)
    assert [one.prompt_tokens for one in quick] == [one.prompt_tokens for one in trace]
    assert quick[10].at / quick[-1].at == pytest.approx(trace[10].at / trace[-1].at)
