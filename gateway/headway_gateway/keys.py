"""API keys: which tenant sends a request, and which classes it may use.

A line is ``TENANT  sha256:HEX  [CLASS,CLASS...]``; ``#`` starts a comment. The key itself is stored nowhere: keys are
long and random, so one SHA-256 is enough, and a comparison checks every entry in full, so timing reveals nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway_core.errors import InvalidInput

_TENANT = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
_DIGEST = re.compile(r"^sha256:([0-9a-f]{64})$")
_CLASSES = re.compile(r"^[a-z0-9][-a-z0-9]*(,[a-z0-9][-a-z0-9]*)*$")
_LONGEST_KEY = 512


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `classes` None: any class."""

    tenant: str | None = None
    classes: frozenset[str] | None = None


ANYBODY = Caller()


class KeyRing:
    """The keys in force. Immutable; a new file makes a new ring."""

    def __init__(self, entries: Sequence[tuple[bytes, Caller]]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def caller(self, authorization: bytes | None) -> Caller | None:
        """The caller whose key is in the header ``Authorization: Bearer KEY``; None when the key is unknown."""
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key or len(key) > _LONGEST_KEY:
            return None
        digest = hashlib.sha256(key).digest()
        found: Caller | None = None
        for known, caller in self._entries:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def parse_keys(documents: Mapping[str, bytes]) -> KeyRing:
    """All lines of all files (name → content).

    Raises:
        InvalidInput: a line does not read as a key; `field` is ``FILE:LINE``. The line, maybe a key, is not told.
    """
    entries: list[tuple[bytes, Caller]] = []
    for name, content in sorted(documents.items()):
        for number, raw in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            line = raw.partition("#")[0].split()
            if not line:
                continue
            digest = _DIGEST.fullmatch(line[1]) if len(line) in (2, 3) else None
            classes = line[2] if len(line) == 3 else None
            if (
                digest is None
                or not _TENANT.fullmatch(line[0])
                or (classes is not None and not _CLASSES.fullmatch(classes))
            ):
                raise InvalidInput(
                    "must read TENANT sha256:HEX [CLASS,CLASS...]; `headway-gateway hash-key` writes such a line",
                    f"{name}:{number}",
                )
            allowed = frozenset(classes.split(",")) if classes else None
            entries.append((bytes.fromhex(digest[1]), Caller(line[0], allowed)))
    return KeyRing(entries)


def hash_key(arguments: Sequence[str]) -> int:
    """``headway-gateway hash-key``: prints the line of a key, new or from stdin. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headway-gateway hash-key",
        description="Prints the line for --keys on standard output; a newly made key goes to standard error, once.",
    )
    parser.add_argument("--tenant", required=True, help="whose key it is: letters, digits, '.', '_' and '-'")
    parser.add_argument("--classes", help="classes it may use, separated by commas (default: all)")
    parser.add_argument("--stdin", action="store_true", help="hash the key on standard input instead of making one")
    given = parser.parse_args(arguments)
    key = sys.stdin.readline().strip() if given.stdin else f"hw-{secrets.token_urlsafe(32)}"
    if len(key) < 16 or len(key) > _LONGEST_KEY or not key.isascii() or any(character.isspace() for character in key):
        parser.error(
            f"a key has 16 to {_LONGEST_KEY} ASCII characters and no spaces: short ones can be guessed from their hash"
        )
    line = f"{given.tenant}  sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    line += f"  {given.classes}" if given.classes else ""
    try:
        parse_keys({"line": line.encode()})
    except InvalidInput:
        parser.error(
            "a tenant has letters, digits, '.', '_' and '-'; classes are names separated by commas without spaces"
        )
    sys.stdout.write(line + "\n")
    if not given.stdin:
        sys.stderr.write(f"the key, shown once: {key}\n")
    return 0
