"""docs/kubernetes.md as its reader follows it: every command of its bash blocks, in order, on a fresh cluster's
namespace.

What is put in place of the text is listed in `reader`: image names, since those of this test lie on the node already,
and a free port of this machine. Everything else runs as it is printed, except that no image is built: test machines
have no engine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import binaries
from cluster.client import Client
from cluster.daemons import free_port
from cluster.errors import CommandFailed
from cluster.fixtures import fresh_namespace

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "kubernetes.md"
NAMESPACE = "serving"


@dataclass
class Reader:
    """Types what the guide says into a shell, in a folder that looks like the repository's root."""

    cluster: Client
    folder: Path
    substitutions: dict[str, str]
    shells: list[subprocess.Popen[str]] = field(default_factory=list)

    def types(self, block: str) -> str:
        """Runs one bash block, its background processes go on; what it printed. A command that fails ends the test."""
        for told, meant in self.substitutions.items():
            block = block.replace(told, meant)
        env = {
            **os.environ,
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "PATH": f"{binaries.BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder),
        }
        out = self.folder / "said.txt"
        with out.open("w") as file:  # not a pipe: what runs on in the background would keep it open
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=self.folder,
                env=env,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
            self.shells.append(shell)
            status = shell.wait(timeout=300)
        assert status == 0, f"{block}\nended with status {status}:\n{out.read_text()}"
        return out.read_text()

    def leaves(self) -> None:
        """Ends what still runs in the background."""
        for shell in self.shells:
            try:
                os.killpg(shell.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def reader(
    full_cluster: Client, product_values: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Reader]:
    for name in ("charts", "crds", "docker", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    port = free_port()
    substitutions = {
        "--set image.registry=registry.example.com": f"--values {product_values}",
        " 8000:80 ": f" {port}:80 ",
        "127.0.0.1:8000": f"127.0.0.1:{port}",
    }
    reading = Reader(full_cluster, tmp_path, substitutions)
    with fresh_namespace(full_cluster, request, NAMESPACE):
        try:
            yield reading
        finally:
            reading.leaves()


def test_the_guide_leads_from_nothing_to_a_kept_promise(reader: Reader):
    blocks = parsed()
    assert len(blocks["bash"]) == 7, "a block was added or taken away: say here what must come of it"
    images, install, ask, look, enforce, upgrade, uninstall = blocks["bash"]
    assert all(re.search(rf"^\s*{each}", images, re.M) for each in ("docker build", "docker push"))
    slo, pools = blocks["yaml"]

    reader.types(install)
    assert json.loads(reader.types(ask).splitlines()[-1])["choices"][0]["message"]["content"]

    (reader.folder / "chat.yaml").write_text(slo)
    told = reader.types(look)
    assert "TTFT" in told and "Conditions:" in told
    reader.cluster.wait_for(
        lambda: condition(reader, "Ready") == ("True", "Recommending"), "it recommends", patience=60
    )
    reader.types(enforce)
    reader.cluster.wait_for(
        lambda: condition(reader, "KnobsApplied") == ("True", "Acknowledged"), "knobs are in force", patience=90
    )

    reader.types(upgrade)
    own = reader.folder / "pools.yaml"
    own.write_text(pools)
    rendered = reader.cluster.helm("template", "headway", str(ROOT / "charts" / "headway"), "--values", str(own))
    assert all(f"name: headway-{name}\n" in rendered for name in ("qwen", "small", "fetched"))

    reader.types(uninstall)
    assert reader.cluster.get("servingslo/chat", namespace=NAMESPACE)["spec"]["mode"] == "Enforce", (
        "promises outlive the release"
    )
    with pytest.raises(CommandFailed, match="not found"):
        reader.cluster.get("deployment/headway-gateway", namespace=NAMESPACE)


def parsed() -> dict[str, list[str]]:
    """The guide's code blocks by language."""
    blocks: dict[str, list[str]] = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S):
        blocks.setdefault(language, []).append(text)
    return blocks


def condition(reader: Reader, kind: str) -> tuple[str, str]:
    status: dict[str, Any] = reader.cluster.get("servingslo/chat", namespace=NAMESPACE).get("status", {})
    return next(
        ((each["status"], each["reason"]) for each in status.get("conditions", []) if each["type"] == kind), ("", "")
    )
