"""A runtime's event stream, cut into whole events: which pass to the client, and which have content.

Bytes in, bytes out, no I/O. Events pass unchanged and whole; the usage comment, which the gateway asked for, does not.
"""

from __future__ import annotations

import json
import re

from headway_core.contract.header_names import USAGE_COMMENT

_MARK = USAGE_COMMENT.encode()
_END = re.compile(rb"\r?\n\r?\n")
_NEWLINE = ord("\n")
_LONGEST_TAIL = 1 << 20
"""A event longer than this is no event of ours: it passes as it comes."""


class EventStream:
    """Takes what is read, and returns the bytes to relay."""

    __slots__ = ("_tail", "data_events", "usage")

    def __init__(self) -> None:
        self.usage: dict[str, int] | None = None
        """The runtime's counts once they came by."""
        self.data_events = 0
        """How many of the events that the last call gave back have data, the end mark not counted."""
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """The whole events in what has arrived; an unfinished one is kept for the next call."""
        if (
            not self._tail
            and data.find(b"\n") == len(data) - 2
            and data[-1] == _NEWLINE
            and data.startswith(b"data: {")
        ):
            # One event in a single line, as the tokens of an engine come one by one: there is nothing to find in it.
            self.data_events = 1
            return data
        passed = self._whole(data)
        self.data_events = passed.count(b"data:{") + passed.count(b"data: {")
        return passed

    def _whole(self, data: bytes) -> bytes:
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith(b"\n\n"):
            cut = _last_end(data)
            if len(data) - cut > _LONGEST_TAIL:
                cut = len(data)
            data, self._tail = data[:cut], data[cut:]
        return self._without_comment(data) if _MARK in data else data

    def rest(self) -> bytes:
        """What came after the last whole event, when the stream has ended."""
        tail, self._tail = self._tail, b""
        return self._without_comment(tail) if _MARK in tail else tail

    def _without_comment(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        start = 0
        for match in _END.finditer(data):
            kept.append(self._event(data[start : match.start()], match[0]))
            start = match.end()
        if start < len(data):
            kept.append(self._event(data[start:], b""))
        return b"".join(kept)

    def _event(self, event: bytes, end: bytes) -> bytes:
        if not event.startswith(_MARK) and b"\n" + _MARK not in event:
            return event + end
        lines = event.split(b"\n")
        ours = [line for line in lines if line.startswith(_MARK)]
        self._read(ours[-1][len(_MARK) :])
        others = [line for line in lines if not line.startswith(_MARK)]
        return b"\n".join(others) + end if others else b""

    def _read(self, text: bytes) -> None:
        try:
            counts = json.loads(text)
        except ValueError:
            return
        if isinstance(counts, dict):
            self.usage = {name: count for name, count in counts.items() if type(count) is int and count >= 0}


def _last_end(data: bytes) -> int:
    """Where the last whole event ends; 0 when there is none."""
    cut = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
    return cut if cut >= 4 or data.startswith(b"\n\n") else 0


def count_content_events(data: bytes) -> int:
    """How many of these whole events carry content: text, a tool call, reasoning, or the reason why there is none."""
    return sum([_has_content(event) for event in _END.split(data) if b"{" in event])


def _has_content(event: bytes) -> bool:
    payload = b"\n".join([line[5:] for line in event.splitlines() if line.startswith(b"data:")])
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        return False
    choices = event.get("choices") if isinstance(event, dict) else None
    return any(_choice_has_content(choice) for choice in choices) if isinstance(choices, list) else False


def _choice_has_content(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    if choice.get("text") or choice.get("finish_reason"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role")
