import pytest
from headway_operator.kube import Kube, KubeError

OK = (200, {}, '{"kind": "X"}')


@pytest.fixture
async def kube(api_server):
    made = Kube()
    yield made
    await made.close()


@pytest.mark.parametrize(
    "trouble", [(503, {}, "x"), (429, {"Retry-After": "0"}, "{}"), (500, {}, "{}"), (200, {}, "<html>")]
)
async def test_what_may_pass_is_tried_again(api_server, kube, trouble):
    api_server.script["/x"] = [trouble, trouble, OK]
    assert await kube.get("/x") == {"kind": "X"}
    assert len(api_server.calls) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
async def test_what_will_not_pass_is_told_at_once_in_the_servers_words(api_server, kube, status):
    api_server.script["/x"] = [(status, {}, '{"message": "no, because"}')]
    with pytest.raises(KubeError, match="no, because") as caught:
        await kube.get("/x")
    assert len(api_server.calls) == 1
    assert not caught.value.transient
    assert (caught.value.forbidden, caught.value.conflict, caught.value.missing) == (
        status == 403,
        status == 409,
        status in (404, 410),
    )
    assert kube.denied == (status == 403)


async def test_what_does_not_pass_is_transient_and_ends(api_server, kube):
    api_server.script["/x"] = [(503, {}, "x")]
    with pytest.raises(KubeError) as caught:
        await kube.get("/x")
    assert caught.value.transient
    assert len(api_server.calls) == 3


async def test_a_replacement_is_sent_once(api_server, kube):
    api_server.script["/x"] = [(503, {}, "x"), OK]
    with pytest.raises(KubeError):
        await kube.replace("/x", {})
    assert len(api_server.calls) == 1


async def test_a_server_that_is_not_there(api_server, kube):
    api_server.close()
    with pytest.raises(KubeError) as caught:
        await kube.get("/x")
    assert (caught.value.status, caught.value.transient) == (0, True)
    api_server.__init__()  # the fixture closes it once more


def test_no_credentials_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "nowhere"))
    with pytest.raises(KubeError, match="run in a pod with a ServiceAccount, or set KUBECONFIG"):
        Kube()
