"""What `--help` of each command says: that it can be printed at all, and that it shows how the command is used."""

import pytest
from headway_cli.__main__ import main


@pytest.mark.parametrize("command", ["up", "bench", "simulate", "plan", "calibrate"])
def test_every_command_teaches_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert said.count(f"headway {command}") >= 3
