"""Container images without an engine or a registry: layers from folders and tar archives, written as one OCI
archive."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster import binaries
from cluster.node import PAUSE_IMAGE

FOLDER = binaries.CACHE / "images"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


def write(archive: Path, name: str, layers: Sequence[Path], config: Mapping[str, object]) -> Path:
    """An archive with the image `name` (``repository:tag``): `layers`: tar archives, lowest first; `config` as in an
    OCI image config."""
    digests = [_digest(layer) for layer in layers]
    image = _json(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": digests},
        }
    )
    described = [
        {"mediaType": _LAYER, "digest": digest, "size": layer.stat().st_size}
        for digest, layer in zip(digests, layers, strict=True)
    ]
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, "digest": _digest(image), "size": len(image)},
            "layers": described,
        }
    )
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    entry = {"mediaType": _MANIFEST, "digest": _digest(manifest), "size": len(manifest), "annotations": names}
    index = _json({"schemaVersion": 2, "manifests": [entry]})
    fresh = archive.with_suffix(".new")
    with tarfile.open(fresh, "w") as out:
        _add(out, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(out, "index.json", index)
        for blob in (image, manifest):
            _add(out, _blob(_digest(blob)), blob)
        for digest, layer in zip(digests, layers, strict=True):
            out.add(layer, _blob(digest))
    fresh.replace(archive)
    return archive


def layer(archive: Path, folder: Path) -> Path:
    """`folder` as a layer: owned by root, dated 1970, so that equal contents make an equal layer."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = "root"
        return member

    with tarfile.open(archive, "w") as out:
        for path in sorted(folder.iterdir()):
            out.add(path, path.name, filter=plain)
    return archive


def pause() -> Path:
    """The image that holds a pod's namespaces open."""
    archive = FOLDER / "pause.tar"
    if not archive.exists():
        root = FOLDER / "pause"
        shutil.rmtree(root, ignore_errors=True)
        (root / "bin").mkdir(parents=True)
        shutil.copy2(str(shutil.which("busybox")), root / "bin" / "busybox")
        script = "trap 'exit 0' TERM INT; while :; do /bin/busybox sleep 86400 & wait $!; done"
        config = {"Entrypoint": ["/bin/busybox", "sh", "-c", script], "User": "65532:65532"}
        write(archive, PAUSE_IMAGE, [layer(FOLDER / "pause.layer.tar", root)], config)
    return archive


def _digest(content: bytes | Path) -> str:
    if isinstance(content, bytes):
        return f"sha256:{hashlib.sha256(content).hexdigest()}"
    with content.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(out: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    out.addfile(member, io.BytesIO(content))
