"""The images' recipes, read closely: what is copied is there, what is installed is what the code imports, and nobody
runs as root."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from headway_core.contract.http import CONTROL_PORT, SERVING_PORT

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "gateway": {"core/headway_core", "edge/headway_edge", "gateway/headway_gateway"},
    "operator": {"core/headway_core", "operator/headway_operator"},
    "runtime": {"core/headway_core", "edge/headway_edge", "gpu_runtime/headway_runtime"},
}
PORTS = {"gateway": {SERVING_PORT, CONTROL_PORT}, "operator": {CONTROL_PORT}, "runtime": {SERVING_PORT, CONTROL_PORT}}
LOCKS = {"gateway": ["gateway"], "operator": ["operator"], "runtime": ["runtime", "model"]}


@dataclass
class Stage:
    """One FROM and the instructions below it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word):
        return [rest for instruction, rest in self.steps if instruction == word]

    @property
    def environment(self):
        return dict(pair.split("=", 1) for line in self.all("ENV") for pair in line.split())


def stages(component):
    """The Dockerfile's stages; every line must be one that is understood here."""
    found = []
    for line in (ROOT / "docker" / f"{component}.Dockerfile").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        word, rest = line.split(" ", 1)
        assert word in ("FROM", "COPY", "RUN", "ENV", "LABEL", "USER", "EXPOSE", "ENTRYPOINT"), line
        assert not line.endswith("\\"), "one instruction a line"
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base, name))
        else:
            found[-1].steps.append((word, rest))
    return found


def sent_to_the_engine(path):
    """Whether .dockerignore lets it through; there a later line outweighs an earlier one."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!")
        if any(fnmatch(str(each), pattern) for each in (path, *path.parents)):
            sent = line.startswith("!")
    return sent


def imported(package):
    """Top-level names of all modules that the package's files import, wherever in the file."""
    names = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"__future__"}


def pinned(lock):
    """Names of the distributions that a lock file pins, each with hashes."""
    entries = [
        entry
        for entry in re.split(r"(?m)^(?=[a-z0-9])", (ROOT / "requirements" / f"{lock}.txt").read_text())
        if "==" in entry
    ]
    assert all("--hash=sha256:" in entry for entry in entries)
    return {re.sub(r"[-_.]+", "-", entry.split("==")[0]).lower() for entry in entries}


@pytest.mark.parametrize("component", PACKAGES)
class TestImage:
    def test_everything_that_is_copied_exists_and_reaches_the_engine(self, component):
        build, final = stages(component)
        for line in build.all("COPY"):
            *sources, target = line.split()
            assert len(sources) == 1 or target.endswith("/"), line
            for source in map(Path, sources):
                assert (ROOT / source).exists(), source
                assert sent_to_the_engine(source), source
        assert final.all("COPY") == [f"--from={build.name} /app /app"]
        assert build.base == final.base, "compiled modules fit the Python that built them"
        assert not sent_to_the_engine(Path("core/headway_core/__pycache__")) and not sent_to_the_engine(Path(".git"))

    def test_its_own_lock_file_is_installed_and_covers_every_import(self, component):
        build, _ = stages(component)
        copied = {Path(source) for line in build.all("COPY") for source in line.split()[:-1]}
        locks = {path.stem for path in copied if path.parts[0] == "requirements"}
        assert locks == set(LOCKS[component])
        installs = [line for line in build.all("RUN") if line.startswith("pip install")]
        assert len(installs) == len(locks) and all(
            "--require-hashes --" in line and "--target /app " in line for line in installs
        )
        code = {str(path) for path in copied if path.parts[0] != "requirements"}
        assert code == PACKAGES[component]
        names = set.union(*(imported(package) for package in code))
        assert {name for name in names if name.startswith("headway_")} <= {Path(package).name for package in code}
        makers = packages_distributions()
        have = set.union(*(pinned(lock) for lock in locks))
        foreign = {name: makers.get(name, [name]) for name in names if not name.startswith("headway_")}
        assert {
            name
            for name, known in foreign.items()
            if not have & {re.sub(r"[-_.]+", "-", maker).lower() for maker in known}
        } == set()

    def test_the_runtime_alone_has_a_compiler_for_its_kernels(self, component):
        _, final = stages(component)
        assert any(" gcc " in line for line in final.all("RUN")) == (component == "runtime")

    def test_nobody_is_root_and_the_chart_finds_what_it_expects(self, component):
        _, final = stages(component)
        (user,) = final.all("USER")
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a number, or runAsNonRoot cannot tell"
        assert {int(port) for line in final.all("EXPOSE") for port in line.split()} == PORTS[component]
        assert final.environment["PYTHONPATH"] == "/app"
        assert final.environment["HOME"] == "/tmp", "the one place that can be written"
        assert final.environment["PYTHONDONTWRITEBYTECODE"] == "1"

    def test_the_entry_point_starts(self, component, tmp_path):
        """With the copied packages alone, as in the image: no other package of the repository, and the folder at hand
        is not searched."""
        _, final = stages(component)
        (line,) = final.all("ENTRYPOINT")
        python, flag, module = json.loads(line)
        assert (python, flag) == ("python3", "-m")
        for package in PACKAGES[component]:
            (tmp_path / Path(package).name).symlink_to(ROOT / package)
        program = (
            "import runpy, sys\n"
            f"own, checkout, module = {str(tmp_path)!r}, {str(ROOT)!r}, {module!r}\n"
            "sys.path = [own] + [path for path in sys.path if 'site-packages' in path or not "
            "path.startswith(checkout)]\n"
            "sys.argv = [module, '--help']\n"
            "runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], cwd="/", capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage:" in done.stdout
