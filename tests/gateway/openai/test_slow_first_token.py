"""A first token that takes longer than anybody on the way waits for a byte: the official client, in two versions, and a
bare socket."""

import asyncio
import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("slow_first_token.py")


async def run(url, first, timeout, folder=None):
    env = {**os.environ, **({"PYTHONPATH": str(folder)} if folder else {})}
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), url, str(first), str(timeout), env=env, stdout=pipe, stderr=pipe
    )
    said, complaint = await asyncio.wait_for(client.communicate(), 200)
    assert client.returncode == 0, complaint.decode()
    return said.decode().strip()


AT_ITS_DEFAULTS = pytest.param(40.0, 20.0, {}, marks=pytest.mark.full, id="at the gateway's defaults")


@pytest.mark.parametrize(
    ("first", "timeout", "settings"),
    [pytest.param(4.0, 2.0, {"first_byte_hold": 0.2}, id="in small"), AT_ITS_DEFAULTS],
)
async def test_both_clients_wait_for_a_slow_first_token(
    start_gateway, stub_runtime, older_client, first, timeout, settings
):
    gateway = await start_gateway(stub_runtime(), **settings)
    folder, older = older_client
    versions = await asyncio.gather(run(gateway.url, first, timeout), run(gateway.url, first, timeout, folder))
    assert versions == [importlib.metadata.version("openai"), older] and len(set(versions)) == 2
    await gateway.settled()
    assert gateway.counters().outcomes["ok"] == 4
    # What kept them waiting is no token.
    assert gateway.counters().ttft.sum / 4 > 0.97 * first


async def test_what_keeps_a_client_waiting_is_never_an_empty_record(start_gateway, stub_runtime):
    gateway = await start_gateway(stub_runtime(), first_byte_hold=0.05)
    for path, members in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        body = {"model": "m", "stream": True, "stub": {"first": 1.0, "tokens": 2}, **members}
        reply = await gateway.ask(body, path)
        *records, end = reply.body.split(b"\n\n")
        assert end == b"" and records[-1] == b"data: [DONE]"
        assert reply.body.count(b": waiting for the first token\n") >= 3
        for record in records:
            data = [line.removeprefix(b"data:").strip() for line in record.split(b"\n") if not line.startswith(b":")]
            assert data and all(data), record
