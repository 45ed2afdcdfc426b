"""A thousand keys, edited in place while their owners ask: keys that stay are valid all the while, and half a file
changes nothing."""

import asyncio
import hashlib
import logging

from headway_gateway import key_watcher

KEYS = 1_000


def key(number):
    return f"key-number-{number:04}-of-a-thousand"


def line(number):
    return f"tenant-{number}  sha256:{hashlib.sha256(key(number).encode()).hexdigest()}\n"


class Edits:
    """Writes the file as an editor without any care does: truncated first, then piece by piece."""

    def __init__(self, path):
        self.path = path

    async def write(self, text, pause=0.0, pieces=10):
        with self.path.open("w", buffering=1) as file:
            for start in range(0, len(text), len(text) // pieces):
                file.write(text[start : start + len(text) // pieces])
                file.flush()
                await asyncio.sleep(pause)


async def test_keys_change_under_load_and_only_removed_ones_are_turned_away(
    start_gateway, stub_runtime, tmp_path, until, monkeypatch, caplog
):
    monkeypatch.setattr(key_watcher, "READ_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys"
    path.write_text("".join(map(line, range(KEYS))))
    stub = stub_runtime()
    gateway = await start_gateway(stub, keys=path)
    ring = gateway.gateway.keys
    edits = Edits(path)
    answered, stop = {200: 0}, asyncio.Event()

    async def owner(start):
        """Asks again and again with keys that stay: those of even number."""
        number = start
        async with gateway.client() as client:
            while not stop.is_set():
                client.send(
                    {"model": "m", "prompt": "x", "max_tokens": 1}, headers=[("authorization", f"Bearer {key(number)}")]
                )
                reply = await client.reply()
                answered[reply.status] = answered.get(reply.status, 0) + 1
                number = (number + 14) % KEYS

    async def status(number):
        return (await gateway.ask(headers=[("authorization", f"Bearer {key(number)}")], max_tokens=1)).status

    owners = [asyncio.ensure_future(owner(2 * start)) for start in range(7)]
    stays = "".join(line(number) for number in range(0, KEYS, 2))
    # Written slowly, faster than it is read and slower, each time to the full number again.
    for pause in (0.0, 0.001, 0.01):
        await edits.write("".join(map(line, range(KEYS))) + "# edited\n", pause)
        await asyncio.sleep(0.15)
        assert len(ring.ring) == KEYS
    assert await status(1) == 200
    # Every other key is revoked.
    await edits.write(stays, 0.005)
    await until(lambda: len(ring.ring) == KEYS // 2)
    assert [await status(number) for number in (0, 1, 2, 3, 998, 999)] == [200, 401, 200, 401, 200, 401]
    # A file that is left half-written, and one with a word too many, keep those keys and are said, once each.
    warned = len([record for record in caplog.records if record.levelno >= logging.WARNING])
    for bad in (stays[:-30], stays + "a b c d e\n", ""):
        path.write_text(bad)
        await asyncio.sleep(0.3)
        assert len(ring.ring) == KEYS // 2 and await status(998) == 200
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        warned += 1
        assert len(said) == warned and "stay in force" in said[-1] and "sha256" not in said[-1].split("must read")[0]
    # One of the revoked comes back.
    await edits.write(stays + line(1), 0.005)
    await until(lambda: len(ring.ring) == KEYS // 2 + 1)
    assert await status(1) == 200
    stop.set()
    await asyncio.gather(*owners)
    await gateway.settled()
    assert set(answered) == {200} and answered[200] > 200
