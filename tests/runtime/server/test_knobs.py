"""Live knobs: a policy file changes both while requests run; what was started goes on, and no output changes."""

import itertools
import json
import threading
from dataclasses import replace

import httpx
import pytest
from headway_core.contract import documents
from headway_core.contract.policy import Knobs, Policy, Pool
from headway_core.slo import Objectives, PriorityClass, TpotObjective

CLASSES = (
    PriorityClass("interactive", 100, Objectives(tpot=TpotObjective(0.1))),
    PriorityClass("batch", 0, Objectives(tpot=TpotObjective(1.0))),
)
BASE = Policy(revision=1, slo_uid="u", generation=1, pool=Pool("p"), classes=CLASSES, default_class="interactive")


class PolicyFolder:
    """A mounted directory of policies, changed as a ConfigMap is: a new file renamed over the old one."""

    def __init__(self, path):
        self.path = path

    def write(self, policy):
        text = policy if isinstance(policy, str) else documents.dump(policy)
        (self.path / ".next").write_text(text)
        (self.path / ".next").rename(self.path / "chat.json")


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return PolicyFolder(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def steered(start_runtime, tiny_checkpoint, policies, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "iterations.jsonl"
    model = tiny_checkpoint("llama", max_position_embeddings=4096)
    flags = [
        "--policy",
        policies.path,
        "--pool",
        "p",
        "--replica-id",
        "r-0",
        "--iteration-log",
        log,
        "--num-blocks",
        1024,
    ]
    runtime = start_runtime(model, *flags, "--no-enable-prefix-caching")
    runtime.iteration_log = log
    return runtime


def set_knobs(runtime, policies, eventual, revision, **knobs):
    """Writes a policy and waits until the replica says that it is in force."""
    policies.write(replace(BASE, revision=revision, knobs=Knobs(**knobs)))

    def acknowledged():
        report = runtime.load()
        known = report.policy
        wanted = Knobs(min(8, knobs["max_num_seqs"]), min(64, knobs["prefill_token_budget"]))
        return (
            known is not None
            and known.revision == revision
            and report.effective == wanted == known.effective
            and report
        )

    return eventual(acknowledged, 10, f"revision {revision}")


def request_body(at):
    return {
        "prompt": [5 + (at * 7 + k) % 200 for k in range(150)],
        "max_tokens": 60,
        "seed": at,
        "temperature": 1.0,
        "ignore_eos": True,
    }


def test_both_knobs_lowered_and_raised_under_load_are_obeyed_and_change_no_output(steered, policies, eventual):
    expected = [steered.completion(**request_body(at)).json()["choices"][0]["text"] for at in range(12)]
    set_knobs(steered, policies, eventual, 1, max_num_seqs=8, prefill_token_budget=64)
    steered.iteration_log.write_text("")
    stop = threading.Event()
    wrong, served = [], []

    def user(number):
        with httpx.Client(timeout=120) as client:
            while not stop.is_set():
                at = (number + len(served)) % 12
                text = client.post(f"{steered.url}/v1/completions", json=request_body(at)).json()["choices"][0]["text"]
                served.append(at)
                if text != expected[at]:
                    wrong.append(at)

    users = [threading.Thread(target=user, args=(number,)) for number in range(16)]
    for thread in users:
        thread.start()
    try:
        eventual(lambda: len(served) >= 12, 60, "requests served under the first knobs")
        for revision, knobs in enumerate([(2, 8), (8, 64), (2, 8), (8, 64)], 2):
            set_knobs(steered, policies, eventual, revision, max_num_seqs=knobs[0], prefill_token_budget=knobs[1])
            before = len(served)
            # At most 8 of these ran before the change: the others started under it.
            eventual(lambda before=before: len(served) >= before + 16, 60, "requests served under these knobs")
    finally:
        stop.set()
        for thread in users:
            thread.join()
    assert not wrong and len(served) >= 60
    spans = split_by_knobs([json.loads(line) for line in steered.iteration_log.read_text().splitlines()])
    assert [span[0]["knobs"]["max_num_seqs"] for span in spans] == [8, 2, 8, 2, 8]
    for span in spans:
        budget, slots = span[0]["knobs"]["prefill_token_budget"], span[0]["knobs"]["max_num_seqs"]
        assert max(step["shape"]["prefill_tokens"] for step in span) == budget, (
            "obeyed from the first iteration on, and made use of"
        )
        settled = next(at for at, step in enumerate(span) if step["running"] <= slots)
        # Nobody is killed: those that ran go on, and each has at most its own rest to do.
        assert all(step["running"] <= slots for step in span[settled:])
        assert all(a["running"] >= b["running"] for a, b in itertools.pairwise(span[:settled]))
        assert max(step["running"] for step in span[settled:]) == slots
    assert steered.load().preemptions == 0


def split_by_knobs(steps):
    """Runs of consecutive iterations with equal knobs."""
    spans = []
    for step in steps:
        if not spans or spans[-1][0]["knobs"] != step["knobs"]:
            spans.append([])
        spans[-1].append(step)
    return spans


def test_knobs_above_the_start_up_capacity_are_clamped_and_it_says_so(steered, policies, eventual):
    report = set_knobs(steered, policies, eventual, 20, max_num_seqs=1000, prefill_token_budget=9)
    assert report.policy.clamped_by == {"maxNumSeqs": "start-up capacity 8"}
    assert steered.client.get(f"{steered.control}/policy").json()["revision"] == 20


def test_a_broken_or_older_policy_changes_nothing_and_is_reported(steered, policies, eventual):
    set_knobs(steered, policies, eventual, 30, max_num_seqs=5, prefill_token_budget=50)
    policies.write('{"revision": "many"}')
    report = eventual(lambda: (report := steered.load()).policy.error and report, 10, "the error")
    assert (report.policy.revision, report.effective) == (30, Knobs(5, 50))
    policies.write(replace(BASE, revision=29, knobs=Knobs(1, 1)))
    report = eventual(lambda: not (report := steered.load()).policy.error and report, 10, "the error to be over")
    assert (report.policy.revision, report.effective) == (30, Knobs(5, 50))
    (policies.path / "chat.json").unlink()
    eventual(lambda: steered.load().policy.age > 1.0, 10, "age to grow")
    assert steered.load().policy.revision == 30


def test_a_cordoned_replica_says_so_and_goes_on_serving(steered, policies, eventual):
    policies.write(replace(BASE, revision=40, cordoned=("r-0", "r-9")))
    eventual(lambda: steered.load().cordoned, 10, "the cordon")
    assert steered.completion(prompt="A", max_tokens=1).status_code == 200
    policies.write(replace(BASE, revision=41))
    eventual(lambda: not steered.load().cordoned, 10, "the cordon's end")


def test_a_higher_class_goes_first_when_slots_are_full(steered, policies, eventual):
    """Two slots held by a lower class: the next of the higher class starts at once, and the evicted one still ends as
    it would have."""
    set_knobs(steered, policies, eventual, 50, max_num_seqs=2, prefill_token_budget=64)
    body = {**request_body(3), "max_tokens": 900}
    with httpx.Client(timeout=120) as client:
        texts = {}

        def lower(at):
            answer = httpx.post(
                f"{steered.url}/v1/completions", json=body, headers={"x-headway-priority": "-5"}, timeout=120
            )
            texts[at] = answer.json()["choices"][0]["text"]

        threads = [threading.Thread(target=lower, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        eventual(lambda: steered.load().running == 2, what="both slots taken")
        headers = {"x-headway-priority": "100", "x-headway-class": "interactive"}
        assert client.post(f"{steered.url}/v1/completions", json=request_body(1), headers=headers).status_code == 200
        assert len(texts) == 0, "the urgent one did not wait for a slot to come free"
        for thread in threads:
            thread.join()
    assert texts[0] == texts[1]
    assert steered.load().preemptions == 1
    assert steered.metric("headway_engine_preemptions_total", kind="recompute", cause="slots") == 1
    assert steered.metric("headway_engine_ttft_seconds_count", **{"class": "interactive"}) == 1
