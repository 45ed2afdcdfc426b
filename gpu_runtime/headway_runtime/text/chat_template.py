"""Renders messages with the checkpoint's own Jinja template, in a sandbox.

What users write must not become control tokens. Where a special token stands in the rendered text does not show who
wrote it, since templates may change messages. So text in messages is guarded before it is rendered:

1. each special token's name in a message gets a `GUARD` after its first character;
2. a message that ends in the beginning of such a name gets a `GUARD` at its end;
3. the tokenizer finds special tokens only where the template wrote them, then removes the guards, so the ids are those
   of the text that the user wrote.

A special token of a single character cannot be guarded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from headway_core.errors import CheckpointError, RequestError
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

GUARD = "\ufdd0"
"""A Unicode noncharacter, meant for a process's internal use and refused in what users write."""


class ChatTemplate:
    """A compiled template. `named` (bos_token, …) is what templates may print; `specials` are the texts to guard."""

    def __init__(self, source: str | None, named: Mapping[str, str], specials: Collection[str], path: str) -> None:
        """`source` None: the checkpoint has no template and `render` refuses. CheckpointError: the template does not
        compile."""
        self._named = dict(named)
        texts = sorted((text for text in specials if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._heads = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._longest_head = max(map(len, self._heads), default=0)
        self._template = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except TemplateError as error:
                raise CheckpointError(path, "chat_template", f"does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, with guards in it: for `Tokenizer.encode_chat` alone.

        Each message has a `role` from a closed set that the API has checked, and a `content`: text, null (as ""), or a
        list of ``{"type": "text", "text": …}`` parts, which are joined. `variables` are further names for the template;
        they override nothing. Raises RequestError for anything else, and for whatever the template refuses.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        given = {**(variables or {}), "messages": [_plain(message, index) for index, message in enumerate(messages)]}
        try:
            context = {"tools": None, "documents": None, **self._guard_all(given), **self._named}
            return self._template.render(context, add_generation_prompt=add_generation_prompt)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses them: {error}", "messages") from error
        except RecursionError as error:
            raise RequestError("are nested too deeply", "messages") from error
        except (
            Exception
        ) as error:  # the template is foreign code: whatever goes wrong in it is this request's fault or its own
            raise RequestError(
                f"the model's chat template fails on them: {type(error).__name__}: {error}", "messages"
            ) from error

    def _guard_all(self, value: Any) -> Any:
        """`value` with guards in every text inside it."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self._guard_all(key): self._guard_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard_all(item) for item in value]
        return value

    def guard(self, text: str) -> str:
        """`text` in which no special token's name stands, and which does not end in the beginning of one. Raises
        RequestError."""
        if GUARD in text:
            raise RequestError(
                f"hold U+{ord(GUARD):04X}, a noncharacter that Unicode reserves for internal use", "messages"
            )
        if self._special is None:
            return text
        while self._special.search(text):  # once more for names that overlap
            text = self._special.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
        ends_open = any(text[-length:] in self._heads for length in range(1, min(self._longest_head, len(text)) + 1))
        return text + GUARD if ends_open else text


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message with its content as one text."""
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list | tuple):
        content = "".join(_part(part, f"messages[{index}].content[{at}]") for at, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(
            f"must be text or a list of text parts, not {type(content).__name__}", f"messages[{index}].content"
        )
    return {**message, "content": content}


def _part(part: object, field: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise RequestError(f"this model reads text only, not {kind[:40]!r}", field)
    raise RequestError('must be {"type": "text", "text": "…"}', field)


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: block tags swallow their line, `break` works, JSON is not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
