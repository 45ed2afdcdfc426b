"""The replicas behind one pool: found by name, known by their load reports.

DNS says where somebody might be; who it is, and whether it is ready or draining, only its own report says. The
decisions taken from reports are `headway_core.admission`'s; this file does the looking-up and the polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
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
"""How long an address that DNS no longer names is kept while it answers: resolvers cache that long, and answers can be
partial."""

Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True)
class Address:
    """One place where a replica may listen; `host` is an IP address."""

    host: str
    port: int
    control_port: int


@dataclass(slots=True)
class _Watched:
    """What is known about one address."""

    address: Address
    poller: asyncio.Task[None] | None = None
    replica: str | None = None
    """Under which id the fleet knows whoever answers there."""
    refused: bool = False
    """The last try found nobody listening. That is knowledge, unlike silence."""
    shut: bool = False
    """It answered that it takes nothing new; its next report may say more."""
    missing_since: float | None = None
    error: str | None = None


class Replicas:
    """Finds, polls and forgets. `changed` is called after each report or loss, so that whoever waits can look again;
    `gone` with each replica that is forgotten."""

    def __init__(
        self,
        admission: PoolAdmission,
        upstream: Upstream,
        interval: float,
        changed: Callable[[], None],
        gone: Callable[[str], None],
    ) -> None:
        self.model: str | None = None
        """The model that the replicas report."""
        self.probed = asyncio.Event()
        """Every address known at first was asked once."""
        self._admission = admission
        self._upstream = upstream
        self._interval = interval
        self._changed = changed
        self._gone = gone
        self._endpoints: tuple[Endpoint, ...] = ()
        self._watched: dict[Address, _Watched] = {}
        self._again = asyncio.Event()

    def discover(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Replaces what is looked for."""
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self._again.set()

    def address_of(self, replica_id: str) -> HostPort | None:
        """Where that replica serves; None when it is gone."""
        for watched in self._watched.values():
            if watched.replica == replica_id:
                return watched.address.host, watched.address.port
        return None

    def unreachable(self) -> frozenset[str]:
        """Replicas that nobody answers for at this moment, or that take nothing."""
        away = (watched for watched in self._watched.values() if watched.refused or watched.shut)
        return frozenset(watched.replica for watched in away if watched.replica is not None)

    def refused(self, replica: str, *, listens: bool) -> None:
        """Its serving port took no connection, or (`listens`) took no request: nothing goes there until it reports
        again."""
        for watched in self._watched.values():
            if watched.replica == replica:
                watched.shut = listens
                watched.refused = watched.refused or not listens
        self._changed()

    def hint(self, replica: str, text: str | None) -> None:
        """The report that rode on a response; one that cannot be read is as good as none."""
        if text is None:
            return
        with contextlib.suppress(DocumentError):
            hint: LoadHint = load_hint(text)
            self._admission.hint(replica, hint, asyncio.get_running_loop().time())
            self._changed()

    def errors(self) -> Iterator[tuple[str, str]]:
        """Address and reason of everything that cannot be used."""
        for watched in self._watched.values():
            if watched.error is not None:
                yield f"{watched.address.host}:{watched.address.control_port}", watched.error

    async def run(self) -> None:
        """Looks up and polls until cancelled."""
        try:
            while True:
                self._again.clear()
                await self._resolve()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RESOLVE_SECONDS):
                        await self._again.wait()
        finally:
            pollers = [watched.poller for watched in self._watched.values() if watched.poller is not None]
            for poller in pollers:
                poller.cancel()
            await asyncio.gather(*pollers, return_exceptions=True)

    # ------------------------------------------------------------ finding

    async def _resolve(self) -> None:
        now = asyncio.get_running_loop().time()
        named: set[Address] = set()
        unsure = False
        for endpoint in self._endpoints:
            try:
                named.update(
                    Address(host, endpoint.port, endpoint.control_port) for host in await resolve(endpoint.host)
                )
            except OSError as error:
                # A name that does not resolve now says nothing about those it named before.
                unsure = True
                log.debug("%s does not resolve: %s", endpoint.host, error)
        for address in named - self._watched.keys():
            watched = self._watched[address] = _Watched(address)
            watched.poller = asyncio.create_task(self._poll_forever(watched))
        if not self._watched:
            self.probed.set()
        for watched in list(self._watched.values()):
            if watched.address in named or unsure:
                watched.missing_since = None
            elif watched.missing_since is None:
                watched.missing_since = now
            elif watched.refused or now - watched.missing_since > VANISHED_SECONDS:
                self._forget(watched)

    def _forget(self, watched: _Watched) -> None:
        del self._watched[watched.address]
        if watched.poller is not None:
            watched.poller.cancel()
        self._lose(watched)
        self._changed()

    def _lose(self, watched: _Watched) -> None:
        if watched.replica is not None:
            self._admission.remove(watched.replica)
            self._gone(watched.replica)
            watched.replica = None

    # ------------------------------------------------------------ polling

    async def _poll_forever(self, watched: _Watched) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                await self._poll(watched)
            except Exception as error:
                # One odd replica is its own problem; the next poll may find it well.
                said = f"unexpected {type(error).__name__}: {error}"
                if watched.error != said:
                    log.exception("polling %s failed", watched.address.host)
                watched.error = said
            if all(other.replica or other.refused or other.error for other in self._watched.values()):
                self.probed.set()
            due = max(due + self._interval, loop.time() + self._interval / 4)
            await asyncio.sleep(due - loop.time())

    async def _poll(self, watched: _Watched) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
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
            if error.failure is UpstreamFailure.CONNECT and not watched.refused:
                watched.refused = True
                self._changed()
            return
        except TimeoutError:
            watched.error = "its load report did not come in time"
            return
        except DocumentError as error:
            watched.error = f"not a load report: {error}"
            return
        watched.error = None
        self._take(watched, report, loop.time(), loop.time() - begun)

    def _take(self, watched: _Watched, report: RuntimeReport, now: float, round_trip: float) -> None:
        name = self._name(watched, report)
        if watched.replica not in (None, name):
            self._lose(watched)
        watched.replica = name
        watched.refused = watched.shut = False
        self.model = report.model
        if name != report.replica:
            report = dataclasses.replace(report, replica=name)
        self._admission.report(report, now, round_trip)
        self._changed()

    def _name(self, watched: _Watched, report: RuntimeReport) -> str:
        """The reported id, made unique when somebody else answers to it already: two replicas must never share one set
        of books."""
        for other in self._watched.values():
            if other is not watched and other.replica == report.replica and not other.refused:
                return f"{report.replica}@{watched.address.host}:{watched.address.port}"
        return report.replica


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
