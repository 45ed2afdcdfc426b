"""Commands whose output has nowhere to go."""

import subprocess
import sys

PLAN = [sys.executable, "-m", "headway_cli", "plan", "--coefficients", "0.03,0.0005,0.002,0.00001"]
PLAN += ["--prompt-tokens", "512", "--output-tokens", "128", "--rate", "1"]


def ended(output):
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {output}', "sh", *PLAN], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_closed_output_changes_nothing_about_the_result():
    assert ended(">&-").returncode == ended("").returncode
    assert ended(">&-").stderr == ""


def test_an_output_without_room_is_said_in_a_sentence():
    done = ended(">/dev/full")
    assert "Traceback" not in done.stderr and "No space left on device" in done.stderr
    assert done.returncode != 0
