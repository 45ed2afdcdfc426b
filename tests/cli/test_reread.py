"""The promise's file while `headway up` runs: whatever stands in its place, what was promised stays and nothing waits
for it."""

import os
import threading

import pytest
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.up import LocalStack, _reread
from headway_cli.up_settings import UpSettings

TEXT = DEFAULT.read_text()


@pytest.fixture
def deployment(tmp_path):
    path = tmp_path / "slo.yaml"
    path.write_text(TEXT)
    settings = UpSettings(tmp_path, 1, path, read_slo(path), "127.0.0.1", 1, 1, 1.0, None, ())
    return LocalStack(settings, tmp_path / "state")


def target(deployment):
    return next(known.objectives.tpot.target for known in deployment.controller.slo.classes)


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe", "link to itself", "half", "empty", "garbage"])
def test_what_is_no_promise_changes_nothing_and_is_not_waited_for(deployment, kind):
    path, said = deployment.settings.slo_path, []
    path.unlink()
    {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link to itself": lambda: path.symlink_to(path),
        "half": lambda: path.write_text(TEXT[: len(TEXT) // 2]),
        "empty": path.touch,
        "garbage": lambda: path.write_bytes(bytes(range(256))),
    }[kind]()
    before = target(deployment)
    reading = threading.Thread(target=lambda: [_reread(deployment, said.append) for _ in range(4)], daemon=True)
    reading.start()
    reading.join(20)
    assert not reading.is_alive()
    (line,) = said
    assert target(deployment) == before and str(path) in line and "the promise stays as it was" in line
    path.rmdir() if kind == "folder" else path.unlink(missing_ok=True)
    path.write_text(TEXT.replace("tpot: {target: 150ms", "tpot: {target: 70ms"))
    _reread(deployment, said.append)
    assert target(deployment) == 0.07


def test_a_moment_without_the_file_is_not_worth_a_word(deployment):
    path, said = deployment.settings.slo_path, []
    for _ in range(3):
        path.unlink()
        _reread(deployment, said.append)
        path.write_text(TEXT)
        _reread(deployment, said.append)
    assert said == []


def test_an_edit_while_the_model_loads_is_heard(deployment):
    deployment.settings.slo_path.write_text(TEXT.replace("tpot: {target: 150ms", "tpot: {target: 70ms"))
    _reread(deployment, print)
    assert target(deployment) == 0.07
