"""The policy's file while its folder comes and goes."""

import shutil
from dataclasses import replace

from headway_cli.policy_writer import PolicyWriter
from headway_cli.slo_file import DEFAULT, read_slo
from headway_cli.steering import Steering

POLICY = Steering(read_slo(DEFAULT), {}).policy()


def test_what_cannot_be_written_is_said_once_and_written_when_it_can(tmp_path):
    folder = tmp_path / "policy"
    writer = PolicyWriter(folder)
    assert writer.write() == []
    writer.put(POLICY)
    assert len(writer.write()) == 1 and writer.write() == []
    writer.put(replace(POLICY, revision=2))
    folder.mkdir()
    assert len(writer.write()) == 1 and writer.write() == []
    assert '"revision":2' in (folder / "local.json").read_text()
    shutil.rmtree(folder)
    assert writer.write() == []
