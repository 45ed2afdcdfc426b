"""Where results are to be written: refused before the work, not after it."""

from __future__ import annotations

from pathlib import Path

from headway_core.errors import InvalidInput


def check_result_file(path: Path | None, flag: str) -> None:
    """Raises InvalidInput when nothing could be written there; None is fine."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidInput(f"{flag} {path}: is a folder, and a file is to be written: name one in it")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"{flag} {path}: its folder does not exist: make it, or name another")
