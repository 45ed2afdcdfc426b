"""What becomes of values: numbers stay whole, text stays as written, a mistake is named with its place, a secret is
nowhere in the open."""

import json
import re

import pytest
from headway_gateway import settings as gateway_settings
from headway_operator import settings as operator_settings
from headway_runtime import settings as runtime_settings
from rendering import RenderError, container, nested, one, render

pytestmark = pytest.mark.cluster

HASHED = "acme sha256:" + "0" * 64 + " interactive,batch"


@pytest.mark.parametrize("drain", [1, 30, 3600])
def test_one_value_sets_drain_and_grace(drain: int):
    documents = render(values={"gateway": {"drainSeconds": drain}, "runtime": {"drainSeconds": drain}})
    for name in ("rel-headway-gateway", "rel-headway-chat"):
        pod = one(documents, "Deployment", name)["spec"]["template"]["spec"]
        assert f"--drain-seconds={drain}" in pod["containers"][0]["args"]
        assert pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 5
        assert pod["terminationGracePeriodSeconds"] == 5 + drain + 10


@pytest.mark.parametrize("number", [1_000_000, 1_048_576, 2_147_483_648])
@pytest.mark.parametrize("how", ["file", "set", "set-json"])
def test_large_numbers_stay_whole_and_the_programs_read_them(number: int, how: str):
    budget = min(number, 1_048_576)
    numbers = {
        "gateway.maxBodyBytes": number,
        "gateway.maxQueueBytes": number,
        "runtime.engine.maxModelLen": budget,
        "runtime.engine.prefillTokenBudget": budget,
    }
    if how == "file":
        documents = render(values=nested(numbers))
    else:
        documents = render(*(part for path, value in numbers.items() for part in (f"--{how}", f"{path}={value}")))
    gateway = gateway_settings.parse(container(documents, "rel-headway-gateway")["args"])
    assert (gateway.max_body_bytes, gateway.max_queue_bytes) == (number, number)
    runtime = runtime_settings.parser().parse_args(container(documents, "rel-headway-chat")["args"])
    assert (runtime.max_model_len, runtime.prefill_token_budget) == (budget, budget)


@pytest.mark.parametrize(
    "text",
    [
        "0123",
        "1e3",
        "true",
        "null",
        "a,b",
        "two words",
        'say "x"',
        "line\nbreak",
        "{{ .Values.x }}",
        "c:\\d",
        "é – 漢",
        "~",
        "- a",
        "#b",
    ],
)
def test_text_survives_exactly(text: str):
    values = {
        "pools": [
            {
                "name": "chat",
                "model": {"hostPath": "/m", "path": text},
                "extraArgs": [text],
                "extraEnv": [{"name": "A", "value": text}],
            }
        ],
        "image": {"tag": "1e10"},
    }
    first = container(render(values=values), "rel-headway-chat")
    assert f"--model=/models/{text}" in first["args"]
    assert first["args"][-1] == text
    assert {"name": "A", "value": text} in first["env"]
    assert first["image"] == "headway/runtime:1e10"


def test_a_path_with_a_dollar_sign_is_not_taken_for_a_variable():
    """Kubernetes reads `$$(` as the text `$(`."""
    first = container(
        render(values={"pools": [{"name": "chat", "model": {"hostPath": "/m", "path": "a$(B)"}}]}), "rel-headway-chat"
    )
    assert "--model=/models/a$$(B)" in first["args"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"replicsa": 3}}, "additional properties 'replicsa' not allowed"),
        ({"gatway": {}}, "additional properties 'gatway' not allowed"),
        ({"pools": [{"name": "chat", "modle": {}}]}, "additional properties 'modle' not allowed"),
        ({"pools": [{"model": {}}]}, "missing property 'name'"),
        ({"pools": [{"name": "Chat"}]}, "'Chat' does not match pattern"),
        ({"pools": [{"name": "gateway"}]}, "/pools/0/name"),
        ({"pools": [{"name": "a"}, {"name": "a"}]}, "a is there twice"),
        (
            {"pools": [{"name": "a", "model": {"hostPath": "/x", "pvc": {"claimName": "y"}}}]},
            "model names 2 sources (pvc, hostPath): choose one",
        ),
        ({"pools": [{"name": "a", "model": {"pvc": {}}}]}, "missing property 'claimName'"),
        ({"runtime": {"resources": {"limits": {"cpu": 2}}}}, "resources.limits.cpu is refused"),
        ({"image": {"tag": 20240101}}, "at '/image/tag': got number, want null or string"),
        ({"gateway": {"drainSeconds": "30s"}}, "at '/gateway/drainSeconds': got string"),
        ({"gateway": {"keys": {"hashed": ["sk-a-key-in-the-clear"]}}}, "/gateway/keys/hashed/0"),
        ({"operator": {"scope": "Everywhere"}}, "at '/operator/scope'"),
        ({"runtime": {"engine": {"kvCacheMemoryBytes": "much"}}}, "/runtime/engine/kvCacheMemoryBytes"),
        ({"runtime": {"gpu": {"count": -1}}}, "/runtime/gpu/count"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(values: dict, message: str):
    with pytest.raises(RenderError, match=re.escape(message)):
        render(values=values)


def test_no_key_is_in_a_plain_argument_or_variable():
    documents = render(values={"gateway": {"keys": {"hashed": [HASHED]}}})
    assert one(documents, "Secret", "rel-headway-gateway-keys")["stringData"]["keys"] == HASHED
    assert HASHED.split()[1] not in json.dumps([d for d in documents if d["kind"] != "Secret"])


def test_other_keys_roll_the_gateways_and_nothing_else():
    def templates(keys):
        documents = render(values={"gateway": {"keys": {"hashed": keys}}})
        return {d["metadata"]["name"]: d["spec"]["template"] for d in documents if d["kind"] == "Deployment"}

    before, after = templates([HASHED]), templates([HASHED.replace("0", "1")])
    assert [name for name in before if before[name] != after[name]] == ["rel-headway-gateway"]


def test_the_operator_reads_its_flags():
    flags = container(render(release="a-release"), "a-release-headway-operator")["args"]
    settings = operator_settings.parse(flags)
    assert (settings.namespaces, settings.lease_namespace, settings.lease_name) == (
        ("ns1",),
        "ns1",
        "a-release-headway-operator",
    )
    everywhere = operator_settings.parse(
        container(render(values={"operator": {"scope": "Cluster"}}), "rel-headway-operator")["args"]
    )
    assert (everywhere.namespaces, everywhere.lease_namespace) == ((), "ns1")


def test_a_runtime_gets_its_gpus_and_no_cpu_limit():
    documents = render(values={"pools": [{"name": "chat", "gpu": {"count": 2}}]})
    assert container(documents, "rel-headway-chat")["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 2}


def test_a_rollout_gives_gateways_the_time_to_learn_new_addresses():
    """Resolvers cache them for 30 s: sooner, the pod that gateways know would go before they know the next one."""
    pools = [{"name": "chat"}, {"name": "slow", "minReadySeconds": 0}]
    documents = render(values={"pools": pools})
    given = {
        name: one(documents, "Deployment", name)["spec"]["minReadySeconds"]
        for name in ("rel-headway-chat", "rel-headway-slow")
    }
    assert given == {"rel-headway-chat": 30, "rel-headway-slow": 0}


def test_weights_that_take_long_are_waited_for():
    deployment = one(render(values={"runtime": {"startupSeconds": 1800}}), "Deployment", "rel-headway-chat")
    probe = deployment["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert deployment["spec"]["progressDeadlineSeconds"] > 1800
