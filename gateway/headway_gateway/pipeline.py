"""The path of a request: authenticate, parse, classify, admit, wait for a grant, send to a replica, stream, account.

`Pipeline.serve` is that path. The rest answers the client and counts the request, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headway_core.admission import Request, prefix_chain
from headway_core.admission.prefixes import CHUNK_BYTES
from headway_core.contract.header_names import CLASS, DISPATCH, PRIORITY, TENANT, WANT_USAGE, tenant_salt
from headway_core.errors import RequestError
from headway_core.json_document import LARGE_BYTES
from headway_core.slo import PriorityClass

from headway_gateway import error_responses, parsed_request
from headway_gateway.accounting import RequestRecord, outcome_of
from headway_gateway.attempt_listener import AttemptListener
from headway_gateway.body_budget import BodyBudget, BodyReservation
from headway_gateway.classification import classify
from headway_gateway.client_request import ClientRequest, Receive, RequestStopped, Scope, Send, StopCause
from headway_gateway.dispatcher import Grant
from headway_gateway.error_responses import RequestFailed
from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.keys import ANYBODY, Caller, KeyRing
from headway_gateway.parsed_request import ApiRoute, ParsedRequest
from headway_gateway.pools import Pools, ServedPool
from headway_gateway.relay import Relay, UpstreamAttempt
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream, forwarded

MAX_ATTEMPTS = 3
"""Replicas that a request is sent to while none takes it."""
MAX_RESETS = 2
"""Attempts of a request during which the replica broke off: the request itself may be what breaks replicas."""


class Pipeline:
    """Serves the two completion routes. `keys` gives the keys in force, None if everybody may send."""

    def __init__(
        self,
        settings: Settings,
        pools: Pools,
        upstream: Upstream,
        keys: Callable[[], KeyRing | None],
        clock: Callable[[], float],
    ) -> None:
        self.active: set[ClientRequest] = set()
        """Every request between its head and its end, for the drain and for stalled clients."""
        self.idle = asyncio.Event()
        """Set while no request is active."""
        self.idle.set()
        self.body_budget = BodyBudget(settings.max_queue_bytes)
        self._settings = settings
        self._pools = pools
        self._keys = keys
        self._clock = clock
        self._relay = Relay(upstream, settings.first_byte_hold, clock)
        self._parser_thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")

    # ------------------------------------------------------------ the path

    async def serve(self, client_request: ClientRequest, route: ApiRoute) -> None:
        """The path of one request.

        Raises:
            RequestFailed: it ends early, with this error response.
            RequestStopped: the client left, or the time is over.
        """
        settings, pools = self._settings, self._pools
        try:
            caller = self.authenticate(client_request)
            with BodyReservation(self.body_budget) as reservation:
                body = await client_request.read_body(settings.max_body_bytes, settings.body_timeout, reservation)
                parsed = await self._parse(client_request, route, body)
            pool = pools.serving(parsed.model)
            parsed.check_length(pool.admission.fleet.longest())
            class_header = self._class_header(client_request)
            priority_class = classify(pool.policy, caller, class_header=class_header, service_tier=parsed.service_tier)
        except RequestError as error:
            rejected = RequestFailed(error_responses.bad_request(error))
            self._count_unclassified(rejected)
            raise rejected from error
        except (RequestFailed, RequestStopped) as error:
            # Not "from" itself: a cycle would keep the frames, and with them the body, until garbage is collected.
            self._count_unclassified(error)
            raise
        request = self._admission_request(pool, priority_class, caller, parsed, client_request)
        record = RequestRecord(pool.counters[priority_class.name], request, parsed.choices)
        with record, client_request.stoppable(settings.request_timeout):
            grant = await pool.dispatcher.acquire(request, record.set_queued)
            while True:
                record.admitted()
                try:
                    with grant:
                        await self._attempt(grant, pool, caller, parsed, client_request, record)
                    return
                except UpstreamError as error:
                    failed = self._replicas_to_avoid(pool, grant, error, client_request)
                grant = await pool.dispatcher.reacquire(request, failed, record.set_queued)

    async def _parse(self, client_request: ClientRequest, route: ApiRoute, body: bytes) -> ParsedRequest:
        """Large bodies are parsed one by one in one thread, so they delay only each other; none whose client has left.

        Raises RequestError, RequestStopped.
        """
        if len(body) < LARGE_BYTES:
            return parsed_request.parse(route, body)
        with client_request.stoppable(self._settings.request_timeout):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._parser_thread, parsed_request.parse, route, body)

    def close(self) -> None:
        """Ends the parser thread; bodies that it has not begun are not parsed."""
        self._parser_thread.shutdown(wait=False, cancel_futures=True)

    def authenticate(self, client_request: ClientRequest) -> Caller:
        """Who sent the request. Raises RequestFailed with 401 when keys are in force and it shows none of them."""
        ring = self._keys()
        if ring is None:
            return ANYBODY
        caller = ring.caller(client_request.headers.get(b"authorization"))
        if caller is None:
            raise RequestFailed(error_responses.unauthorized())
        return caller

    def _admission_request(
        self,
        pool: ServedPool,
        priority_class: PriorityClass,
        caller: Caller,
        parsed: ParsedRequest,
        client_request: ClientRequest,
    ) -> Request:
        """The request as the admission sees it. The length of a prompt that is text is an estimate."""
        tokens = parsed.token_ids
        if tokens is None:
            tokens = pool.estimator.estimate(pool.name, parsed.text)
        tokens = max(1, tokens)
        return Request(
            request_id=self._pools.next_number(),
            priority_class=priority_class,
            arrival=client_request.arrival,
            prompt_tokens=tokens,
            size_bytes=len(parsed.body),
            retry=_is_retry(client_request),
            prefix=prefix_chain(parsed.text, tenant_salt(caller.tenant)),
            prefix_chunk_tokens=tokens * CHUNK_BYTES / max(1, len(parsed.text)),
        )

    async def _attempt(
        self,
        grant: Grant,
        pool: ServedPool,
        caller: Caller,
        parsed: ParsedRequest,
        client_request: ClientRequest,
        record: RequestRecord,
    ) -> None:
        """Sends the request to the replica of `grant` and relays the response."""
        address = pool.replicas.address_of(grant.replica_id)
        if address is None:
            raise UpstreamError(UpstreamFailure.UNREACHABLE, "it has just gone")
        dispatch = _dispatch_headers(self._pools.boot_id, grant, caller)
        attempt = UpstreamAttempt(
            address=address,
            path=parsed.route.value,
            body=parsed.body,
            headers=forwarded(client_request.headers.items(), client_request.request_id, dispatch),
            client_request=client_request,
            listener=AttemptListener(pool, grant, record, parsed, self._clock),
        )
        try:
            status = await self._relay.run(attempt)
        except UpstreamError as error:
            # A closed keep-alive connection says nothing about the health of the replica, nor does its drain.
            grant.failed = error.failure in (UpstreamFailure.UNREACHABLE, UpstreamFailure.RESET)
            if error.failure in (UpstreamFailure.UNREACHABLE, UpstreamFailure.UNAVAILABLE):
                pool.replicas.mark_down(grant.replica_id, error.failure)
            raise
        grant.failed = status >= 500
        if not grant.failed:
            now = self._clock()
            pool.admission.fleet.outliers.success(grant.replica_id, now)
            pool.failures.succeeded(grant.replica_id, now)

    def _replicas_to_avoid(
        self, pool: ServedPool, grant: Grant, error: UpstreamError, client_request: ClientRequest
    ) -> list[str]:
        """The ids of the replicas that another attempt must not use.

        Raises:
            RequestFailed: there is no other attempt: part of a response was sent, or enough replicas have failed.
        """
        if grant.failed:
            pool.failures.failed(grant.replica_id, error, client_request.request_id.decode("latin-1"), self._clock())
        if client_request.started:
            raise RequestFailed(error_responses.upstream_failed(), "upstream_error") from error
        attempts = client_request.failed_attempts
        attempts.append((grant.replica_id, error.failure))
        failures = [failure for _, failure in attempts]
        if (
            failures.count(UpstreamFailure.STALE) > 1
            or failures.count(UpstreamFailure.RESET) >= MAX_RESETS
            or len(failures) > MAX_ATTEMPTS
        ):
            raise RequestFailed(error_responses.upstream_failed(), "upstream_error") from error
        return [replica_id for replica_id, failure in attempts if failure is not UpstreamFailure.STALE]

    def _class_header(self, client_request: ClientRequest) -> str | None:
        if not self._settings.trust_class_header:
            return None
        value = client_request.headers.get(CLASS.encode())
        return None if value is None else value.decode("latin-1")

    def _count_unclassified(self, error: RequestFailed | RequestStopped) -> None:
        """Counts a request that ended before its pool and class were known."""
        self._pools.unclassified.offered += 1
        self._pools.unclassified.end(*outcome_of(error, admitted=False))

    # ------------------------------------------------------------ around it

    async def handle(self, scope: Scope, receive: Receive, send: Send, route: ApiRoute) -> None:
        """One ASGI request of a completion route."""
        client_request = ClientRequest(scope, receive, send)
        client_request.closing = self._pools.draining
        self.active.add(client_request)
        self.idle.clear()
        try:
            await self.serve(client_request, route)
        except RequestFailed as failed:
            await client_request.send_error(failed.response)
        except RequestStopped as stopped:
            await self._end_stopped(client_request, stopped.cause)
        finally:
            self.active.discard(client_request)
            if not self.active:
                self.idle.set()

    async def _end_stopped(self, client_request: ClientRequest, cause: StopCause) -> None:
        if cause is StopCause.CLIENT_GONE:
            return
        if cause is StopCause.CLIENT_STALLED or client_request.sending_since is not None:
            # It does not read, so an error would not reach it either.
            await client_request.abort()
            return
        late = cause is StopCause.TIMEOUT
        limit = self._settings.request_timeout
        await client_request.send_error(error_responses.timed_out(limit) if late else error_responses.going_away())

    async def watch_clients(self) -> None:
        """Stops the requests of clients that take nothing, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            now = self._clock()
            for client_request in [sending for sending in self.active if sending.sending_since is not None]:
                if client_request.is_stalled(now, self._settings.stall_timeout):
                    client_request.stop(StopCause.CLIENT_STALLED)


def _dispatch_headers(boot_id: str, grant: Grant, caller: Caller) -> dict[str, str]:
    """What the gateway tells the runtime about a request."""
    headers = {
        PRIORITY: str(grant.priority),
        CLASS: grant.request.priority_class.name,
        DISPATCH: f"{boot_id}:{grant.number}",
        WANT_USAGE: "1",
    }
    return headers if caller.tenant is None else {**headers, TENANT: caller.tenant}


def _is_retry(client_request: ClientRequest) -> bool:
    count = client_request.headers.get(b"x-stainless-retry-count", b"")
    return count.isdigit() and int(count[:9]) > 0
