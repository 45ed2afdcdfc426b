import pytest
from headway_cli.bench_figures import by_class, by_prompt_quartile, figures, kept_every_deadline, percentile, summary
from headway_cli.load_generator import PlannedRequest, PromptWriter, RequestResult
from headway_core.slo import Objectives, TpotObjective, TtftObjective

PROMISE = Objectives(TtftObjective(1.0, 95, 0.0), TpotObjective(0.1, 95))


def record(times, *, at=10.0, ok=True, status=200, tokens=None, prompt=100, name="default"):
    made = RequestResult(PlannedRequest(at, prompt, 8, class_name=name), sent=at)
    made.status, made.prompt_tokens = status, prompt
    made.token_times = list(times)
    made.first_token = made.token_times[0] if made.token_times else None
    made.output_tokens = tokens if tokens is not None else len(made.token_times)
    made.finish_reason = "stop" if ok else None
    made.error = None if ok else "boom"
    return made


def test_ttft_counts_from_the_planned_arrival_so_that_a_late_generator_flatters_nobody():
    late = record([11.2, 11.3], at=10.0)
    late.sent = 11.0
    assert late.ttft == pytest.approx(1.2)


def test_tpot_is_last_minus_first_over_tokens_less_one():
    assert record([10.5, 10.6, 10.9]).tpot == pytest.approx(0.2)
    assert record([10.5, 10.9], tokens=5).tpot == pytest.approx(0.1), "two pieces that carried five tokens"
    assert record([10.5]).tpot is None


def test_shed_and_failed_requests_are_misses_of_every_promise():
    records = [record([10.5, 10.55]), record([], ok=False, status=429), record([10.2], ok=False), record([12.0, 12.01])]
    result = figures(records, lambda _: PROMISE, grace=0.0)
    assert (result.offered, result.ok, result.shed, result.failed) == (4, 2, 1, 1)
    assert result.ttft_attainment == pytest.approx(1 / 4)
    assert result.tpot_attainment == pytest.approx(2 / 4)
    assert result.goodput == pytest.approx(1 / 4)


def test_one_stall_in_the_middle_breaks_goodput_though_the_mean_is_fine():
    steady = record([10.5 + 0.1 * i for i in range(8)])
    stalled = record([10.9, 10.91, 10.92, 12.4, 12.41, 12.42, 12.43])
    assert stalled.tpot > 0.1 and kept_every_deadline(steady, PROMISE, 0.0)
    assert not kept_every_deadline(stalled, PROMISE, 0.0)
    early = record([10.1, 10.2, 11.25])
    assert kept_every_deadline(early, PROMISE, 0.1), "the deadline of token 2 is 10 + 1 + 0.2 + grace"
    assert not kept_every_deadline(early, PROMISE, 0.0)


def test_a_promise_without_tpot_judges_the_first_token_only():
    only_ttft = Objectives(TtftObjective(1.0))
    assert kept_every_deadline(record([10.5, 99.0]), only_ttft, 0.0)
    result = figures([record([10.5, 99.0])], lambda _: only_ttft, 0.0)
    assert result.tpot_attainment is None


def test_nothing_measured_is_none():
    result = figures([record([], ok=False, status=503)], lambda _: PROMISE, 0.0)
    assert result.ttft is None and result.itl is None and result.ttft_attainment == 0.0
    assert summary([]) is None


def test_percentiles_are_nearest_rank():
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, q) for q in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.01) == 7.0


def test_groups_hold_every_record_once():
    records = [record([10.5], prompt=i, name="ab"[i % 2]) for i in range(1, 11)]
    assert sum(map(len, by_prompt_quartile(records).values())) == 10
    assert list(by_class(records)) == ["b", "a"]
    assert [len(group) for group in by_prompt_quartile(records[:2]).values()] == [1, 1]


def test_prompt_lengths_are_learned_from_what_the_server_counted():
    writer = PromptWriter()
    writer.learn((8, 8 * 2 + 30), (72, 72 * 2 + 30))
    assert writer.words_for(230) == 100
    assert writer.words_for(1) == 1
    texts = {writer.text(20, number)[:40] for number in range(200)}
    assert len(texts) == 200, "prompts share no beginning"
    assert writer.text(5, 3) == writer.text(5, 3)
