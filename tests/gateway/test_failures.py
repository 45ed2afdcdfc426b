"""What the log says of replicas that fail: as little as tells it all."""

import logging

from headway_gateway.failures import COUNT_SECONDS, QUIET_SECONDS, FailureLog


def test_a_dead_replica_is_one_line_then_counts_then_one_line(caplog):
    caplog.set_level(logging.INFO)
    failures = FailureLog("p")
    # A minute of 500 requests a second.
    for number in range(30_000):
        failures.failed("a", "it takes no connection", f"req-{number}", now=number / 500)
    failures.succeeded("a", now=60.0)
    failures.succeeded("a", now=60.0 + QUIET_SECONDS)
    failures.succeeded("a", now=60.1 + QUIET_SECONDS)
    begun, *counts, over = [record.getMessage() for record in caplog.records]
    assert begun == "pool p: replica a fails: it takes no connection (request req-0)"
    assert len(counts) == 60 / COUNT_SECONDS - 1
    assert all("still fails: 5000 more in 10 s, the last: it takes no connection" in count for count in counts)
    assert over == "pool p: replica a serves again, after 30000 failures in 60 s"


def test_one_that_comes_and_goes_is_one_trouble_and_one_that_leaves_says_so(caplog):
    caplog.set_level(logging.INFO)
    failures = FailureLog("p")
    for step in range(8):
        failures.failed("a", "it closed the connection", "r", now=float(step))
        failures.succeeded("a", now=step + 0.5)
    failures.gone("a")
    failures.gone("a")
    failures.failed("b", "it answered 502", "r", now=9.0)
    assert [record.getMessage() for record in caplog.records] == [
        "pool p: replica a fails: it closed the connection (request r)",
        "pool p: replica a is gone, after 8 failures in 7 s",
        "pool p: replica b fails: it answered 502 (request r)",
    ]


async def test_requests_that_fail_on_a_replica_fill_no_log(start_gateway, stub_runtime, caplog):
    async def breaks(request, write):
        return "close"

    a, b = stub_runtime("a", script=breaks), stub_runtime("b", script=breaks)
    gateway = await start_gateway(a, b)
    caplog.set_level(logging.INFO)
    for _ in range(20):
        assert (await gateway.ask()).status in (502, 503)
    assert len(a.requests) + len(b.requests) >= 20
    said = [record.getMessage() for record in caplog.records if record.name.startswith("headway.gateway")]
    assert sorted(line.split(":")[1] for line in said) == [" replica a fails", " replica b fails"]
    await gateway.settled()
