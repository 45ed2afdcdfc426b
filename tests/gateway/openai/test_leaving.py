"""A client that leaves a real gateway stops the work of a real engine behind it, in whichever phase it is."""

import contextlib
import json
import socket
import struct

import httpx
import pytest

LONG = 3900
"""Tokens that nobody could finish within the seconds that these tests wait."""


def ask(url, stream, prompt, max_tokens):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    data = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    return sock


def leave(sock, how):
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefilling", "decoding"])
def test_work_stops_when_the_client_leaves(two_runtimes, gateway_url, eventual, phase, stream, how):
    def total(name):
        return sum(getattr(runtime.load(), name) for runtime in two_runtimes)

    def queued():
        return httpx.get(f"{gateway_url}/status.json").json()["pools"][0]["classes"][0]["queued"]

    for runtime in two_runtimes:
        runtime.assert_idle()
    finished, output = total("finished"), total("output_tokens")
    with contextlib.ExitStack() as stack:
        others = 0
        if phase == "queued":
            # As many as there are slots; what comes after waits at the gateway or in an engine.
            others = 16
            for number in range(others):
                stack.callback(ask(gateway_url, True, [70 + number] * 4, LONG).close)
            eventual(lambda: total("running") == others, what="full slots")
        sock = ask(
            gateway_url, stream, [90] * (LONG if phase == "prefilling" else 4), 1 if phase == "prefilling" else LONG
        )
        reached = {
            "queued": lambda: total("waiting") + queued() == 1,
            "prefilling": lambda: total("running") == 1,
            "decoding": lambda: total("output_tokens") > output + 3,
        }[phase]
        eventual(reached, what=phase)
        leave(sock, how)
        eventual(lambda: total("running") == others and total("waiting") + queued() == 0, 5, "the work to be given up")
    for runtime in two_runtimes:
        runtime.assert_idle(10)
    assert total("finished") == finished
    assert total("output_tokens") - output < (others + 1) * LONG / 2
