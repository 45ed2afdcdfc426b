"""Files that people or Kubernetes replace while we run: read whole, to be compared by content, never by time stamp.

A mounted ConfigMap or Secret swaps a symlink, an editor writes in place, `headway up` renames: content is the one thing
all have in common.
"""

from __future__ import annotations

from pathlib import Path


def read_files(path: Path, suffix: str = "", limit: int = -1, *, pipe: bool = False) -> dict[str, bytes]:
    """Name → content, at most `limit` bytes, of the file, or of each file of the folder that ends in `suffix` and is
    not hidden (``..data`` and its like belong to the kubelet).

    A pipe would be waited for, and everybody with it: `path` may be one only if `pipe` says so. Raises OSError when
    `path` or a file cannot be read; a file that vanishes meanwhile is simply not there.
    """
    if not path.is_dir():
        if not pipe and path.exists() and not path.is_file():
            raise OSError(f"{path} is neither a file nor a folder")
        return {path.name: _content(path, limit)}
    found: dict[str, bytes] = {}
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or not file.name.endswith(suffix) or not file.is_file():
            continue
        try:
            found[file.name] = _content(file, limit)
        except FileNotFoundError:
            continue
    return found


def _content(file: Path, limit: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(limit)
