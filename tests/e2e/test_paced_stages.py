"""A promise through a wrong knob, a step in load, a shift of the mix and the end of the load, on emulated accelerators.

Capacity is known, so the right knobs and replicas follow from arithmetic (`oracle`), and every decision is held against
it. The same first two stages are run by an operator that only recommends: there the promise breaks.

Where the load generator or the emulated accelerators were late by more than a twentieth, the run says nothing and is
done again, twice at most; it never passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import oracle
import pytest
import tiny_model
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from deeds import reversals
from fleet_watch import Look
from inconclusive import inconclusive
from open_loop import Load
from paced_release import SLO, PacedRelease, Start
from staged_run import Inconclusive, Promise, Stage, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

ACCELERATOR = oracle.Accelerator(a=0.025, b=0.0001, d=0.004, e=0.00001)
START = Start(ACCELERATOR, max_num_seqs=64, prefill_token_budget=512)
PROMISE = Promise(ttft=2.0, tpot=0.09, share=0.95)
OUTPUT, SHORT, LONG = 40, 64, 256
"""Tokens of an output, of a prompt, and of a prompt four times as long."""
TODAY = oracle.solve(ACCELERATOR, prompt=SHORT, output=OUTPUT, tpot=PROMISE.tpot)
SHIFTED = oracle.solve(ACCELERATOR, prompt=LONG, output=OUTPUT, tpot=PROMISE.tpot)
WINDOW = 20
TRIES = 3


def _load(rate: float, seconds: float, prompt: int, output: int, seed: int) -> Load:
    return Load(
        rate, seconds, prompt, output, seed=seed, tokens_per_word=1.0, template_tokens=tiny_model.TEMPLATE_TOKENS
    )


WRONG_KNOB, STEP, SHIFT, GONE = "wrong knob", "load x4", "prompts x4", "load gone"
LOADS = {
    WRONG_KNOB: _load(0.61 * TODAY.rate, 40, SHORT, OUTPUT, seed=1),
    STEP: _load(2.44 * TODAY.rate, 80, SHORT, OUTPUT, seed=2),
    SHIFT: _load(1.45 * SHIFTED.rate, 100, LONG, OUTPUT, seed=3),
    # A few long answers, still being written when replicas have to go.
    GONE: _load(1.5, 2, SHORT, 1300, seed=4),
}
CONTROL_LOADS = {WRONG_KNOB: LOADS[WRONG_KNOB], STEP: replace(LOADS[STEP], seconds=45)}
"""Long enough to see that nothing mends."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One mode's run."""

    release: PacedRelease
    stages: dict[str, Stage]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines to print when the module is done, whether its tests pass or not."""
    lines: list[str] = []
    yield lines
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        plugins.getplugin("terminalreporter").write_line("\n" + "\n".join(lines))


@pytest.fixture(scope="class")
def arm(
    full_cluster: Client,
    product_values: Path,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    report: list[str],
) -> Iterator[Arm]:
    """The run of the class's `MODE` through its `LOADS`."""
    if full_cluster.audit is None:
        pytest.skip("no audit log of a cluster that is not ours")
    mode, loads = request.cls.MODE, request.cls.LOADS
    for attempt in range(1, TRIES + 1):
        folder = tmp_path_factory.mktemp("paced")
        with (
            fresh_namespace(full_cluster, request) as namespace,
            PacedRelease.installed(full_cluster, namespace, product_values, folder, START) as release,
        ):
            _promise(release, mode)
            try:
                stages = run(release, PROMISE, loads, {GONE: _one_is_left})
            except Inconclusive as error:
                report.append(f"{mode}, run {attempt} of {TRIES} is inconclusive: {error}")
                continue
            report += [_row(mode, stage) for stage in stages]
            yield Arm(release, {stage.name: stage for stage in stages})
            return
    inconclusive(f"{TRIES} runs of {TRIES}: " + "; ".join(report))


def _promise(release: PacedRelease, mode: str) -> None:
    release.promise(
        mode,
        objectives={
            "ttft": {"target": f"{PROMISE.ttft:g}s", "percentile": 95},
            "tpot": {"target": f"{PROMISE.tpot * 1000:g}ms", "percentile": 95},
        },
        bounds={"replicas": {"min": 1, "max": 5}},
        evaluation={"window": f"{WINDOW}s", "minSamples": 20},
        behavior={"scaleDown": {"stabilizationWindow": "30s"}},
    )


def _one_is_left(look: Look) -> bool:
    return len(look.pods) == 1


class TestRecommend:
    """The control arm: the same wrong knob and the same step, with an operator that only says what it would do."""

    MODE, LOADS = "Recommend", CONTROL_LOADS

    def test_what_is_recommended_is_right(self, arm: Arm):
        first, second = arm.stages[WRONG_KNOB], arm.stages[STEP]
        for stage, replicas in ((first, 1), (second, TODAY.replicas(second.arrivals))):
            _assert_near(_desired(stage), TODAY)
            assert stage.status["desired"]["replicas"] == replicas

    def test_nothing_is_applied(self, arm: Arm):
        for stage in arm.stages.values():
            assert [write.knobs for write in stage.policies if write.knobs != (None, None)] == []
            assert stage.scalings == [] and (stage.before, stage.after) == (1, 1)
            assert all(_effective(look) == {(START.max_num_seqs, START.prefill_token_budget)} for look in stage.looks)

    def test_the_promise_breaks(self, arm: Arm):
        assert arm.stages[STEP].kept_after is None and arm.stages[STEP].share_kept < 0.5
        assert _condition(arm.stages[STEP], "SLOMet") == "False"


class TestEnforce:
    """All four stages, with an operator that acts."""

    MODE, LOADS = "Enforce", LOADS

    def test_a_wrong_knob_is_put_right_and_no_pod_is_moved(self, arm: Arm):
        stage = arm.stages[WRONG_KNOB]
        written = stage.policies[-1]
        _assert_near(written.knobs, TODAY)
        assert _effective(stage.looks[-1]) == {written.knobs}
        assert stage.status["applied"]["policyRevision"] == written.revision
        assert stage.status["applied"]["acknowledgedReplicas"] == 1
        assert stage.scalings == [] and stage.after == 1
        assert stage.kept_after is not None

    def test_a_step_in_load_brings_the_replicas_that_it_takes(self, arm: Arm):
        stage = arm.stages[STEP]
        assert stage.after == TODAY.replicas(stage.arrivals) > 1
        assert reversals([stage.before, *(scaling.replicas for scaling in stage.scalings)]) <= 1
        assert _effective(stage.looks[-1]) == {_knobs_at(arm, stage.end)}
        _assert_near(_knobs_at(arm, stage.end), TODAY)
        assert stage.kept_after is not None

    def test_a_shift_of_the_mix_turns_the_knobs_first(self, arm: Arm):
        stage = arm.stages[SHIFT]
        before = _knobs_at(arm, stage.begin)
        turned = next(write.at for write in stage.policies if write.knobs != before)
        moved = [scaling.at for scaling in stage.scalings] + [write.at for write in stage.policies if write.cordoned]
        assert all(turned < at for at in moved)
        # Within the dead band, besides: the mix is a mean over a minute, so the knobs come near in steps.
        _assert_near(_knobs_at(arm, stage.end), SHIFTED, budget=0.10)
        assert stage.after == SHIFTED.replicas(stage.arrivals) > 1
        assert reversals([stage.before, *(scaling.replicas for scaling in stage.scalings)]) <= 1
        assert stage.kept_after is not None

    def test_without_load_the_emptiest_go_first_and_nobody_notices(self, arm: Arm):
        stage = arm.stages[GONE]
        cordon = next(write for write in stage.policies if write.cordoned)
        look = max((look for look in stage.looks if look.at < cordon.at), key=lambda look: look.at)
        busy = {name: report.running + report.waiting for name, report in look.reports.items()}
        staying = set(busy) - set(cordon.cordoned)
        assert staying and sum(busy.values()) > 0, f"nothing ran that a wrong choice could have met: {busy}"
        assert max(busy[name] for name in cordon.cordoned) <= min(busy[name] for name in staying)
        marks = arm.release.deeds.marks(stage.begin, stage.end)
        assert {mark.pod for mark in marks if mark.cost} == set(cordon.cordoned)
        assert cordon.at < min(mark.at for mark in marks) <= max(mark.at for mark in marks) <= stage.scalings[-1].at
        assert stage.after == 1 and set(stage.looks[-1].pods) <= staying
        summary = stage.summary
        assert summary is not None and summary.offered == summary.ok > 1

    def test_no_stream_of_any_stage_was_cut(self, arm: Arm):
        for stage in arm.stages.values():
            assert stage.summary is not None
            assert (stage.summary.failed, stage.summary.lost, stage.summary.truncated) == (0, 0, 0)


def _assert_near(knobs: tuple[int | None, int | None], answer: oracle.Answer, budget: float = 0.05) -> None:
    sequences, tokens = knobs
    assert sequences is not None and abs(sequences - answer.sequences) <= 1, f"{knobs} for {answer}"
    assert tokens is not None and abs(tokens - answer.budget) <= budget * answer.budget, f"{knobs} for {answer}"


def _desired(stage: Stage) -> tuple[int | None, int | None]:
    desired = stage.status["desired"]
    return desired.get("maxNumSeqs"), desired.get("prefillTokenBudget")


def _effective(look: Look) -> set[tuple[int | None, int | None]]:
    """The knobs in force in replicas that serve."""
    serving = [look.reports[name] for name in look.ready]
    return {(report.effective.max_num_seqs, report.effective.prefill_token_budget) for report in serving}


def _knobs_at(arm: Arm, moment: float) -> tuple[int | None, int | None]:
    """Those of the policy that was written last before."""
    return arm.release.deeds.policies(SLO, until=moment)[-1].knobs


def _condition(stage: Stage, kind: str) -> str:
    return next(str(known["status"]) for known in stage.status["conditions"] if known["type"] == kind)


def _row(mode: str, stage: Stage) -> str:
    summary = stage.summary
    assert summary is not None
    kept = "never" if stage.kept_after is None else f"after {stage.kept_after:.0f} s"
    turns = reversals([stage.before, *(scaling.replicas for scaling in stage.scalings)])
    written = [
        f"{write.at - stage.begin:.0f} s {write.knobs} {len(write.cordoned)} cordoned" for write in stage.policies
    ]
    scaled = [f"{scaling.at - stage.begin:.0f} s {scaling.replicas}" for scaling in stage.scalings]
    return "; ".join(
        (
            f"{mode:9} {stage.name:10} ended after {stage.end - stage.begin:.0f} s",
            f"promise kept {kept} ({stage.share_kept:.0%} in the second half)",
            f"replicas {stage.before} → {stage.after} ({', '.join(scaled) or 'untouched'}), {turns} reversals",
            f"policies {written or 'none'}, desired {stage.status.get('desired')}",
            f"offered {summary.offered}, shed {summary.shed}, failed {summary.failed}, lost {summary.lost}, "
            f"truncated {summary.truncated}",
            f"late {summary.lag_p99 * 1000:.0f} ms, overrun {stage.overrun:.1%}",
        )
    )
