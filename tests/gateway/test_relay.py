"""What passes between client and replica, byte for byte."""

import json


async def test_a_plain_answer_passes_unchanged(house, stub_runtime):
    stub = stub_runtime()
    gateway = await house(stub)
    reply = await gateway.ask(max_tokens=4)
    assert reply.status == 200
    assert json.loads(reply.body)["choices"][0]["text"] == "w0 w1 w2 w3 "
    reply = await gateway.ask(stream=True, max_tokens=4)
    assert reply.status == 200
    print(reply)
    await gateway.settled()
    print(gateway.ledger().read())
    print((await gateway.control("/metrics")).body.decode()[:3000])
    print((await gateway.control("/load")).body)
    print((await gateway.get("/status.json")).body)
