"""Renders messages with the checkpoint's own Jinja template, in a sandbox.

What users write must not become control tokens. Where a special token stands in the rendered text does not show who
wrote it, since templates may change messages. So text in messages is guarded before it is rendered:

1. each special token's name in a message gets a `GUARD` after its first character;
2. a message that ends in the beginning of such a name gets a `GUARD` at its end;
3. the tokenizer finds special tokens only where the template wrote them, then removes the guards.

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
        """`source` None: there is no template and `render` refuses. Raises CheckpointError when it does not compile."""
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

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, with guards in it: for `Tokenizer.encode_chat` alone.

        The API has checked each message's `role` and `content`. Raises RequestError for what the template refuses.
        """
        if self._template is None:
            raise RequestError("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        try:
            context = {"tools": None, "documents": None, "messages": self._guard_all(messages), **self._named}
            return self._template.render(context, add_generation_prompt=add_generation_prompt)
        except RequestError:
            raise
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses them: {error}", "messages") from error
        except RecursionError as error:
            raise RequestError("are nested too deeply", "messages") from error
        except Exception as error:  # the template is foreign code: its fault or this request's
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"the model's chat template fails on them: {what}", "messages") from error

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
        """`text` without special tokens' names, and not ending in the beginning of one. Raises RequestError."""
        if GUARD in text:
            message = f"hold U+{ord(GUARD):04X}, a noncharacter that Unicode reserves for internal use"
            raise RequestError(message, "messages")
        if self._special is None:
            return text
        while self._special.search(text):  # once more for names that overlap
            text = self._special.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
        ends_open = any(text[-length:] in self._heads for length in range(1, min(self._longest_head, len(text)) + 1))
        return text + GUARD if ends_open else text


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: block tags swallow their line, `break` works, JSON is not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
