"""The policy's file while its folder comes and goes."""

import shutil
from dataclasses import replace

from headway_cli.local_controller import LocalController
from headway_cli.policy_writer import PolicyWriter
from headway_cli.slo_file import DEFAULT, read_slo

POLICY = LocalController(read_slo(DEFAULT), {}).policy()


def test_what_cannot_be_written_is_said_once_and_written_when_it_can(tmp_path):
    folder = tmp_path / "policy"
    folder.touch()
    writer = PolicyWriter(folder)
    assert writer.write() == []
    writer.put(POLICY)
    assert len(writer.write()) == 1 and writer.write() == []
    writer.put(replace(POLICY, revision=2))
    folder.unlink()
    assert len(writer.write()) == 1 and writer.write() == []
    assert '"revision":2' in (folder / "local.json").read_text()


def test_a_policy_that_somebody_removes_or_edits_is_written_again(tmp_path):
    folder = tmp_path / "state" / "policy"
    path = folder / "local.json"
    writer = PolicyWriter(folder)
    writer.put(POLICY)
    assert writer.write() == [] and writer.write() == []
    good = path.read_bytes()
    for harm in (
        path.unlink,
        lambda: shutil.rmtree(tmp_path / "state"),
        lambda: path.write_bytes(b"\xff"),
        lambda: path.write_bytes(good[:-9]),
    ):
        harm()
        assert len(writer.write()) == 1 and writer.write() == []
        assert path.read_bytes() == good
