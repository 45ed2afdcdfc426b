import io
import os
import pty
import re

import pytest
from headway_cli.live_view import ClassRow, LiveView, ObjectiveStatus, Status

ROW = ClassRow(
    "interactive", 2.04, ObjectiveStatus(0.42, 1.0), ObjectiveStatus(0.061, 0.05, kept=False), 0.97, 3, 0.125
)
STATUS = Status(
    [ROW, ClassRow("batch", None, ObjectiveStatus(), ObjectiveStatus(target=0.05), None, 0, None)],
    1,
    2,
    4,
    1,
    8,
    None,
    "no traffic yet",
)


def shown(times):
    stream = io.StringIO()
    with LiveView(stream) as view:
        for now, status in times:
            view.show(status, now)
        view.say("replica 1 ended")
    return stream.getvalue()


def test_plain_lines_say_promise_and_fact_and_a_dash_for_the_unknown():
    text = shown([(0.0, STATUS)])
    line = text.splitlines()[0]
    for part in (
        "2.0 req/s",
        "TTFT 420ms of 1s",
        "TPOT 61ms of 50ms",
        "97.0%",
        "queue 3",
        "shed 12.5%",
        "replicas 1/2",
    ):
        assert part in line
    assert "batch: – req/s, TTFT – of –" in line
    assert text.endswith("replica 1 ended\n")


def test_plain_lines_are_few_and_only_when_something_changed():
    busier = Status([ROW], 2, 2, 5, 1, 8, 64, "x")
    text = shown([(0.0, STATUS), (1.0, busier), (20.0, STATUS), (40.0, busier)])
    assert len(text.splitlines()) == 3, (
        "the change after one second is too soon, the same line after twenty says nothing new"
    )


def test_a_target_that_grows_with_the_prompt_is_shown_whole():
    longer = ClassRow("interactive", 1.0, ObjectiveStatus(2.4, 2.0, 3.0, kept=True), ObjectiveStatus(), 1.0, 0, 0.0)
    assert "TTFT 2.4s of 2s + 3s/1k, TPOT – of –" in shown([(0.0, Status([longer], 1, 1, 0, 0, 8, 64, "x"))])


@pytest.mark.parametrize("kind", ["closed pipe", "full disk"])
def test_output_that_goes_nowhere_ends_nothing(kind):
    if kind == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w") as stream, LiveView(stream) as view:
        for _ in range(3):
            view.say("ready")
            view.show(STATUS, 100.0)
        # Whatever could not be written is not to fail again when the file is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)


@pytest.mark.parametrize("width", [20, 60, 79, 120])
def test_a_terminal_shows_every_figure_whole_whatever_its_width(width, monkeypatch):
    """What a person would see: a terminal of that width whose output is read back, without what only moves the
    cursor."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", str(width)), ("LINES", "60")):
        monkeypatch.setenv(name, value)
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream, LiveView(stream) as view:
        view.show(STATUS, 0.0)
        raw = b""
        while b"traffic" not in raw:
            raw += os.read(ours, 65536)
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode()).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for figure in ("interactive", "2.0", "420ms", "1s", "61ms", "50ms", "97.0%", "12.5%", "replicas 1/2"):
        assert figure in text, text


def test_an_encoding_without_dashes_gets_question_marks():
    raw = io.BytesIO()
    with LiveView(io.TextIOWrapper(raw, encoding="ascii")) as view:
        view.show(STATUS, 0.0)
        assert b"batch: ? req/s" in raw.getvalue()
