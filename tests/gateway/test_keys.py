"""API keys: who may ask, as whom, and for which class."""

import asyncio
import hashlib
import subprocess
import sys

import pytest
from headway_core.contract import documents, header_names
from headway_core.contract.policy import Policy, Pool
from headway_core.errors import InvalidInput
from headway_core.slo import Objectives, PriorityClass, TtftObjective
from headway_gateway.keys import Caller, parse_keys

A, B, C = "key-of-acme-0123456789", "key-of-bobs-0123456789", "key-of-cube-0123456789"


def line(tenant, key, classes=""):
    return f"{tenant}  sha256:{hashlib.sha256(key.encode()).hexdigest()}  {classes}\n"


FILE = "# the keys\n\n" + line("acme", A) + line("bobs", B, "batch") + line("cube", C, "interactive,batch # both")


def bearer(key):
    return [("authorization", f"Bearer {key}")]


def test_a_key_stands_for_its_tenant_and_classes():
    ring = parse_keys({"keys": FILE.encode()})
    assert ring.caller(f"Bearer {A}".encode()) == Caller("acme", None)
    assert ring.caller(f"bearer  {B}".encode()) == Caller("bobs", frozenset({"batch"}))
    wrongs = [
        None,
        b"",
        b"Bearer ",
        b"Bearer",
        f"Basic {A}".encode(),
        f"Bearer {A}x".encode(),
        b"Bearer " + b"x" * 10_000,
        b"Bearer \xff\x00",
    ]
    for wrong in wrongs:
        assert ring.caller(wrong) is None


BAD_LINES = [
    "acme",
    "acme sha256:12",
    "acme plain-text-key",
    "a/b sha256:" + "0" * 64,
    "a sha256:" + "0" * 64 + " UPPER",
    "a b c d",
]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_wrong_line_is_named_by_its_place_and_not_repeated(bad):
    with pytest.raises(InvalidInput) as caught:
        parse_keys({"keys": (FILE + bad).encode()})
    assert caught.value.field == "keys:6" and "plain-text-key" not in str(caught.value)


def hash_key(*arguments, given=""):
    command = [sys.executable, "-m", "headway_gateway", "hash-key", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False)


def test_a_new_key_is_shown_once_and_its_line_admits_it():
    done = hash_key("--tenant", "acme", "--classes", "batch")
    key = done.stderr.split()[-1]
    assert parse_keys({"keys": done.stdout.encode()}).caller(f"Bearer {key}".encode()) == Caller(
        "acme", frozenset({"batch"})
    )
    assert key not in done.stdout
    again = hash_key("--tenant", "acme", "--stdin", given=key + "\n")
    assert again.stdout.split()[1] == done.stdout.split()[1] and again.stderr == ""
    short = hash_key("--tenant", "a", "--stdin", given="abc\n")
    assert short.returncode == 2 and "16" in short.stderr


@pytest.fixture
def policy(tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()

    def write(*endpoints, revision=1):
        classes = (
            PriorityClass("interactive", 100, Objectives(TtftObjective(1.0)), 8, ("auto", "default", "priority")),
            PriorityClass("batch", 0, Objectives(TtftObjective(60.0)), 1, ("flex",)),
        )
        document = documents.dump(Policy(revision, "u", 1, Pool("p", endpoints), classes, "interactive"))
        (folder / "chat.json").write_text(document)
        return folder

    return write


async def test_keys_choose_tenant_and_class_and_strangers_stay_out(
    start_gateway, stub_runtime, tmp_path, policy, until
):
    keys = tmp_path / "keys"
    keys.write_text(FILE)
    stub = await stub_runtime().start()
    gateway = await start_gateway(stub, pools=(), policy=policy(stub.endpoint), keys=keys)

    async def served(key, **members):
        reply = await gateway.ask(headers=bearer(key), **members)
        seen = stub.requests[-1]
        return reply.status, *(
            seen.header(name) for name in (header_names.TENANT, header_names.CLASS, header_names.PRIORITY)
        )

    assert await served(A) == (200, "acme", "interactive", "100")
    assert await served(A, service_tier="flex") == (200, "acme", "batch", "0")
    assert await served(A, service_tier="unheard-of") == (200, "acme", "interactive", "100")
    assert await served(B) == (200, "bobs", "batch", "0")
    assert await served(C) == (200, "cube", "interactive", "100")
    before = len(stub.requests)
    for stream in (False, True):
        reply = await gateway.ask(headers=bearer(B), service_tier="priority", stream=stream)
        assert reply.status == 403 and reply.json()["error"]["code"] == "class_not_allowed"
        for headers in ([], bearer("wrong-key-0123456789")):
            reply = await gateway.ask(headers=headers, stream=stream)
            assert reply.status == 401 and reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.header("www-authenticate") == "Bearer"
    assert (await gateway.get("/v1/models")).status == 401
    assert (await gateway.get("/v1/models", bearer(A))).status == 200
    assert (await gateway.get("/health")).status == 200
    assert len(stub.requests) == before

    keys.write_text("broken")
    await asyncio.sleep(1.2)
    assert (await gateway.ask(headers=bearer(A))).status == 200
    keys.write_text(line("acme", C))
    await until(lambda: len(gateway.gateway.keys.ring) == 1)
    assert (await gateway.ask(headers=bearer(A))).status == 401
    assert await served(C) == (200, "acme", "interactive", "100")


@pytest.mark.parametrize("trusted", [False, True])
async def test_the_class_header_counts_only_where_it_is_trusted(start_gateway, stub_runtime, policy, trusted):
    stub = await stub_runtime().start()
    gateway = await start_gateway(stub, pools=(), policy=policy(stub.endpoint), trust_class_header=trusted)
    reply = await gateway.ask(headers=[(header_names.CLASS, "batch")])
    assert reply.status == 200
    assert stub.requests[-1].header(header_names.CLASS) == ("batch" if trusted else "interactive")
    reply = await gateway.ask(headers=[(header_names.CLASS, "no-such")])
    assert reply.status == (400 if trusted else 200)
