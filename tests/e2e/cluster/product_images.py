"""The product's images for test nodes: what `docker/*.Dockerfile` makes, from the same lock files, with neither engine
nor registry.

One difference: torch (5 GB) is not in the runtime's image. `TORCH` is the folder of this machine that has it, for a
hostPath volume mounted read-only at `TORCH_MOUNT`, which is on the image's module path after everything that the image
brings itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cluster import images
from cluster.errors import CannotRun

REPOSITORY = Path(__file__).parents[3]
TORCH = Path(sysconfig.get_path("purelib"))
TORCH_MOUNT = "/opt/torch"
TAG = "test"
_PACKAGES = {
    "gateway": ("core/headway_core", "edge/headway_edge", "gateway/headway_gateway"),
    "operator": ("core/headway_core", "operator/headway_operator"),
    "runtime": ("core/headway_core", "edge/headway_edge", "gpu_runtime/headway_runtime"),
}
_FROM_TORCH_FOLDER = re.compile(r"^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
_DEBIAN = ("python3", "ca-certificates", "libstdc++6")


def archives() -> list[Path]:
    """Archives of `headway/gateway:test`, `headway/operator:test` and `headway/runtime:test`, built where they are not
    up to date.

    The first time it takes about a minute; later only changed code is packed again. Raises CannotRun.
    """
    if sys.version_info[:2] != (3, 11):
        raise CannotRun(
            "test images use Debian 12's Python 3.11 and the torch of this environment: make the environment "
            "with Python 3.11"
        )
    if shutil.which("mmdebstrap") is None:
        raise CannotRun("there is no `mmdebstrap` on PATH: apt-get install mmdebstrap")
    images.FOLDER.mkdir(parents=True, exist_ok=True)
    with (images.FOLDER / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return [_archive(component) for component in _PACKAGES]


def _archive(component: str) -> Path:
    code = _code(component)
    archive = images.FOLDER / f"{component}-{_short(_tree(component), _lock(component).encode())}.tar"
    if not archive.exists():
        for old in images.FOLDER.glob(f"{component}-????????????.tar"):
            old.unlink()
        images.write(
            archive, f"docker.io/headway/{component}:{TAG}", [_base(), _libraries(component), code], _config(component)
        )
    return archive


def _config(component: str) -> dict[str, object]:
    path = f"/app:{TORCH_MOUNT}" if component == "runtime" else "/app"
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/tmp",
        "USER": "headway",
    }
    return {
        "Entrypoint": ["python3", "-m", f"headway_{component}"],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "User": "65532:65532",
    }


def _base() -> Path:
    """Debian 12 with Python, as the official Python image has it."""
    layer = images.FOLDER / f"debian-{_short(' '.join(_DEBIAN).encode())}.layer.tar"
    if not layer.exists():
        fresh = layer.with_suffix(".new")
        unneeded = ("doc", "man", "locale", "info")
        _run(
            *("mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(_DEBIAN)}", "--format=tar"),
            *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in unneeded),
            *("bookworm", str(fresh)),
        )
        fresh.replace(layer)
    return layer


def _libraries(component: str) -> Path:
    """What the component's lock file pins, under /app."""
    lock = _lock(component)
    layer = images.FOLDER / f"{component}-libraries-{_short(lock.encode())}.layer.tar"
    if not layer.exists():
        for old in images.FOLDER.glob(f"{component}-libraries-*.layer.tar"):
            old.unlink()
        root = images.FOLDER / f"{component}-libraries"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        requirements = images.FOLDER / f"{component}.txt"
        requirements.write_text(lock)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
        _run(
            *pip,
            "--require-hashes",
            "--no-deps",
            "--no-compile",
            "--target",
            str(root / "app"),
            "--requirement",
            str(requirements),
        )
        images.layer(layer, root)
        shutil.rmtree(root)
    return layer


def _code(component: str) -> Path:
    root = images.FOLDER / f"{component}-code"
    shutil.rmtree(root, ignore_errors=True)
    for package in _PACKAGES[component]:
        shutil.copytree(
            REPOSITORY / package, root / "app" / Path(package).name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return images.layer(images.FOLDER / f"{component}-code.layer.tar", root)


def _lock(component: str) -> str:
    """The lock file; for the runtime without what comes from `TORCH`."""
    text = (REPOSITORY / "requirements" / f"{component}.txt").read_text()
    if component != "runtime":
        return text
    entries = re.split(r"(?m)^(?=[a-z0-9])", text)
    return "".join(entry for entry in entries if not _FROM_TORCH_FOLDER.match(entry))


def _tree(component: str) -> bytes:
    files = sorted(
        path
        for package in _PACKAGES[component]
        for path in (REPOSITORY / package).rglob("*")
        if "__pycache__" not in path.parts
    )
    digest = hashlib.sha256()
    for path in files:
        if path.is_file():
            digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.digest()


def _short(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotRun(f"`{' '.join(command[:6])} …` failed: {done.stderr.strip()[-1500:]}")
