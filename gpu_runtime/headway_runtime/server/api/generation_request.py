"""One generation request, parsed and validated: what the two endpoints have in common.

Members of the OpenAI API that this server does not support:

* rejected with 400 where ignoring them would change the response: `tools`, a `response_format` other than text, `echo`,
  `suffix`, `best_of` other than `n`, non-text modalities;
* ignored otherwise: `user`, `metadata`, `store`, `service_tier`, ..., and unknown members.

Null means unset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway_core.contract.http import MAX_CHOICES
from headway_core.errors import RequestError
from headway_core.json_document import check_text

from headway_runtime.ipc.sampling_params import SamplingParams, parse_logit_bias
from headway_runtime.server.api.fields import Fields, shown

MAX_STOPS = 4
MAX_STOP_LENGTH = 1000
MAX_COMPLETION_LOGPROBS = 5
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of `/v1/completions` when the request has none, as in the OpenAI API."""
_MISSING = "missing_required_parameter"
ROLES = ("system", "developer", "user", "assistant", "tool")

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)
"""Members whose names and values are those of `SamplingParams`."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One body of either endpoint. Exactly one of `prompts` and `messages` is set."""

    model: str | None
    prompts: tuple[Prompt, ...]
    messages: tuple[dict[str, Any], ...] | None
    n: int
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    params: SamplingParams
    """Of choice 0; `max_tokens` None when the client did not say, `seed` None likewise."""
    default_max_tokens: int | None
    """What an unsaid max_tokens becomes, at most; None: the rest of the context."""

    @property
    def chat(self) -> bool:
        """It came to /v1/chat/completions."""
        return self.messages is not None


def parse_completion(data: dict[str, Any]) -> GenerationRequest:
    """A body of /v1/completions. Raises RequestError, which names the member at fault."""
    fields = Fields(data)
    prompts = _prompts(data.get("prompt"))
    n = _choices(fields, len(prompts))
    if fields.flag("echo"):
        raise RequestError("echo is not supported: the prompt is yours already", "echo", "unsupported_value")
    if fields.text("suffix"):
        raise RequestError(
            "suffix is not supported: this server completes from the left only", "suffix", "unsupported_value"
        )
    best_of = fields.whole("best_of", 1)
    if best_of is not None and best_of != n:
        raise RequestError(
            f"best_of is supported only when it equals n: {best_of} is not {n}", "best_of", "unsupported_value"
        )
    logprobs = fields.whole("logprobs", 0, MAX_COMPLETION_LOGPROBS)
    stream, include_usage = _streaming(fields)
    return GenerationRequest(
        model=fields.text("model"),
        prompts=prompts,
        messages=None,
        n=n,
        stream=stream,
        include_usage=include_usage,
        stop=_stops(data.get("stop")),
        params=_sampling(fields, fields.whole("max_tokens", 1), logprobs),
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
    )


def parse_chat(data: dict[str, Any]) -> GenerationRequest:
    """A body of /v1/chat/completions. Raises RequestError, which names the member at fault."""
    fields = Fields(data)
    messages = _messages(fields)
    _refuse_unsupported_chat(fields)
    stream, include_usage = _streaming(fields)
    return GenerationRequest(
        model=fields.text("model"),
        prompts=(),
        messages=messages,
        n=_choices(fields, 1),
        stream=stream,
        include_usage=include_usage,
        stop=_stops(data.get("stop")),
        params=_sampling(fields, _chat_max_tokens(fields), _chat_logprobs(fields)),
        default_max_tokens=None,
    )


def _prompts(value: object) -> tuple[Prompt, ...]:
    """The four forms: a string, a list of strings, a list of token ids, a list of such lists."""
    if value is None:
        raise RequestError(
            "is required: a string, a list of strings, a list of token ids or a list of such lists", "prompt", _MISSING
        )
    if isinstance(value, str):
        return (check_text(value, "prompt"),)
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return (_token_ids(value, "prompt"),)
        if all(isinstance(item, str) for item in value):
            return tuple(check_text(item, f"prompt[{at}]") for at, item in enumerate(value))
        if all(isinstance(item, list) for item in value):
            return tuple(_token_ids(item, f"prompt[{at}]") for at, item in enumerate(value))
    kind = "an empty list" if value == [] else "a list of mixed or other kinds"
    what = kind if isinstance(value, list) else shown(value)
    code = "invalid_value" if value == [] else "invalid_type"
    raise RequestError(
        f"must be a string, a list of strings, a list of token ids or a list of such lists, not {what}", "prompt", code
    )


def _token_ids(value: list[Any], field: str) -> tuple[int, ...]:
    if not value:
        raise RequestError("holds no token ids: a prompt has at least one token", field)
    for item in value:
        if type(item) is not int or not 0 <= item < 2**31:
            code = "invalid_value" if type(item) is int else "invalid_type"
            raise RequestError(f"must hold token ids, whole numbers from 0, not {shown(item)}", field, code)
    return tuple(value)


def _messages(fields: Fields) -> tuple[dict[str, Any], ...]:
    given = fields.items("messages")
    if not given:
        raise RequestError(
            "is required: a list of at least one message", "messages", _MISSING if given is None else "invalid_value"
        )
    return tuple(_message(item, f"messages[{at}]") for at, item in enumerate(given))


def _message(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"must be an object with role and content, not {shown(item)}", path, "invalid_type")
    fields = Fields(item, f"{path}.")
    role = fields.text("role")
    if role not in ROLES:
        code = _MISSING if role is None else "invalid_value"
        raise RequestError(f"must be one of {', '.join(ROLES)}, not {shown(role)}", f"{path}.role", code)
    content = _content(item.get("content"), f"{path}.content")
    if content is None and role != "assistant":
        raise RequestError("is required", f"{path}.content", _MISSING)
    # Only what templates know goes on; a developer message is what templates call system.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if (name := fields.text("name")) is not None:
        message["name"] = name
    if calls := fields.items("tool_calls"):
        message["tool_calls"] = calls
    return message


def _content(value: object, path: str) -> str | None:
    """Text, or the text parts joined."""
    if value is None:
        return None
    if isinstance(value, str):
        return check_text(value, path)
    if not isinstance(value, list):
        raise RequestError(f"must be a string or a list of parts, not {shown(value)}", path, "invalid_type")
    parts = []
    for at, item in enumerate(value):
        where = f"{path}[{at}]"
        if not isinstance(item, dict):
            raise RequestError(f"must be an object, not {shown(item)}", where, "invalid_type")
        if item.get("type") != "text":
            message = f"only parts of type text are supported, not {shown(item.get('type'))}"
            raise RequestError(message, f"{where}.type", "unsupported_value")
        text = Fields(item, f"{where}.").text("text")
        if text is None:
            raise RequestError("is required", f"{where}.text", _MISSING)
        parts.append(text)
    return "".join(parts)


def _refuse_unsupported_chat(fields: Fields) -> None:
    choice = fields.get("tool_choice")
    for name in ("tools", "functions"):
        if fields.items(name) and choice != "none":
            raise RequestError(
                "tool calling is not supported: leave it out, or send tool_choice none", name, "unsupported_value"
            )
    response_format = fields.members("response_format")
    if response_format is not None and response_format.get("type") != "text":
        raise RequestError("only the type text is supported", "response_format", "unsupported_value")
    modalities = fields.items("modalities")
    if modalities is not None and modalities != ["text"]:
        raise RequestError('only ["text"] is supported', "modalities", "unsupported_value")
    if fields.get("audio") is not None:
        raise RequestError("audio is not supported", "audio", "unsupported_value")


def _choices(fields: Fields, prompts: int) -> int:
    n = fields.whole("n", 1, MAX_CHOICES) or 1
    if n * prompts > MAX_CHOICES:
        raise RequestError(
            f"{prompts} prompts with n = {n} make {n * prompts} choices and {MAX_CHOICES} is the most", "n"
        )
    return n


def _streaming(fields: Fields) -> tuple[bool, bool]:
    stream = fields.flag("stream")
    options = fields.members("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise RequestError("is allowed only with stream: true", "stream_options")
    return stream, Fields(options, "stream_options.").flag("include_usage")


def _stops(value: object) -> tuple[str, ...]:
    """Up to four strings; empty ones stop nothing."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise RequestError(
            f"must be a string or a list of at most {MAX_STOPS} strings, not {shown(value)}", "stop", "invalid_type"
        )
    if len(stops) > MAX_STOPS:
        raise RequestError(f"holds {len(stops)} strings, at most {MAX_STOPS} are allowed", "stop")
    for stop in stops:
        if len(check_text(stop, "stop")) > MAX_STOP_LENGTH:
            raise RequestError(f"a stop string has at most {MAX_STOP_LENGTH} characters, not {len(stop)}", "stop")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _chat_max_tokens(fields: Fields) -> int | None:
    old, new = fields.whole("max_tokens", 1), fields.whole("max_completion_tokens", 1)
    if old is not None and new is not None and old != new:
        message = f"max_completion_tokens and max_tokens mean the same and differ: {new} and {old}; send one"
        raise RequestError(message, "max_completion_tokens")
    return new if new is not None else old


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise RequestError("needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None


def _sampling(fields: Fields, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := fields.get(name)) is not None}
    for name, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
            raise RequestError(f"is out of range: {shown(value)}", name)
    bias = fields.get("logit_bias")
    return SamplingParams(
        **given, logit_bias=() if bias is None else parse_logit_bias(bias), max_tokens=max_tokens, logprobs=logprobs
    )
