"""Everything that can be set from outside, checked before a socket is opened.

Only values and the command line live here; nothing is read from files, and no environment variable is consulted.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from headway_core.admission import RULES
from headway_core.arguments import DNS_LABEL, port, seconds, whole_number
from headway_core.contract.http import CONTROL_PORT, MAX_BODY_BYTES, SERVING_PORT
from headway_core.contract.policy import Endpoint, Pool

_ENDPOINT = re.compile(r"^(?P<host>\[[0-9A-Fa-f:.]+\]|[^][:/,\s]+)(:(?P<port>[0-9]+))?(/(?P<control>[0-9]+))?$")

_EPILOG = """\
examples:
  headway-gateway --pool chat=127.0.0.1:9000/9001
      one pool, one replica: requests to port 9000, its load report on port 9001
  headway-gateway --pool chat=runtime-0:8000/8001,runtime-1:8000/8001 --pool code=coder.svc:8000
      two pools; a name that resolves to several addresses (a headless Service) is several replicas
  headway-gateway --policy /etc/headway/policy
      pools, classes and objectives from policy files, re-read when they change
  headway-gateway hash-key --tenant acme --classes interactive,batch
      make a new API key and the line for --keys

Without a policy a pool has one class, "default": first token within 2 s, 100 ms for each further token, for 95% of
the requests.
"""


class _Unsupported(argparse.Action):
    """An option that exists only to explain why it is not supported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        parser.error(
            "--workers is not supported: queue and counters are in this process's memory, and two workers would each "
            "keep half of them. Run more gateway replicas instead (on Kubernetes: gateway.replicas): each keeps its "
            "own queue and sees the others' load through the runtimes' reports."
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What one gateway runs with. Seconds and bytes throughout."""

    host: str = "0.0.0.0"  # noqa: S104 - a server in a container listens on every interface
    port: int = SERVING_PORT
    control_port: int = CONTROL_PORT
    pools: tuple[Pool, ...] = ()
    policy: Path | None = None
    keys: Path | None = None
    trust_class_header: bool = False
    admission_rule: str = "moore"
    max_queue_requests: int = 1000
    """Per pool; beyond it, requests are shed with `queue_full`."""
    max_queue_bytes: int = 256 * 1024 * 1024
    """Bodies that wait in the queue of a pool; and as much again, of all pools, for large bodies still arriving."""
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout: float = 30.0
    """Longest silence within an upload, and the time that any upload has before it must reach 1 KiB/s in all."""
    request_timeout: float = 600.0
    drain_seconds: float = 30.0
    keep_alive: float = 75.0
    """Idle client connections; longer than the pools of clients and proxies in front (most use 60 s or less)."""
    poll_interval: float = 0.5
    first_byte_hold: float = 15.0
    """No byte of a stream goes out before its first content for this long: until then another replica can take over."""
    stall_timeout: float = 60.0
    """A client that takes nothing for this long is cut off."""
    max_queue_time: float = 60.0
    """Longest wait of a class that names none."""


def parse(arguments: Sequence[str]) -> Settings:
    """The command line as `Settings`. Exits with status 2 and one clear sentence when it cannot be honoured."""
    parser = _parser()
    given = parser.parse_args(arguments)
    pools: list[Pool] = []
    for text in given.pools:
        try:
            pools.append(parse_pool(text))
        except ValueError as error:
            parser.error(f"--pool {text}: {error}")
    names = [pool.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            parser.error(
                f"--pool {name}= is given twice: list all replicas of one pool in one option, separated by commas"
            )
    if not pools and given.policy is None:
        parser.error("nothing to serve: name replicas with --pool NAME=HOST:PORT, or policy files with --policy PATH")
    if given.port != 0 and given.port == given.control_port:
        parser.error(
            f"--port and --control-port must differ, not both {given.port}: the control port is never exposed "
            "to clients"
        )
    given.pools = tuple(pools)
    return Settings(**vars(given))


def parse_pool(text: str) -> Pool:
    """``NAME=HOST:PORT[/CONTROLPORT][,...]`` as a pool. Raises ValueError with the rule that is broken."""
    name, equals, listed = text.partition("=")
    if not equals or not DNS_LABEL.fullmatch(name):
        raise ValueError("must read NAME=HOST:PORT[/CONTROLPORT],... with a name of lower-case letters, digits and '-'")
    endpoints: list[Endpoint] = []
    for part in listed.split(","):
        match = _ENDPOINT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not HOST:PORT or HOST:PORT/CONTROLPORT")
        ports = [int(match["port"] or SERVING_PORT), int(match["control"] or CONTROL_PORT)]
        if not all(1 <= port <= 65535 for port in ports):
            raise ValueError(f"{part!r}: a port lies between 1 and 65535")
        endpoints.append(Endpoint(match["host"].strip("[]"), *ports))
    return Pool(name, tuple(endpoints))


def _parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="headway-gateway",
        description="OpenAI-compatible gateway that admits, queues and routes so that TTFT and TPOT targets are met.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default=default.host, help="address of both ports (default: every interface)")
    where.add_argument(
        "--port", type=port, default=default.port, help="requests and the status page (default: %(default)s)"
    )
    where.add_argument(
        "--control-port",
        type=port,
        default=default.control_port,
        help="load report, policy, metrics; keep it private (default: %(default)s)",
    )
    what = parser.add_argument_group("what it serves")
    what.add_argument(
        "--pool",
        dest="pools",
        action="append",
        default=[],
        metavar="NAME=HOST:PORT[/CONTROLPORT],...",
        help="replicas of one model; repeatable",
    )
    what.add_argument(
        "--policy",
        type=Path,
        metavar="PATH",
        help="policy file, or directory of *.json; re-read when the content changes",
    )
    what.add_argument(
        "--admission-rule",
        choices=RULES,
        default=default.admission_rule,
        help="who is admitted (default: %(default)s; the others are for comparison)",
    )
    who = parser.add_argument_group("who may send requests")
    who.add_argument(
        "--keys", type=Path, metavar="PATH", help="file or mounted Secret of API keys; without it everybody may send"
    )
    who.add_argument(
        "--trust-class-header",
        action="store_true",
        help="let clients choose any class with x-headway-class; only behind a gateway of your own",
    )
    limits = parser.add_argument_group("limits")
    count, duration = (whole_number(1), "N"), (seconds(0.01), "SECONDS")
    size = (whole_number(1), "BYTES")
    for flag, (kind, unit), what_for in (
        ("max-queue-requests", count, "requests of one pool that may wait here"),
        (
            "max-queue-bytes",
            size,
            "bytes of request bodies of one pool that may wait here, and of large ones that are still on their way in",
        ),
        ("max-body-bytes", size, "largest request body; more is answered 413"),
        ("max-queue-time", duration, "longest wait of a class whose policy names no maxQueueTime"),
        ("body-timeout", duration, "longest silence within an upload; then 408"),
        ("request-timeout", duration, "longest request, queue included; then 504"),
        ("stall-timeout", duration, "a client that reads nothing for this long is cut off"),
        ("first-byte-hold", duration, "how long a stream is held back so that another replica can take it over"),
        ("drain-seconds", duration, "on SIGTERM: time for what runs and waits to finish"),
        ("keep-alive", duration, "idle client connections are closed after this"),
        ("poll-interval", duration, "between two load reports of a replica"),
    ):
        value = getattr(default, flag.replace("-", "_"))
        text = f"{what_for} (default: %(default)s)"
        limits.add_argument(f"--{flag}", type=kind, metavar=unit, default=value, help=text)
    parser.add_argument(
        "--workers",
        action=_Unsupported,
        nargs="?",
        default=argparse.SUPPRESS,
        help="not supported: one process per gateway, scale by replicas",
    )
    return parser
