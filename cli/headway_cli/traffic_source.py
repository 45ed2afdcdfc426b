"""What `--from` names: load reports from files and control ports, and a gateway's replicas and demand."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from headway_core.contract import codec
from headway_core.contract.documents import load_gateway_report, load_runtime_report
from headway_core.contract.http import PATH_LOAD, PATH_POLICY
from headway_core.contract.policy import Policy
from headway_core.contract.reports import GatewayReport, RuntimeReport
from headway_core.errors import DocumentError, InvalidInput
from headway_core.planning.snapshot import Traffic
from headway_core.planning.traffic_window import TrafficWindow

SOURCES = (
    "the control port (http://HOST:8001) of a runtime, or of a gateway for all replicas behind it; or a file "
    "that `headway calibrate` or GET /load gave; may be repeated"
)
_POLL = 1.0


@dataclass(slots=True)
class ObservedPool:
    """What the sources said: replicas, gateways and the demand at those."""

    replicas: dict[str, RuntimeReport] = field(default_factory=dict)
    """Boot id → report: a replica behind two gateways is one."""
    gateways: list[str] = field(default_factory=list)
    """Those of the sources that are gateways."""
    traffic: Traffic | None = None
    """None without a gateway, or when it was not watched."""


def observe(
    sources: Sequence[str], pool: str | None, window: float, watch: float, say: Callable[[str], None]
) -> ObservedPool:
    """Asks every source; gateways again and again for `watch` seconds, since a rate needs two readings.

    `pool`: the one to ask for behind a gateway; None: the only one there.

    Raises:
        InvalidInput: a source that does not answer, or answers something else than a load report.
    """
    found = ObservedPool()
    with httpx.Client(timeout=5.0) as client:
        for source in sources:
            report = _report(client, source)
            if isinstance(report, RuntimeReport):
                found.replicas[report.boot_id] = report
                continue
            if not _is_address(source):
                raise InvalidInput(
                    f"--from {source}: is a gateway's report, and a rate needs two: give the gateway's address"
                )
            found.gateways.append(source)
            policy = _policy(client, source, pool)
            pool = policy.pool.name
            found.replicas |= {replica.boot_id: replica for replica in _behind(client, policy)}
        if found.gateways and pool is not None and watch > 0:
            found.traffic = _traffic(client, found.gateways, pool, max(window, watch), watch, say)
    if not found.replicas:
        raise InvalidInput(
            f"--from {', '.join(found.gateways)}: no replica behind it can be reached from here: name the "
            "control ports of runtimes, too"
        )
    return found


def _report(client: httpx.Client, source: str) -> RuntimeReport | GatewayReport:
    text = _text(client, source)
    try:
        return load_runtime_report(text)
    except DocumentError as error:
        try:
            return load_gateway_report(text)
        except DocumentError:
            raise InvalidInput(f"--from {source}: is not a load report: {error}") from error


def _text(client: httpx.Client, source: str) -> bytes:
    if not _is_address(source):
        try:
            return Path(source).read_bytes()
        except OSError as error:
            raise InvalidInput(
                f"--from {source}: cannot be read ({error.strerror}): give a file, or an address such as http://127.0.0.1:8001"
            ) from error
    return _get(client, source, PATH_LOAD)


def _get(client: httpx.Client, source: str, path: str) -> bytes:
    try:
        response = client.get(source.rstrip("/").removesuffix(PATH_LOAD) + path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise InvalidInput(
            f"--from {source}: does not answer ({why}): is the process up, and is this its control port?"
        ) from error
    if response.status_code != 200:
        raise InvalidInput(
            f"--from {source}: answers {response.status_code} to GET {path}: give the control port, which is "
            "8001 unless --control-port says otherwise"
        )
    return response.content


def _policy(client: httpx.Client, source: str, pool: str | None) -> Policy:
    """The policy in force at a gateway for the pool."""
    documents = json.loads(_get(client, source, PATH_POLICY))
    policies = {name: codec.decode(Policy, document) for name, document in documents.items()}
    name = pool if pool is not None or len(policies) != 1 else next(iter(policies))
    if name not in policies:
        asked = f"no pool {name!r}" if name is not None else "several pools, and no --slo says which"
        raise InvalidInput(f"--from {source}: this gateway has {asked}; it has {', '.join(sorted(policies)) or 'none'}")
    return policies[name]


def _behind(client: httpx.Client, policy: Policy) -> list[RuntimeReport]:
    """Reports of the policy's replicas that can be reached from here; a name may stand for many addresses."""
    found = []
    for endpoint in policy.pool.endpoints:
        try:
            resolved = socket.getaddrinfo(endpoint.host, endpoint.control_port, type=socket.SOCK_STREAM)
        except OSError:
            continue
        for address in sorted({str(entry[4][0]) for entry in resolved}):
            host = f"[{address}]" if ":" in address else address
            try:
                found.append(
                    load_runtime_report(client.get(f"http://{host}:{endpoint.control_port}{PATH_LOAD}").content)
                )
            except (httpx.HTTPError, DocumentError):
                continue
    return found


def _traffic(
    client: httpx.Client, gateways: Sequence[str], pool: str, window: float, watch: float, say: Callable[[str], None]
) -> Traffic | None:
    counted = TrafficWindow(pool, window)
    began = time.monotonic()
    say(f"counting what arrives for {watch:g} s")
    while True:
        answers = {source: _report(client, source) for source in gateways}
        now = time.monotonic()
        counted.record(
            {source: report for source, report in answers.items() if isinstance(report, GatewayReport)}, gateways, now
        )
        if now - began >= watch:
            return counted.traffic(now)
        time.sleep(min(_POLL, watch))


def _is_address(source: str) -> bool:
    return source.startswith(("http://", "https://"))
