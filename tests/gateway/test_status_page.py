"""The page at /: self-contained, and its numbers are the counters'."""

import asyncio
import hashlib
import re

from headway_core.contract.policy import Endpoint, Pool


async def test_the_page_needs_nothing_from_elsewhere(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime())
    reply = await gateway.get("/")
    assert reply.status == 200 and reply.header("content-type").startswith("text/html")
    assert "default-src 'none'" in reply.header("content-security-policy")
    page = reply.body.decode()
    links = re.findall(r"""(?:src|href)=["']([^"']+)|url\(([^)]+)\)|fetch\("([^"]+)""", page)
    assert {next(filter(None, link)).split(",")[0] for link in links} == {"data:image/svg+xml", "status.json"}


async def test_its_numbers_are_what_happened(start_gateway, stub_runtime, until):
    stub = stub_runtime()
    gateway = await start_gateway(stub)
    gateway.gateway.recent.sample()
    for _ in range(4):
        await gateway.ask(stream=True, stub={"first": 0.1, "tokens": 5, "gap": 0.02})
    await gateway.ask(stub={"status": 500})
    await gateway.settled()
    gateway.gateway.recent.sample()
    status = (await gateway.get("/status.json")).json()
    (pool,) = status["pools"]
    (seen,) = pool["classes"]
    assert (pool["model"], pool["ready"], status["state"]) == ("m", 1, "ready")
    assert (seen["offered"], seen["failed"], seen["shed"]) == (5, 1, 0)
    assert (seen["ttftAttainment"], seen["tpotAttainment"]) == (1.0, 1.0), "of the four that had an answer to judge"
    assert seen["attainment"] == 4 / 5 and (seen["ttftTarget"], seen["tpotTarget"]) == (2.0, 0.1)
    assert 0.08 < seen["ttft"] < 0.6 and 0.01 < seen["tpot"] < 0.2 and seen["rate"] > 0
    assert len(seen["history"]) >= 2 and seen["history"][0]["ttft"] is None
    (replica,) = pool["replicas"]
    assert (replica["name"], replica["state"], replica["reachable"]) == ("stub-0", "ready", True)
    await stub.kill()
    await until(lambda: not gateway.gateway.recent.status()["pools"][0]["replicas"][0]["reachable"])


async def test_nothing_seen_is_unknown_and_not_zero(start_gateway):
    gateway = await start_gateway(ready=False, pools=(Pool("p", (Endpoint("127.0.0.1", 1, 2),)),))
    await asyncio.sleep(0.1)
    (pool,) = (await gateway.get("/status.json")).json()["pools"]
    assert pool["model"] is None and pool["replicas"] == []
    assert pool["classes"][0]["attainment"] is None and pool["classes"][0]["ttft"] is None


async def test_it_shows_no_secret(start_gateway, stub_runtime, tmp_path):
    digest = hashlib.sha256(b"a-key-long-enough-1").hexdigest()
    (tmp_path / "keys").write_text(f"acme sha256:{digest}\n")
    gateway = await start_gateway(stub_runtime(), keys=tmp_path / "keys")
    await gateway.ask(prompt="a secret prompt", headers=[("authorization", "Bearer a-key-long-enough-1")])
    text = (await gateway.get("/status.json")).body + (await gateway.get("/")).body
    assert not [secret for secret in (b"acme", digest.encode(), b"secret prompt", b"a-key-long") if secret in text]
