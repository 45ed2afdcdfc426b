"""Reading a report from whoever answers: every way to answer badly is one of three errors, and none reads for ever."""

import asyncio

import pytest
from headway_core.errors import DocumentError
from headway_operator.report_reader import get

LONGEST = 1000


@pytest.fixture
async def answering():
    """Starts a server that sends these bytes and closes; returns its port."""
    servers, asked = [], []

    async def start(answer):
        async def serve(reader, writer):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return servers[-1].sockets[0].getsockname()[1]

    start.asked = asked
    yield start
    for server in servers:
        server.close()


GOOD = {
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody and more than was promised",
    "any case": b"HTTP/1.1 200 OK\r\ncontent-length:4\r\nX: y\r\n\r\nbody",
    "until it closes": b"HTTP/1.0 200 OK\r\n\r\nbody",
    "no reason": b"HTTP/1.1 200\r\n\r\nbody",
}
BAD = {
    "not found": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nbody", DocumentError),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", DocumentError),
    "no status": (b"HTTP/1.1 two hundred\r\n\r\n", DocumentError),
    "less than promised": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbody", EOFError),
    "nothing": (b"", EOFError),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-", EOFError),
    "an endless head": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000, DocumentError),
    "a flood": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, DocumentError),
    "a flood that was announced": (b"HTTP/1.1 200 OK\r\nContent-Length: 2000\r\n\r\n" + b"x" * 2000, DocumentError),
    "a length beyond all numbers": (
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n" + b"x" * 2000,
        DocumentError,
    ),
}


@pytest.mark.parametrize("answer", GOOD.values(), ids=GOOD)
async def test_a_plain_answer_is_read(answering, answer):
    assert await get("127.0.0.1", await answering(answer), "/load", longest=LONGEST) == b"body"
    assert answering.asked[0].startswith(b"GET /load HTTP/1.0\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(("answer", "error"), BAD.values(), ids=BAD)
async def test_a_bad_answer_is_an_error(answering, answer, error):
    with pytest.raises(error):
        await get("127.0.0.1", await answering(answer), "/load", longest=LONGEST)


async def test_nobody_there_is_an_error_of_the_network():
    with pytest.raises(OSError):
        await get("127.0.0.1", 1, "/load", longest=LONGEST)
