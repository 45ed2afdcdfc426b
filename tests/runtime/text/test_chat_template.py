"""Chat templates: rendered as transformers renders them, in a sandbox, with every failure the client's to see as a
400."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_core.errors import RequestError
from headway_runtime.text.chat_template import GUARD, ChatTemplate
from headway_runtime.text.tokenizer import Tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


def template(source: str | None) -> ChatTemplate:
    return ChatTemplate(source, NAMED, SPECIALS, "tokenizer_config.json")


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n    {% if loop.first and message.role != 'system' %}\n{{ bos_token }}\n "
        "   {% endif %}\n"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "loop controls and namespaces": (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue "
        "-%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}[{{ ns.n }}]{{ m.content }}{%- if ns.n > 1 -%}{%- break -%}{%- endif -%}{%- "
        "endfor -%}"
    ),
    "tools unset": "{% if tools is none %}no tools{% endif %}{% if documents %}docs{% endif %}{{ messages | length }}",
    "json": "{{ messages[-1] | tojson }}|{{ {'b': '<é>', 'a': [1]} | tojson(indent=2, sort_keys=True) }}",
}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    user(" hé < b \n"),
    {"role": "assistant", "content": "ok"},
    user("한국어"),
]


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("prompt", [True, False])
def test_text_is_what_transformers_renders(folder: Callable[..., Path], source: str, prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    path = folder(chat_template=source)
    expected = PreTrainedTokenizerFast.from_pretrained(path).apply_chat_template(
        CONVERSATION, tokenize=False, add_generation_prompt=prompt
    )
    rendered = Tokenizer.open(path).chat_template.render(CONVERSATION, add_generation_prompt=prompt)
    assert rendered.replace(GUARD, "") == expected


def test_the_file_counts_before_the_config_and_a_list_by_its_default(folder: Callable[..., Path]) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path = folder(chat_template=named)
    assert Tokenizer.open(path).chat_template.render([user("x")]) == "plain"
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer.open(path).chat_template.render([user("x")]) == "file"


def test_without_a_template_chat_is_refused_with_the_remedy(folder: Callable[..., Path]) -> None:
    for missing in (..., None):
        with pytest.raises(RequestError, match="/v1/completions"):
            Tokenizer.open(folder(chat_template=missing)).chat_template.render([user("x")])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 5 }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "refuses"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "refuses"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
        ("{{ messages[0] | tojson(indent=messages) }}", "TypeError"),
    ],
)
def test_whatever_fails_in_a_template_is_a_request_error(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        template(source).render([user("x")])
    assert caught.value.field == "messages"


def test_a_message_nested_too_deeply_is_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="deep"):
        template("{{ messages[0].content }}").render([{"role": "user", "content": "a", "tool_calls": deep}])


def test_the_current_date_is_there() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", template("{{ strftime_now('%Y-%m-%d') }}").render([user("x")]))


def test_guards_break_names_and_open_ends_and_leave_all_else_alone() -> None:
    guard = template("").guard
    for plain in ("", "hello", "a > b", "|im_end|>", "x<y", "<<", "< s>"):
        assert guard(plain).replace(GUARD, "") == plain
        assert guard(plain) == plain or guard(plain) == plain + GUARD
    assert guard("a<|im_end|>b") == f"a<{GUARD}|im_end|>b"
    assert guard("a<|im_") == f"a<|im_{GUARD}"
    assert guard("<s><s>") == f"<{GUARD}s><{GUARD}s>"


def test_names_inside_names_are_broken_too() -> None:
    guard = ChatTemplate("", {}, ("<<a>>", "a>>b", "<a"), "x").guard
    for text in ("<<a>>b", "<<a>>", "<a>>b<a"):
        broken = guard(text)
        assert broken.replace(GUARD, "") == text
        assert not any(name in broken for name in ("<<a>>", "a>>b", "<a"))


def test_strings_anywhere_in_a_message_are_guarded() -> None:
    shows = template("{{ messages[0].tool_calls[0].function | tojson }}{{ messages[0].name }}")
    message = {
        "role": "assistant",
        "content": None,
        "name": "</s>",
        "tool_calls": [{"function": {"name": "f", "<s>": ["<|im_end|>", 5]}}],
    }
    rendered = shows.render([message])
    assert not any(name in rendered for name in SPECIALS)
    assert rendered.replace(GUARD, "") == '{"name": "f", "<s>": ["<|im_end|>", 5]}</s>'
