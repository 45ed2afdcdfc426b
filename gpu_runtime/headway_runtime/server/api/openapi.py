"""What `/docs` and `/openapi.json` say about the two generating routes: raw ASGI, they do not describe themselves."""

from __future__ import annotations

from typing import Any

from headway_core.contract.http import MAX_CHOICES

_COMMON = {
    "model": {"type": "string", "description": "The served name; may be left out."},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES, "default": 1},
    "stop": {
        "description": "A string, or up to 4 of them.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
    "temperature": {"type": "number", "minimum": 0, "default": 1},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "default": 0, "description": "0 or -1: all tokens."},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "repetition_penalty": {"type": "number", "default": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "seed": {"type": "integer"},
    "ignore_eos": {"type": "boolean", "default": False},
    "min_tokens": {"type": "integer", "minimum": 0, "default": 0},
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
}

_COMPLETION = {
    "prompt": {"description": "A string, a list of strings, a list of token ids, or a list of such lists."},
    "max_tokens": {"type": "integer", "minimum": 1, "default": 16},
    "logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
}

_CHAT = {
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "Default: the rest of the context."},
    "max_tokens": {"type": "integer", "minimum": 1, "description": "The older name; must be equal when both are sent."},
    "logprobs": {"type": "boolean", "default": False},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20, "description": "Needs logprobs: true."},
}


def add_generation_paths(schema: dict[str, Any]) -> dict[str, Any]:
    """The application's schema with both routes in it."""
    paths = schema.setdefault("paths", {})
    paths["/v1/completions"] = _path("Complete a text", {**_COMPLETION, **_COMMON}, "prompt")
    paths["/v1/chat/completions"] = _path("Answer in a conversation", {**_CHAT, **_COMMON}, "messages")
    return schema


def _path(summary: str, properties: dict[str, Any], required: str) -> dict[str, Any]:
    responses = {
        "200": {"description": "The response, or with stream: true server-sent events that end in [DONE]."},
        "400": {"description": "The request breaks a rule; error.param names the member."},
        "404": {"description": "Another model is asked for than the one served."},
        "413": {"description": "The body is too large."},
        "503": {"description": "Not ready, or shutting down; Retry-After says when to try again."},
    }
    body = {"type": "object", "required": [required], "properties": properties}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": responses,
        }
    }
