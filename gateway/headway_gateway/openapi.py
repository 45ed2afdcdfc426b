"""The OpenAPI document: FastAPI's own, and the two raw routes, which FastAPI cannot see into."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from headway_core.contract.header_names import SHED_REASON, ShedReason
from headway_core.contract.http import MAX_CHOICES

from headway_gateway.parsed_request import ApiRoute

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}


def _error(description: str, headers: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": _ERROR}}
    return {"description": description, "content": content, **({"headers": headers} if headers else {})}


_LATER = {
    "retry-after": {
        "description": "Whole seconds after which it would fit.",
        "schema": {"type": "integer", "minimum": 0},
    },
    SHED_REASON: {"description": "Why.", "schema": {"type": "string", "enum": [reason.value for reason in ShedReason]}},
}

ERRORS: dict[int | str, dict[str, Any]] = {401: _error("A valid API key is needed.")}
NOT_FOUND = _error("No such model.")

_ANSWERS = {
    "200": {
        "description": "The answer; a stream of server-sent events when `stream` is true.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    "400": _error("The request breaks a rule; `param` names the member."),
    "401": ERRORS[401],
    "403": _error("The key does not open this class."),
    "404": NOT_FOUND,
    "408": _error("The body did not arrive in time."),
    "413": _error("The body is too large."),
    "429": _error("Not now: capacity is taken.", _LATER),
    "502": _error("The replica broke off."),
    "503": _error("Nothing can serve this now.", _LATER),
    "504": _error("It took too long."),
}

_OPTIONAL = {
    "stream": {"type": ["boolean", "null"]},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHOICES},
    "max_tokens": {"type": ["integer", "null"], "minimum": 0},
    "service_tier": {"type": ["string", "null"], "description": "Leads to a priority class, as the policy says."},
}

_BODIES: dict[ApiRoute, dict[str, Any]] = {
    ApiRoute.COMPLETIONS: {
        "type": "object",
        "required": ["model", "prompt"],
        "properties": {
            "model": {"type": "string", "minLength": 1},
            "prompt": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31}},
                ]
            },
            **_OPTIONAL,
        },
    },
    ApiRoute.CHAT: {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": {"type": "string", "minLength": 1},
            "messages": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["role"],
                    "properties": {"role": {"type": "string"}, "content": {"type": ["string", "null"]}},
                },
            },
            "max_completion_tokens": {"type": ["integer", "null"], "minimum": 0},
            **_OPTIONAL,
        },
    },
}


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document of the serving application."""
    whole = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for route, schema in _BODIES.items():
        whole["paths"][route.value] = {
            "post": {
                "operationId": route.name.lower(),
                "summary": "Chat completion" if route is ApiRoute.CHAT else "Completion",
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": _ANSWERS,
            }
        }
    return whole
