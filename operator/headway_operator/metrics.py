"""The operator's own metrics and health over HTTP. Labels are object names or from closed sets, never outside text."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from headway_core.contract.http import PATH_METRICS
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

PATH_HEALTHZ = "/healthz"

REGISTRY = CollectorRegistry()
LEADING = Gauge("headway_operator_leading", "1 while this operator holds the lease and acts.", registry=REGISTRY)
OBJECTS = Gauge("headway_operator_objects", "ServingSLO objects that are known.", registry=REGISTRY)
RECONCILES = Histogram(
    "headway_operator_reconcile_seconds",
    "Seconds that the reconciliation of one object takes, from observation to status.",
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
FAILURES = Counter(
    "headway_operator_reconcile_failures", "Reconciliations that ended in an error.", ["reason"], registry=REGISTRY
)
API_CALLS = Counter("headway_operator_api_calls", "Calls to the Kubernetes API.", ["method", "code"], registry=REGISTRY)
POLLS = Counter("headway_operator_polls", "Load reports asked for.", ["kind", "outcome"], registry=REGISTRY)
ACTIONS = Counter("headway_operator_actions", "What was set.", ["action"], registry=REGISTRY)
MISSING_RIGHTS = Gauge(
    "headway_operator_missing_rights", "Rights that the operator needs and lacks.", registry=REGISTRY
)
CONDITION = Gauge(
    "headway_slo_condition", "1: True, 0: False, -1: Unknown.", ["namespace", "name", "condition"], registry=REGISTRY
)


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """A thread for each request: a slow scrape keeps no probe waiting."""

    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class names it so
        """Nothing: a probe every few seconds is no news."""


class HealthServer:
    """/metrics and /healthz in a thread of their own: they answer while the controller is busy or hangs."""

    def __init__(self, host: str, port: int, healthy: Callable[[], str | None]) -> None:
        """`healthy` returns None, or what is wrong. Raises OSError when the port is taken."""
        self._healthy = healthy
        self._metrics = make_wsgi_app(REGISTRY)
        self._server: WSGIServer = make_server(host, port, self._answer, _ThreadingServer, handler_class=_SilentHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops listening and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == PATH_METRICS:
            metrics: Iterable[bytes] = self._metrics(environ, start)
            return metrics
        status, text = "404 Not Found", "see /metrics and /healthz"
        if path == PATH_HEALTHZ:
            wrong = self._healthy()
            status, text = ("200 OK", "ok") if wrong is None else ("503 Service Unavailable", wrong)
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]
