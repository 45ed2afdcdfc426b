"""The house itself: what must not stand where, so that later work fits in without moving walls."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from headway_core import __version__

ROOT = Path(__file__).parent.parent
MOST_MODULES_AT_THE_ROOT = 15
PACKAGES = ["core", "edge", "gateway", "gpu_runtime", "operator", "simulator", "cli"]


def test_the_folder_operator_does_not_shadow_the_standard_library():
    """A package named `operator` at the root would break every Python that is started there."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import collections, operator; print(operator.add(1, 2))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr


def test_only_the_packages_hold_init_files():
    strays = [
        path
        for folder in [*PACKAGES, "tests", "benchmarks"]
        for path in (ROOT / folder).rglob("__init__.py")
        if not path.relative_to(ROOT / folder).parts[0].startswith("headway_")
    ]
    assert strays == []


def test_no_file_is_a_drawer_for_odds_and_ends():
    names = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    assert len(names) > 10
    assert [
        path
        for path in names
        if path.stem in ("utils", "util", "common", "helpers", "misc") or path.stem.endswith("_v2")
    ] == []


def test_every_package_says_what_it_is():
    for path in (init for folder in PACKAGES for init in (ROOT / folder).rglob("__init__.py")):
        assert path.read_text().startswith('"""'), f"{path} has no docstring"


def test_there_is_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert (ROOT / project["tool"]["hatch"]["version"]["path"]).samefile(ROOT / "core/headway_core/__init__.py")
    chart = (ROOT / "charts/headway/Chart.yaml").read_text()
    assert re.findall(r"^(?:appV|v)ersion: \"?([^\"\n]+)", chart, re.MULTILINE) == [__version__, __version__]
    for image in (ROOT / "docker").glob("*.Dockerfile"):
        assert re.findall(r"headway/\w+:(\S+)", image.read_text()) == [__version__]


def test_the_core_imports_the_standard_library_only():
    allowed = {*sys.stdlib_module_names, "headway_core"}
    strangers = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "core").rglob("*.py")
        for name in imported(path.read_text())
        if name not in allowed
    ]
    assert strangers == []


def test_imports_are_found_wherever_they_stand():
    source = "import os.path, numpy\nfrom . import slo\ndef f():\n    from torch.nn import Linear\n"
    assert imported(source) == ["os", "numpy", "headway_core", "torch"]


def imported(source):
    """The top-level names of the packages that `source`, a module of the core, imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append("headway_core" if node.level else (node.module or "").partition(".")[0])
    return found


def test_the_runtime_is_understood_from_its_folders():
    """Its parts are folders, one for each process and what both share; at the root is what starts them."""
    runtime = ROOT / "gpu_runtime" / "headway_runtime"
    assert {path.name for path in runtime.iterdir() if path.is_dir() and path.name != "__pycache__"} == {
        "server",
        "text",
        "ipc",
        "engine",
        "model",
    }
    assert len(list(runtime.glob("*.py"))) <= MOST_MODULES_AT_THE_ROOT
