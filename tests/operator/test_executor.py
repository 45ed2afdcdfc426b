"""Writing policies: many objects share one gateway's ConfigMap and must not refuse each other; a stranger's writes are
outlived."""

import asyncio

import pytest
from headway_core.contract.documents import load_policy
from headway_core.contract.policy import Knobs
from headway_core.planning.policy_document import policy_document
from headway_core.slo_parser import parse_slo
from headway_operator.executor import Executor, NotLeading
from headway_operator.kube import Kube
from headway_operator.resources import Deployment, Service
from headway_operator.targets import ResolvedTarget

PATH = "/api/v1/namespaces/ns/configmaps/gw-policy"


def target(name):
    document = {
        "apiVersion": "headway.dev/v1alpha1",
        "kind": "ServingSLO",
        "metadata": {"name": name, "namespace": "ns", "uid": name},
        "spec": {
            "targetRef": {"name": f"rt-{name}"},
            "gatewayRef": {"name": "gw"},
            "objectives": {"ttft": {"target": "1s"}},
        },
    }
    slo = parse_slo(document)
    return ResolvedTarget(
        slo, Deployment("ns", slo.target_name, 1, False), Service("ns", slo.target_name, {}), "gw", (), ()
    )


def policy(of, sequences):
    return policy_document(of.slo, (of.endpoint,), Knobs(sequences), revision=1)


def config_map(version, **data):
    return {"metadata": {"name": "gw-policy", "namespace": "ns", "resourceVersion": version}, "data": data}


@pytest.fixture
async def kube(api_server):
    api_server.config_maps["gw-policy"] = config_map("0")
    made = Kube()
    yield made
    await made.close()


def counted(api_server):
    return {
        method: sum(known == method and path == PATH for known, path, _ in api_server.calls)
        for method in ("GET", "PATCH")
    }


async def test_fifty_objects_behind_one_gateway_read_once_and_never_refuse_each_other(kube, api_server):
    executor = Executor(kube, lambda: True)
    targets = [target(f"slo-{number}") for number in range(50)]
    await asyncio.gather(*(executor.policy_map(each, 1.0) for each in targets))
    await asyncio.gather(*(executor.write_policy(each, policy(each, 8), 1.0) for each in targets))
    assert counted(api_server) == {"GET": 1, "PATCH": 50}
    assert len(api_server.config_maps["gw-policy"]["data"]) == 50
    assert (await executor.policy_map(targets[7], 2.0)).policy("slo-7").knobs == Knobs(8)


async def test_what_somebody_else_wrote_meanwhile_is_read_and_outvoted(kube, api_server):
    executor = Executor(kube, lambda: True)
    mine = target("a")
    await executor.write_policy(mine, policy(mine, 8), 1.0)
    higher = api_server.config_maps["gw-policy"]["data"]["a.json"].replace('"revision":1', '"revision":41')
    api_server.config_maps["gw-policy"] = config_map("changed", **{"theirs.json": higher})
    written = await executor.write_policy(mine, policy(mine, 9), 2.0)
    assert written.revision == 42
    assert load_policy(api_server.config_maps["gw-policy"]["data"]["a.json"]) == written
    assert counted(api_server) == {"GET": 2, "PATCH": 3}


async def test_nothing_is_written_without_the_lease(kube, api_server):
    with pytest.raises(NotLeading):
        await Executor(kube, lambda: False).write_policy(target("a"), policy(target("a"), 8), 1.0)
    assert counted(api_server)["PATCH"] == 0
