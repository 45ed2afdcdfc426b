"""The command `headway-runtime`: settings from the command line, then one replica until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop
from headway_core.errors import HeadwayError

from headway_runtime.settings import Settings, from_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a drain, 2 for what cannot be served as asked, else see
    `headway_runtime.server.server.Server.run`."""
    logging.basicConfig(level=logging.INFO, format="headway-runtime: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    try:
        settings = from_arguments(arguments)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings))
    except HeadwayError as error:
        print(f"headway-runtime: {error}", file=sys.stderr)  # noqa: T201 -- the one thing this process has to say
        return 2


async def _serve(settings: Settings) -> int:
    # Imported late: --help and a wrong flag take no time.
    from headway_runtime.server.server import Server  # noqa: PLC0415

    return await Server(settings).run()


if __name__ == "__main__":
    sys.exit(main())
