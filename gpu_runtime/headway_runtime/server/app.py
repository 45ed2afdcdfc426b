"""A replica's two HTTP applications: the OpenAI API on the serving port, the replica itself on the control port.

The composition root of the HTTP side: a function lists the routes of an application. No route changes a setting.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from headway_core import __version__
from headway_core.contract import documents, header_names, http
from headway_core.contract.reports import ReplicaState
from starlette.exceptions import HTTPException
from starlette.routing import Route

from headway_runtime.server.api import errors
from headway_runtime.server.api.errors import ApiError
from headway_runtime.server.api.generate_route import GenerateRoute
from headway_runtime.server.api.generation_request import parse_chat, parse_completion
from headway_runtime.server.api.openapi import add_generation_paths
from headway_runtime.server.api.request_headers import request_id_of
from headway_runtime.server.api.response_encoder import ChatEncoder, CompletionEncoder
from headway_runtime.server.replica import Replica


def serving_app(replica: Replica) -> FastAPI:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health`; documented at `/docs`."""
    app = FastAPI(title="Headway runtime", version=__version__, redoc_url=None)
    app.router.routes += [
        Route("/v1/completions", GenerateRoute(replica, parse_completion, CompletionEncoder), methods=["POST"]),
        Route("/v1/chat/completions", GenerateRoute(replica, parse_chat, ChatEncoder), methods=["POST"]),
    ]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = add_generation_paths(FastAPI.openapi(app))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]

    def model() -> dict[str, Any]:
        length = replica.max_model_len
        extra = {} if length is None else {"max_model_len": length}
        return {"id": replica.model_name, "object": "model", "created": replica.created, "owned_by": "headway", **extra}

    @app.get("/v1/models", summary="The one model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}", summary="The served model by name")
    async def one_model(name: str) -> dict[str, Any]:
        if name != replica.model_name:
            raise errors.unknown_model(name, replica.model_name)
        return model()

    @app.get(http.PATH_HEALTH, summary="Whether this process works")
    async def health() -> Response:
        return _health(replica)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _error_response(request, error)

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: there is no {request.method} on this path; see /docs"
        allow = [(b"allow", error.headers["Allow"].encode())] if error.headers and "Allow" in error.headers else []
        return _error_response(request, ApiError(error.status_code, message, code="not_found", headers=allow))

    return app


def control_app(replica: Replica) -> FastAPI:
    """`/load`, `/policy`, `/metrics`, `/health`, `/ready`."""
    app = FastAPI(title="Headway runtime, control port", version=__version__, redoc_url=None)

    @app.get(http.PATH_LOAD, summary="The load report")
    async def load() -> Response:
        return Response(documents.dump(replica.report()), media_type="application/json")

    @app.get(http.PATH_POLICY, summary="The policy in force")
    async def policy() -> Response:
        in_force = replica.policy
        if in_force is None:
            return Response(json.dumps({"error": "no policy was read yet"}), 404, media_type="application/json")
        return Response(documents.dump(in_force), media_type="application/json")

    @app.get(http.PATH_METRICS, summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(replica.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get(http.PATH_HEALTH, summary="Whether this process works")
    async def health() -> Response:
        return _health(replica)

    @app.get(http.PATH_READY, summary="Whether new requests are taken")
    async def ready() -> Response:
        stalled = replica.failure_reason()
        if replica.state is ReplicaState.READY and stalled is None:
            return Response(json.dumps({"status": "ready"}), media_type="application/json")
        state = replica.state if stalled is None else ReplicaState.FAILED
        body = json.dumps({"status": state.value, "message": stalled or replica.message})
        return Response(body, 503, media_type="application/json")

    return app


def _health(replica: Replica) -> Response:
    reason = replica.failure_reason()
    if reason is None:
        return Response(json.dumps({"status": "ok"}), media_type="application/json")
    return Response(json.dumps({"status": "failed", "message": reason}), 503, media_type="application/json")


def _error_response(request: Request, error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    headers[header_names.REQUEST_ID] = request_id_of(request.scope["headers"])
    return Response(error.body(), error.status, headers, "application/json")
