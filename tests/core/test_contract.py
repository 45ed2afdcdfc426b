import dataclasses
import json
import types
import typing
from enum import Enum

import pytest
from headway_core.contract import header_names
from headway_core.contract.documents import dump, load_gateway_report, load_hint, load_policy, load_runtime_report
from headway_core.contract.policy import Endpoint, Knobs, Policy, Pool
from headway_core.contract.reports import (
    Acknowledgement,
    ClassLoad,
    ClassReport,
    EngineLimits,
    GatewayReport,
    LoadHint,
    Mix,
    PoolReport,
    ReplicaState,
    RuntimeReport,
    StepTimeReport,
)
from headway_core.errors import DocumentError
from headway_core.slo import Objectives, PriorityClass, TpotObjective, TtftObjective

POLICY = Policy(
    revision=17,
    slo_uid="u-1",
    generation=3,
    pool=Pool("chat-runtime", (Endpoint("chat-runtime.prod.svc"),)),
    classes=(
        PriorityClass(
            "interactive", 100, Objectives(TtftObjective(1.0, 95.0, 0.25), TpotObjective(0.05, 99.9)), 8, ("auto",)
        ),
        PriorityClass("batch", 0, Objectives(TtftObjective(60.0)), max_queue_time=600.0),
    ),
    default_class="interactive",
    knobs=Knobs(48, 640),
    cordoned=("chat-runtime-abc",),
)
REPORT = RuntimeReport(
    replica_id="chat-runtime-abc",
    pool="chat-runtime",
    model="smollm2",
    boot_id="b1",
    seq=4,
    at=1.5,
    state=ReplicaState.READY,
    limits=EngineLimits(64, 512, 2048, 16, 4096),
    effective=Knobs(48, 512),
    policy=Acknowledgement(17, "u-1", Knobs(48, 512), {"prefillTokenBudget": "start-up capacity"}),
    classes=(ClassLoad(100, 1, 2, 300),),
    prefill_rate=700.0,
    step_time=StepTimeReport(0.01, 1e-4, 2e-4, 1e-7, 1e-9, 1e-4, 32, 100, 16, 256, 0.05),
    mix=Mix(20, 300.0, 10.0, 64.0, 350.0),
    dispatched={"g1": 12},
)
GATEWAY = GatewayReport(
    gateway="gw-0",
    boot_id="g1",
    seq=1,
    at=2.0,
    state=ReplicaState.READY,
    pools=(
        PoolReport(
            "chat-runtime",
            {
                "interactive": ClassReport(
                    offered=10, outcomes={"ok": 9, "shed": 1}, shed={"prefill_wait": 1}, ttft={5: 9}
                )
            },
            replica_in_flight={"chat-runtime-abc": 2},
        ),
    ),
)
HINT = LoadHint("b1", 5, 3, 1, 2, 100, {100: 64, 0: 7}, {"g1": 12}, 700.0)
DOCUMENTS = [(POLICY, load_policy), (REPORT, load_runtime_report), (GATEWAY, load_gateway_report), (HINT, load_hint)]


@pytest.mark.parametrize(("document", "load"), DOCUMENTS)
def test_a_document_comes_back_as_it_was_written(document, load):
    assert load(dump(document)) == document
    assert dump(load(dump(document))) == dump(document)


@pytest.mark.parametrize(("document", "load"), DOCUMENTS)
def test_members_from_a_newer_writer_are_passed_over(document, load):
    data = json.loads(dump(document))
    data["fromTheFuture"] = {"x": [1]}
    assert load(json.dumps(data)) == document


def test_unknown_is_left_out_and_stays_unknown():
    text = dump(dataclasses.replace(REPORT, prefill_rate=None))
    assert "prefillRate" not in text
    assert load_runtime_report(text).prefill_rate is None


@pytest.mark.parametrize(
    ("member", "value", "field"),
    [
        ("revision", "17", "revision"),
        ("revision", True, "revision"),
        ("revision", 0, ""),
        ("pool", None, "pool"),
        ("classes", {}, "classes"),
        ("classes", [{"name": "x"}], "classes[0].priority"),
        ("knobs", {"maxNumSeqs": 0}, "knobs"),
        ("knobs", {"maxNumSeqs": 1.5}, "knobs.maxNumSeqs"),
        ("defaultClass", "nobody", ""),
        ("window", float("nan"), "window"),
        ("window", 10**400, "window"),
        ("window", -float("inf"), "window"),
        ("cordoned", ["a", 1], "cordoned[1]"),
    ],
)
def test_a_wrong_member_is_named(member, value, field):
    data = json.loads(dump(POLICY))
    data[member] = value
    with pytest.raises(DocumentError) as caught:
        load_policy(json.dumps(data))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[]", "null", "{", b"\xff", '{"revision":1}', "[" * 100_000])
def test_what_is_no_document_is_one_clear_error(text):
    with pytest.raises(DocumentError):
        load_policy(text)


def test_every_field_has_a_type_the_codec_knows():
    plain = (int, str, bool, float)

    def visit(kind):
        origin = typing.get_origin(kind)
        if origin is not None or isinstance(kind, types.UnionType):
            for member in typing.get_args(kind):
                if member not in (type(None), Ellipsis):
                    visit(member)
        elif dataclasses.is_dataclass(kind):
            for hint in typing.get_type_hints(kind).values():
                visit(hint)
        else:
            assert kind in plain or issubclass(kind, Enum), kind

    for document, _ in DOCUMENTS:
        visit(type(document))


def test_tenants_get_different_salts():
    assert header_names.tenant_salt("a") != header_names.tenant_salt("b")
    assert header_names.tenant_salt(None) == header_names.tenant_salt("")
