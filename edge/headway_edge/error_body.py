"""The body of every error response, as OpenAI clients expect it."""

from __future__ import annotations

import json


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """``{"error": {message, type, param, code}}``, one line."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()
