"""The official `openai` client, unmodified, in two versions about a year apart: the pinned one and an older one in a folder of its own."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements" / "openai-older.txt"


@pytest.fixture(scope="session")
def older_client():
    """A folder with the older client in it, installed once from the pinned and hashed requirements."""
    version = next(line.split("==")[1].split()[0] for line in REQUIREMENTS.read_text().splitlines() if line.startswith("openai=="))
    folder = ROOT / ".cache" / f"openai-{version}"
    if not (folder / "openai" / "_version.py").is_file():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--target", str(folder), "-r", str(REQUIREMENTS)], check=True)
    return folder, version


@pytest.fixture(scope="session")
def run_client():
    """Runs the client's program against a server and returns the version that it used; what failed in it fails the test."""

    def run(url, folder=None):
        env = {**os.environ, **({"PYTHONPATH": str(folder)} if folder else {})}
        command = [sys.executable, str(Path(__file__).with_name("official_client.py")), url]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_the_newest_client_is_served(run_client, shared_runtime):
    assert run_client(shared_runtime.url) == importlib.metadata.version("openai")


def test_a_client_of_a_year_ago_is_served(run_client, shared_runtime, older_client):
    folder, version = older_client
    assert run_client(shared_runtime.url, folder) == version
