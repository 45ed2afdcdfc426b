"""Which model a runtime serves and with which options: what `headway up` and `headway calibrate` take, and its check.

Alone here in importing another component: the runtime's settings, without torch, check the options before a start.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from headway_runtime.settings import find_model, from_arguments


def add_runtime_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model, and what stands after ``--``."""
    parser.add_argument(
        "--model",
        metavar="DIR|FILE.gguf",
        help="checkpoint folder or GGUF file (default: the model that `make up` installed)",
    )
    parser.add_argument(
        "runtime_arguments", nargs="*", metavar="-- RUNTIME OPTIONS", help="options of headway-runtime, after --"
    )


def check_runtime_options(given: argparse.Namespace) -> Path:
    """The model's path.

    Raises:
        InvalidInput: there is no such model, or an option that no runtime takes; the message names it.
    """
    model = find_model(given.model)
    from_arguments(["--model", str(model), *given.runtime_arguments])
    return model
