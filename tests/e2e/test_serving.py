"""From `helm install` to tokens of the default model through the gateway's Service, and on to an upgrade that nobody
notices."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from cluster.client import Client
from cluster.fixtures import fresh_namespace
from release import Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = 400
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal.yaml"


@pytest.fixture(scope="module")
def release(full_cluster: Client, product_values: Path, request: pytest.FixtureRequest) -> Iterator[Release]:
    with fresh_namespace(full_cluster, request) as namespace:
        installed = Release(full_cluster, namespace, product_values)
        installed.install()
        # The gateway may hear of a pool seconds after its pods are ready. Until then it says 503 and when to come back:
        # as told here.
        client = installed.client().with_options(max_retries=8)
        client.chat.completions.create(model=client.models.list().data[0].id, messages=QUESTION, max_tokens=1)
        yield installed


def test_the_openai_client_gets_tokens_of_the_default_model(release: Release):
    client = release.client()
    (model,) = client.models.list().data
    assert "SmolLM2" in model.id
    whole = client.chat.completions.create(model=model.id, messages=QUESTION, max_tokens=24, temperature=0)
    assert whole.usage is not None and whole.usage.completion_tokens > 1
    chunks = list(
        client.chat.completions.create(model=model.id, messages=QUESTION, max_tokens=24, temperature=0, stream=True)
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )


def test_what_clients_must_not_reach_is_not_on_the_service(release: Release):
    ports = release.cluster.get("service/rel-headway-gateway", namespace=release.namespace)["spec"]["ports"]
    assert [port["targetPort"] for port in ports] == ["http"]


def test_an_upgrade_that_changes_the_gateway_restarts_no_runtime_and_cuts_no_stream(release: Release):
    runtimes, (old,) = release.pods("runtime"), release.pods("gateway")
    client = release.client()
    (model,) = client.models.list().data
    with ThreadPoolExecutor(1) as background:
        reading = background.submit(read_long_stream, client, model.id)
        release.upgrade("--set", "gateway.maxQueueRequests=500")
        release.cluster.wait_for(lambda: old not in release.pods("gateway"), "the old gateway is told to stop")
        assert not reading.done(), "the stream ended too early to tell anything"
        assert client.chat.completions.create(model=model.id, messages=QUESTION, max_tokens=2).usage is not None
        finish, tokens = reading.result(timeout=180)
    assert (finish, tokens) == ("length", LONG)
    assert release.pods("runtime") == runtimes

    release.cluster.helm("rollback", "rel", "1", "--namespace", release.namespace, "--wait", "--timeout", "120s")
    assert release.pods("runtime") == runtimes


def test_an_slo_tells_its_story(release: Release):
    """Applied, acknowledged by the pods, measured, judged: in the columns, in the conditions and in what `describe`
    prints."""
    cluster, namespace = release.cluster, release.namespace
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(example()))
    cluster.wait_for(
        lambda: condition(release, "KnobsApplied") == ("True", "Acknowledged"),
        "the pods acknowledge the policy",
        patience=30,
    )
    assert condition(release, "TargetResolved")[0] == "True"
    assert condition(release, "SLOMet") == ("Unknown", "NoTraffic"), "no request is no kept promise"
    client = release.client()
    (model,) = client.models.list().data

    def asked_and_told() -> bool:
        """People keep asking; figures are shown when a whole window was seen."""
        for _ in client.chat.completions.create(model=model.id, messages=QUESTION, max_tokens=8, stream=True):
            pass
        return condition(release, "SLOMet")[0] == "True" and row(release)["TTFT"] != ""

    cluster.wait_for(asked_and_told, "the promise is judged kept, with figures", patience=180, pause=2)
    told = row(release)
    assert {name: told[name] for name in ("NAME", "TARGET", "MET", "REPLICAS", "MODE", "READY")} == {
        "NAME": "chat",
        "TARGET": "rel-headway-chat",
        "MET": "True",
        "REPLICAS": "1",
        "MODE": "Enforce",
        "READY": "True",
    }
    assert re.fullmatch(r"[0-9.]+m?s", told["TTFT"]) and re.fullmatch(r"[0-9.]+m?s", told["TPOT"])
    described = cluster.kubectl("describe", "sslo", "chat", "-n", namespace)
    for words in ("Met", "Acknowledged", "Policy Revision:"):
        assert words in described
    runtime = next(iter(release.pods("runtime")))
    report = json.loads(
        cluster.kubectl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{runtime}:8001/proxy/load")
    )
    applied = cluster.get("sslo/chat", namespace=namespace)["status"]["applied"]
    assert report["policy"]["revision"] == applied["policyRevision"]


def test_a_deleted_slo_goes_at_once_and_changes_nothing(release: Release):
    cluster, namespace = release.cluster, release.namespace
    before = release.pods("runtime")
    scale = cluster.get("deployment/rel-headway-chat", namespace=namespace)["spec"]["replicas"]
    cluster.kubectl("delete", "sslo", "chat", "-n", namespace, "--timeout", "20s")
    assert cluster.get("deployment/rel-headway-chat", namespace=namespace)["spec"]["replicas"] == scale
    assert release.pods("runtime") == before


def test_nobody_asked_for_what_the_chart_did_not_give(release: Release):
    """Over everything so far: the operator was refused nothing, and gateways and runtimes never spoke to the API
    server."""
    audit = release.cluster.audit
    if audit is None:
        pytest.skip("no audit log of a cluster that is not ours")
    audit.settle()
    account = f"system:serviceaccount:{release.namespace}:"
    operator = audit.count("verb", "resource", "code", user=f"{account}rel-headway-operator")
    assert operator[("patch", "servingslos", 200)] > 0, "the test looks at the right account"
    assert {call: count for call, count in operator.items() if call[2] in (401, 403)} == {}
    assert audit.entries(user=f"{account}default") == []


def test_every_pod_is_in_the_books_of_its_load_report(release: Release):
    """Read as the operator reads it: from the pods' control ports, found by their labels."""
    for component, path in (("gateway", "/load"), ("runtime", "/load")):
        for name in release.pods(component):
            answer = release.cluster.kubectl(
                "get", "--raw", f"/api/v1/namespaces/{release.namespace}/pods/{name}:8001/proxy{path}"
            )
            assert name in json.dumps(json.loads(answer))


def test_uninstalling_takes_everything_of_the_release_and_the_namespace_goes_unaided(release: Release):
    release.cluster.helm("uninstall", "rel", "--namespace", release.namespace, "--wait", "--timeout", "120s")
    release.cluster.kubectl("delete", "namespace", release.namespace, "--timeout", "60s", timeout=90)


def example() -> dict[str, Any]:
    """The example for this release, with targets that hold on a busy machine: what is tested is the story, not the
    speed."""
    slo: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    slo["spec"]["targetRef"]["name"] = "rel-headway-chat"
    slo["spec"]["gatewayRef"]["name"] = "rel-headway-gateway"
    slo["spec"] |= {
        "objectives": {"ttft": {"target": "30s", "percentile": 50}, "tpot": {"target": "5s", "percentile": 50}},
        "bounds": {"replicas": {"min": 1, "max": 1}},
        "evaluation": {"window": "1m", "minSamples": 3},
    }
    return slo


def condition(release: Release, kind: str) -> tuple[str, str]:
    """(status, reason) of one condition; ("", "") when it is not there yet."""
    found = release.cluster.get("sslo/chat", namespace=release.namespace).get("status", {}).get("conditions", [])
    return next(((each["status"], each["reason"]) for each in found if each["type"] == kind), ("", ""))


def row(release: Release) -> dict[str, str]:
    """What `kubectl get sslo` shows, by column head; an empty cell is an empty string."""
    heads, line = release.cluster.kubectl("get", "sslo", "-n", release.namespace).splitlines()
    places = [(match.group(), match.start()) for match in re.finditer(r"\S+", heads)]
    ends = [start for _, start in places[1:]] + [None]
    return {head: line[start:end].strip() for (head, start), end in zip(places, ends, strict=True)}


def read_long_stream(client: openai.OpenAI, model: str) -> tuple[str | None, int]:
    """How it ended, and how many tokens the runtime counted."""
    extra = {"ignore_eos": True}
    usage = {"include_usage": True}
    finish, tokens = None, 0
    for chunk in client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=LONG, stream=True, stream_options=usage, extra_body=extra
    ):
        finish = chunk.choices[0].finish_reason if chunk.choices and chunk.choices[0].finish_reason else finish
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return finish, tokens
