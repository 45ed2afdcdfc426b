"""`headway-gateway`: the command line around `server.serve`."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from typing import TYPE_CHECKING

from headway_core.errors import HeadwayError

from headway_gateway.keys import hash_key
from headway_gateway.settings import parse

if TYPE_CHECKING:
    from headway_gateway.app import Gateway

log = logging.getLogger("headway.gateway")


def main() -> int:
    """Runs the command. Returns the exit status: 0 after a clean end, 1 it could not start, 2 wrong command line."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["hash-key"]:
        return hash_key(arguments[1:])
    settings = parse(arguments)
    # Imported late: --help and errors in the command line do not wait for a web framework to load.
    import uvloop  # noqa: PLC0415

    from headway_gateway.server import serve  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # It warns of each malformed request: any client could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    _raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, _log_start))
    except (HeadwayError, OSError) as error:
        sys.stderr.write(f"headway-gateway: {error}\n")
        return 1
    return 0


def _log_start(gateway: Gateway, port: int, control_port: int) -> None:
    settings = gateway.settings
    if gateway.keys is None:
        log.warning("open to everybody who reaches port %d: no --keys given", port)
    else:
        log.info("%d API keys are in force", len(gateway.keys.ring))
    names = ", ".join(pool.name for pool in gateway.pools) or f"none yet, waiting for a policy in {settings.policy}"
    log.info(
        "serving on http://%s:%d (control on %d), rule %s, pools: %s",
        settings.host,
        port,
        control_port,
        settings.admission_rule,
        names,
    )


def _raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit: each stream needs two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
