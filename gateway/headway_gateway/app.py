"""The composition root: every part made once, from `Settings`, and the two FastAPI applications in front of them.

Nothing here decides anything and nothing is global: a test builds a second gateway beside the first. Completion
requests bypass FastAPI, whose middleware would cost each of them more than its admission does.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from headway_core.contract import documents, http, reports
from headway_edge.client_connection import ClientConnection
from headway_edge.policy_watcher import PolicyWatcher
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from headway_gateway import error_responses, openapi, status_page
from headway_gateway.client_request import ClientRequest, Receive, Scope, Send
from headway_gateway.error_responses import ErrorResponse, RequestFailed
from headway_gateway.gateway_reporter import GatewayReporter
from headway_gateway.key_watcher import KeyWatcher
from headway_gateway.keys import KeyRing
from headway_gateway.metrics import CountersCollector, Exposition
from headway_gateway.parsed_request import ApiRoute
from headway_gateway.pipeline import Pipeline
from headway_gateway.pools import Pools
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream


class Gateway:
    """One gateway, put together; made inside a running event loop. Its two ports serve `front` and `control`."""

    def __init__(self, settings: Settings) -> None:
        clock = asyncio.get_running_loop().time
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.upstream = Upstream()
        self.pools = Pools(self.boot_id, settings, self.upstream, clock)
        self.keys = KeyWatcher(settings.keys) if settings.keys is not None else None
        self.policies = PolicyWatcher(settings.policy, clock, self.pools.apply_policy) if settings.policy else None
        self.pipeline = Pipeline(settings, self.pools, self.upstream, self._ring, clock)
        store = self.policies.store if self.policies else None
        self.reporter = GatewayReporter(socket.gethostname(), self.boot_id, self.pools, store)
        self.metrics = Exposition(
            CountersCollector(self.pools, clock, lambda pool: store.age(pool, clock()) if store else None)
        )
        self.recent = status_page.RecentWindow(self.pools, clock)
        self.connections: Collection[ClientConnection] = ()
        """Of clients, on the serving port; set by `server.listening`."""
        self.serving = serving_app(self)
        self.front = Front(self.pipeline, self.serving)
        self.control = control_app(self)

    def _ring(self) -> KeyRing | None:
        return self.keys.ring if self.keys is not None else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything that runs beside requests: discovery of replicas, reading files, watching clients."""
        if self.policies is not None:
            self.policies.read()
        self.pools.start()
        loops = [self.pipeline.watch_clients(), self.recent.run()]
        loops += [files.run() for files in (self.policies, self.keys) if files is not None]
        tasks = [asyncio.create_task(one) for one in loops]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.pools.stop()
            await self.upstream.close()
            self.pipeline.close()


class Front:
    """What clients reach: completion requests go straight to the pipeline, all others to the FastAPI application."""

    def __init__(self, pipeline: Pipeline, others: FastAPI) -> None:
        self._pipeline = pipeline
        self._others = others
        # A slash at the end is served too: the redirect that frameworks answer is one that no SDK follows with a body.
        self._routes = {route.value + end: route for route in ApiRoute for end in ("", "/")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        route = self._routes.get(scope["path"])
        if route is None:
            await self._others(scope, receive, send)
        elif scope["method"] == "POST":
            await self._pipeline.handle(scope, receive, send, route)
        else:
            await _response(ErrorResponse(405, "Method Not Allowed", headers={"allow": "POST"}))(scope, receive, send)


def serving_app(gateway: Gateway) -> FastAPI:
    """What clients see beside the two completion routes, which are documented here and served by `Front`."""
    app = _app(gateway, "Headway gateway")
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]  # FastAPI documents this way of extending it

    @app.get("/v1/models", responses=openapi.ERRORS)
    async def models(request: Request) -> Response:
        """The models configured here, whether or not a replica is ready."""
        return _unauthorized(gateway, request) or JSONResponse(
            {"object": "list", "data": [_model(name) for name in sorted(gateway.pools.models())]}
        )

    @app.get("/v1/models/{name:path}", responses={**openapi.ERRORS, 404: openapi.NOT_FOUND})
    async def model(request: Request, name: str) -> Response:
        """One of them; all when no name follows the slash."""
        known = gateway.pools.models()
        if not name:
            return await models(request)
        if name not in known:
            return _unauthorized(gateway, request) or _response(error_responses.unknown_model(name, sorted(known)))
        return _unauthorized(gateway, request) or JSONResponse(_model(name))

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(
            status_page.html(), headers={"cache-control": "no-cache", "content-security-policy": status_page.POLICY}
        )

    @app.get("/status.json")
    async def status() -> dict[str, Any]:
        """What the page at / shows: objectives against what happened. No secrets."""
        return gateway.recent.status()

    return app


def control_app(gateway: Gateway) -> FastAPI:
    """What the operator, Prometheus and `headway up` see; never exposed to clients."""
    app = _app(gateway, "Headway gateway, control")

    @app.get(http.PATH_LOAD)
    async def load() -> Response:
        """This gateway's load report."""
        report = gateway.reporter.report(asyncio.get_running_loop().time())
        return Response(documents.dump(report), media_type="application/json")

    @app.get(http.PATH_POLICY)
    async def policy() -> Response:
        """The policies in force, by pool."""
        policies = ",".join(f'"{pool.name}":{documents.dump(pool.policy)}' for pool in gateway.pools)
        return Response("{" + policies + "}", media_type="application/json")

    @app.get(http.PATH_METRICS)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _app(gateway: Gateway, title: str) -> FastAPI:
    app = FastAPI(title=title, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.get(http.PATH_HEALTH)
    async def health() -> dict[str, str]:
        """The process runs."""
        return {"status": "ok"}

    @app.get(http.PATH_READY, responses={503: {"description": "Just started, or going away: send nothing new."}})
    async def ready() -> Response:
        """Whether new requests should be sent here: from the first discovery, even of no replica, until the drain."""
        state = gateway.pools.state
        return JSONResponse({"status": state.value}, 200 if state is reports.ReplicaState.READY else 503)

    @app.exception_handler(HTTPException)
    async def not_here(_request: Request, error: HTTPException) -> Response:
        message = "no such path" if error.status_code == 404 else str(error.detail)
        return _response(ErrorResponse(error.status_code, message, headers=dict(error.headers or {})))

    return app


def _unauthorized(gateway: Gateway, request: Request) -> Response | None:
    try:
        gateway.pipeline.authenticate(ClientRequest(request.scope, request.receive, _unused))
    except RequestFailed as failed:
        return _response(failed.response)
    return None


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "headway"}


def _response(answer: ErrorResponse) -> Response:
    return Response(answer.body(), answer.status, dict(answer.headers), "application/json")


async def _unused(_message: object) -> None:
    raise RuntimeError("this request is only authenticated")
