"""Compiles the C files beside this one when the engine starts, for the processor it starts on.

The compiler is the machine's own (`cc`, or what the variable CC names) and takes less than a second: kept kernels might
be for another processor or version. Whoever asks must do without where there is none.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SOURCES = ("matrix_product.c", "attention.c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_TIMEOUT = 60.0

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_long


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions; their C says what they take, pointers as integers. They use as many of torch's threads as told."""

    panel: int
    """Columns that are multiplied at once: what a matrix's outputs are padded to."""
    product: Callable[..., None]
    attend: Callable[..., None]


class NoKernelsError(Exception):
    """There is no compiler here, or it cannot make these; the message says which, and what would help."""


@functools.cache
def kernels() -> Kernels | str:
    """The compiled functions, or why there are none."""
    try:
        library = _compile()
    except NoKernelsError as error:
        return str(error)
    library.product.argtypes = (_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER, _NUMBER)
    library.attend.argtypes = (*(_POINTER,) * 7, _NUMBER, _POINTER, _NUMBER)
    library.product.restype = library.attend.restype = None
    return Kernels(ctypes.c_long.in_dll(library, "panel").value, library.product, library.attend)


def _compile() -> ctypes.CDLL:
    """Built into a folder that is gone again by the time this returns. Raises NoKernelsError."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or shutil.which(command[0]) is None:
        raise NoKernelsError(f"no C compiler ({' '.join(command) or 'CC is empty'}): install gcc")
    sources = [str(Path(__file__).with_name(name)) for name in _SOURCES]
    try:
        with tempfile.TemporaryDirectory(prefix="headway-") as folder:
            library = Path(folder) / "kernels.so"
            done = subprocess.run(  # noqa: S603 -- what runs is this machine's compiler, on files of ours
                [*command, *_FLAGS, "-o", str(library), *sources],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            if done.returncode:
                raise NoKernelsError(
                    f"{command[0]} failed: {(done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]}"
                )
            return ctypes.CDLL(str(library))
    except (
        OSError,
        subprocess.TimeoutExpired,
    ) as error:  # a full disk, a folder from which nothing may be run, no OpenMP
        raise NoKernelsError(f"{command[0]}: {error}") from error
