"""Ends a test whose machine was too busy to show anything: it has neither passed nor found a fault."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def inconclusive(why: str) -> NoReturn:
    """Fails the test; skips it where HEADWAY_E2E_BUSY=skip says that the machine is shared, so that nobody's neighbour
    breaks a build."""
    told = f"inconclusive, which says nothing about the product: {why}"
    if os.environ.get("HEADWAY_E2E_BUSY") == "skip":
        pytest.skip(told)
    pytest.fail(f"{told}. Free the machine of other work, or set HEADWAY_E2E_BUSY=skip")
