"""Files that people or Kubernetes replace while we run: read whole, compared by content, never by time stamp.

A mounted ConfigMap or Secret swaps a symlink, an editor writes in place, `headway up` renames: content is the one thing
all have in common.
"""

from __future__ import annotations

from pathlib import Path

READ_SECONDS = 1.0
"""How often the files are read."""


class WatchedFiles:
    """A file, or every file of a directory that ends in `suffix` and is not hidden (``..data`` and its like belong to
    the kubelet)."""

    def __init__(self, path: Path, suffix: str = "") -> None:
        self.path = path
        self._suffix = suffix
        self._last: dict[str, bytes] | None = None

    def read(self) -> dict[str, bytes]:
        """Name → content. Raises OSError when the path itself cannot be read; a file that vanishes meanwhile is simply
        not there.

        A pipe is read the first time only: later it would be waited for, and everybody with it, or give nothing.
        """
        if self._last is not None and self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise OSError(f"{self.path} is neither a file nor a folder")
        if not self.path.is_dir():
            return {self.path.name: self.path.read_bytes()}
        found: dict[str, bytes] = {}
        for file in sorted(self.path.iterdir()):
            if file.name.startswith(".") or not file.name.endswith(self._suffix) or not file.is_file():
                continue
            try:
                found[file.name] = file.read_bytes()
            except FileNotFoundError:
                continue
        return found

    def changed(self) -> dict[str, bytes] | None:
        """What `read` finds if it differs from the last time, else None. Raises OSError like `read`."""
        found = self.read()
        if found == self._last:
            return None
        self._last = found
        return found
