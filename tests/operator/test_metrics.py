"""What probes and Prometheus see of the operator itself."""

import urllib.error
import urllib.request

import pytest
from headway_operator.controller import Controller
from headway_operator.metrics import HealthServer
from headway_operator.settings import Settings


def get(server, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def wrong():
    return []


@pytest.fixture
def server(wrong):
    made = HealthServer("127.0.0.1", 0, lambda: wrong[0] if wrong else None)
    yield made
    made.close()


def test_health_is_ok_or_says_what_is_wrong(server, wrong):
    assert get(server, "/healthz") == (200, "ok\n")
    wrong.append("the control loop has not run for 61s")
    assert get(server, "/healthz") == (503, "the control loop has not run for 61s\n")
    assert get(server, "/elsewhere")[0] == 404


def test_the_operators_own_figures_are_there(server):
    status, text = get(server, "/metrics")
    assert status == 200
    for name in ("leading", "objects", "reconcile_seconds_count", "missing_rights"):
        assert f"\nheadway_operator_{name} " in text


def test_a_loop_that_hangs_is_not_healthy():
    now = [100.0]
    loop = Controller(Settings(), None, None, observer=None, make_reconciler=lambda cache: None, clock=lambda: now[0])
    assert loop.healthy() is None
    now[0] += 61
    assert loop.healthy() == "the control loop has not run for 61s"
