"""What the gateway must know of a request, parsed from its body; the body itself is forwarded byte for byte.

Only members that decide admission and accounting are checked, and strictly: a wrong type is rejected here, streaming or
not. The runtime checks everything else. An explicit null is "not given"; unknown members pass.
"""

from __future__ import annotations

import array
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from headway_core.contract.http import MAX_CHOICES
from headway_core.errors import RequestError
from headway_core.json_document import parse_object


class ApiRoute(Enum):
    """The two routes that reach a runtime."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request, as far as the gateway needs it."""

    route: ApiRoute
    model: str
    choices: int
    """Choices in the response: n times the number of prompts."""
    text: bytes
    """All prompt text in UTF-8, or the token ids as 8-byte integers."""
    token_ids: int | None
    """Exact prompt length when it came as token ids; None when it is text."""
    longest_prompt: int
    """Tokens that the longest prompt has at least: exact for token ids, 1 for text."""
    service_tier: str | None
    body: bytes

    def check_length(self, longest: int | None) -> None:
        """Rejects a prompt that fits no replica, since the admission would tell it to come back later. `longest` is
        the largest context of any replica in tokens, None when unknown.

        Raises:
            RequestError: a prompt of token ids leaves no token of that context for the answer.
        """
        if longest is not None and self.longest_prompt >= longest:
            raise RequestError(
                f"has {self.longest_prompt} tokens and at most {longest} are served, one of them for the "
                "answer: shorten it",
                "prompt",
                "context_length_exceeded",
            )


def parse(route: ApiRoute, body: bytes) -> ParsedRequest:
    """Reads `body`.

    Raises:
        RequestError: it is not a JSON object in UTF-8, or the member `field` breaks a rule that matters here.
    """
    document = parse_object(body)
    prompts, text, token_ids, longest = (_prompt if route is ApiRoute.COMPLETIONS else _messages)(document)
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _invalid("stream", "true or false", stream)
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise _invalid("model", "the name of a model, see GET /v1/models", model)
    tier = document.get("service_tier")
    if tier is not None and not isinstance(tier, str):
        raise _invalid("service_tier", "a string", tier)
    _check_max_tokens(document, route)
    return ParsedRequest(
        route=route,
        model=model,
        choices=_choices(document, prompts),
        text=text,
        token_ids=token_ids,
        longest_prompt=longest,
        service_tier=tier,
        body=body,
    )


def _check_max_tokens(document: dict[str, Any], route: ApiRoute) -> None:
    """`max_completion_tokens` belongs to chat; if both limits are given they must agree."""
    old = _whole(document, "max_tokens", 0, None)
    if route is ApiRoute.COMPLETIONS:
        return
    new = _whole(document, "max_completion_tokens", 0, None)
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"must equal max_tokens when both are given, not {new} beside {old}: send one of them",
            "max_completion_tokens",
            "invalid_value",
        )


def _choices(document: dict[str, Any], prompts: int) -> int:
    """Rejected here, since the admission would tell a request that no replica takes to come back later."""
    n = _whole(document, "n", 1, MAX_CHOICES) or 1
    if prompts * n > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with n = {n} make {prompts * n} choices and {MAX_CHOICES} is the most", "n"
        )
    return prompts * n


def _prompt(document: dict[str, Any]) -> tuple[int, bytes, int | None, int]:
    prompt = document.get("prompt")
    if isinstance(prompt, str):
        return 1, _utf8(prompt, "prompt"), None, 1
    rule = "a string, a list of strings, a list of token ids, or a list of such lists"
    if not isinstance(prompt, list) or not prompt:
        raise _invalid("prompt", rule, prompt)
    if all(type(token) is int for token in prompt):
        return 1, _ids(prompt), len(prompt), len(prompt)
    if all(isinstance(text, str) for text in prompt):
        return len(prompt), b"\n".join(_utf8(text, "prompt") for text in prompt), None, 1
    if all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in prompt):
        lengths = [len(ids) for ids in prompt]
        return len(prompt), b"".join(_ids(ids) for ids in prompt), sum(lengths), max(lengths)
    raise _invalid("prompt", rule, prompt)


def _messages(document: dict[str, Any]) -> tuple[int, bytes, int | None, int]:
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "a list of at least one message", messages)
    parts: list[bytes] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _invalid(f"messages[{index}]", "an object with role and content", message)
        parts.append(str(message.get("role", "")).encode("utf-8", "replace"))
        parts.extend(_utf8(text, f"messages[{index}].content") for text in _content(message.get("content"), index))
    return 1, b"\n".join(parts), None, 1


def _content(content: object, index: int) -> Iterator[str]:
    where = f"messages[{index}].content"
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise _invalid(where, "a string, a list of parts, or null", content)
    for place, part in enumerate(content):
        if not isinstance(part, dict):
            raise _invalid(f"{where}[{place}]", "an object with a type", part)
        text = part.get("text")
        if isinstance(text, str):
            yield text


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RequestError("holds an unpaired surrogate escape, which stands for no character", field) from None


def _ids(tokens: list[int]) -> bytes:
    try:
        return array.array("q", tokens).tobytes()
    except OverflowError:
        raise RequestError("holds a number that is no token id", "prompt") from None


def _whole(document: dict[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        rule = f"must be a whole number from {low}" + (f" to {high}" if high is not None else "")
        raise RequestError(
            f"{rule}, not {_kind(value)}", name, "invalid_value" if type(value) is int else "invalid_type"
        )
    return value


def _invalid(field: str, rule: str, value: object) -> RequestError:
    code = "missing_required_parameter" if value is None else "invalid_value" if value in ("", []) else "invalid_type"
    return RequestError(f"must be {rule}, not {_kind(value)}", field, code)


def _kind(value: object) -> str:
    """The value in words: quoted only when short, so that no prompt comes back in an error."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value) if isinstance(value, float) or -(10**15) < value < 10**15 else "a huge number"
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= 40 else "a string"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "an object"
