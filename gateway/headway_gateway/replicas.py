"""The replicas behind one pool: discovered by name, identified by their load reports.

DNS gives addresses. Which replica listens there, and whether it is ready or draining, only its own report tells. This
module resolves and polls; `headway_core.admission` decides from the reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headway_core.admission import PoolAdmission
from headway_core.contract.documents import load_hint, load_runtime_report
from headway_core.contract.http import PATH_LOAD
from headway_core.contract.policy import Endpoint
from headway_core.contract.reports import LoadHint, RuntimeReport
from headway_core.errors import DocumentError

from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.upstream import HostPort, Upstream

log = logging.getLogger("headway.gateway.replicas")

RESOLVE_SECONDS = 2.0
VANISHED_SECONDS = 30.0
"""How long an address that DNS no longer names is kept while it answers: an answer can be old, or partial."""


@dataclass(slots=True)
class _Watched:
    """What is known about one address."""

    address: Endpoint
    """Where a replica may listen; `host` is an IP address."""
    poller: asyncio.Task[None] | None = None
    replica_id: str | None = None
    """The id of the replica that answers there, as the fleet knows it."""
    unreachable: bool = False
    """The last attempt found that nothing listens there; a timeout does not tell that."""
    unavailable: bool = False
    """The replica answered 503: it takes no new request until its next report."""
    missing_since: float | None = None
    error: str | None = None


class Replicas:
    """Discovers, polls and forgets replicas. `changed` is called after each report and each loss, so that waiting
    requests can be dispatched; `gone` gets the id of each replica that is forgotten."""

    def __init__(
        self,
        admission: PoolAdmission,
        upstream: Upstream,
        interval: float,
        changed: Callable[[], None],
        gone: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.model: str | None = None
        """The model that the replicas report."""
        self.probed = asyncio.Event()
        """Set once every address known at first was polled."""
        self._admission = admission
        self._upstream = upstream
        self._interval = interval
        self._changed = changed
        self._gone = gone
        self._clock = clock
        self._endpoints: tuple[Endpoint, ...] = ()
        self._watched: dict[Endpoint, _Watched] = {}
        self._changed_endpoints = asyncio.Event()

    def discover(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Replaces the endpoints to resolve."""
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._changed_endpoints.set()

    def address_of(self, replica_id: str) -> HostPort | None:
        """Where the replica serves; None when it is gone."""
        for watched in self._watched.values():
            if watched.replica_id == replica_id:
                return watched.address.host, watched.address.port
        return None

    def down(self) -> frozenset[str]:
        """Ids of the replicas that are unreachable or unavailable now."""
        down = (watched for watched in self._watched.values() if watched.unreachable or watched.unavailable)
        return frozenset(watched.replica_id for watched in down if watched.replica_id is not None)

    def mark_down(self, replica_id: str, failure: UpstreamFailure) -> None:
        """An attempt found the replica unreachable or unavailable: nothing is sent there until its next report."""
        for watched in self._watched.values():
            if watched.replica_id == replica_id:
                watched.unavailable = failure is UpstreamFailure.UNAVAILABLE
                watched.unreachable = watched.unreachable or failure is UpstreamFailure.UNREACHABLE
        self._changed()

    def hint(self, replica_id: str, text: str, now: float) -> None:
        """Takes the short load report in a response header; ignores one that is malformed."""
        with contextlib.suppress(DocumentError):
            hint: LoadHint = load_hint(text)
            self._admission.hint(replica_id, hint, now)
            self._changed()

    def errors(self) -> Iterator[tuple[str, str]]:
        """Address and reason, of every address that cannot be used."""
        for watched in self._watched.values():
            if watched.error is not None:
                yield f"{watched.address.host}:{watched.address.control_port}", watched.error

    async def run(self) -> None:
        """Resolves and polls until cancelled."""
        try:
            while True:
                self._changed_endpoints.clear()
                await self._resolve()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_SECONDS):
                        await self._changed_endpoints.wait()
        finally:
            pollers = [watched.poller for watched in self._watched.values() if watched.poller is not None]
            for poller in pollers:
                poller.cancel()
            await asyncio.gather(*pollers, return_exceptions=True)

    # ------------------------------------------------------------ discovery

    async def _resolve(self) -> None:
        named: set[Endpoint] = set()
        unsure = False
        for endpoint in self._endpoints:
            try:
                named.update(dataclasses.replace(endpoint, host=host) for host in await resolve(endpoint.host))
            except OSError as error:
                # A name that does not resolve now says nothing about those it named before.
                unsure = True
                log.debug("%s does not resolve: %s", endpoint.host, error)
        for address in named - self._watched.keys():
            watched = self._watched[address] = _Watched(address)
            watched.poller = asyncio.create_task(self._poll_forever(watched))
        if not self._watched:
            self.probed.set()
        self._forget_missing(named, unsure, self._clock())

    def _forget_missing(self, named: set[Endpoint], unsure: bool, now: float) -> None:
        """Forgets the addresses that DNS has not named for long. `unsure`: some name could not be resolved."""
        for watched in list(self._watched.values()):
            if watched.address in named or unsure:
                watched.missing_since = None
            elif watched.missing_since is None:
                watched.missing_since = now
            elif watched.unreachable or now - watched.missing_since > VANISHED_SECONDS:
                self._forget(watched)

    def _forget(self, watched: _Watched) -> None:
        del self._watched[watched.address]
        if watched.poller is not None:
            watched.poller.cancel()
        self._remove(watched)
        self._changed()

    def _remove(self, watched: _Watched) -> None:
        if watched.replica_id is not None:
            self._admission.remove(watched.replica_id)
            self._gone(watched.replica_id)
            watched.replica_id = None

    # ------------------------------------------------------------ polling

    async def _poll_forever(self, watched: _Watched) -> None:
        due = self._clock()
        while True:
            try:
                await self._poll(watched)
            except Exception as error:
                # One odd replica is its own problem; the next poll may find it well.
                said = f"unexpected {type(error).__name__}: {error}"
                if watched.error != said:
                    log.exception("polling %s failed", watched.address.host)
                watched.error = said
            if all(other.replica_id or other.unreachable or other.error for other in self._watched.values()):
                self.probed.set()
            due = max(due + self._interval, self._clock() + self._interval / 4)
            await asyncio.sleep(due - self._clock())

    async def _poll(self, watched: _Watched) -> None:
        begun = self._clock()
        try:
            status, body = await self._upstream.get(
                (watched.address.host, watched.address.control_port),
                PATH_LOAD,
                timeout_seconds=max(1.0, 2 * self._interval),
            )
            if status != 200:
                raise DocumentError(f"its {PATH_LOAD} answers {status}")
            report = load_runtime_report(body)
        except UpstreamError as error:
            watched.error = str(error)
            if error.failure is UpstreamFailure.UNREACHABLE and not watched.unreachable:
                watched.unreachable = True
                self._changed()
            return
        except TimeoutError:
            watched.error = "its load report did not come in time"
            return
        except DocumentError as error:
            watched.error = f"not a load report: {error}"
            return
        watched.error = None
        now = self._clock()
        self._take(watched, report, now, now - begun)

    def _take(self, watched: _Watched, report: RuntimeReport, now: float, round_trip: float) -> None:
        name = self._name(watched, report)
        if watched.replica_id not in (None, name):
            self._remove(watched)
        watched.replica_id = name
        watched.unreachable = watched.unavailable = False
        self.model = report.model
        if name != report.replica_id:
            report = dataclasses.replace(report, replica_id=name)
        self._admission.report(report, now, round_trip)
        self._changed()

    def _name(self, watched: _Watched, report: RuntimeReport) -> str:
        """The reported id, made unique when another address reports it too: two replicas are never tracked as one."""
        for other in self._watched.values():
            if other is not watched and other.replica_id == report.replica_id and not other.unreachable:
                return f"{report.replica_id}@{watched.address.host}:{watched.address.port}"
        return report.replica_id


async def resolve(host: str) -> list[str]:
    """The IP addresses of `host`. Raises OSError when it has none."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if host == "localhost":
        # One process that listens on both families is one replica.
        return addresses[-1:]
    return addresses
