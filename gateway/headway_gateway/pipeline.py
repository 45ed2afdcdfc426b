"""The path of a request: authenticate, classify, admit, wait for a grant, send to the replica chosen, stream, account.

`Pipeline.serve` is that path in one piece. What surrounds it only makes sure that every way out answers the client and
closes the books.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from headway_core.contract.header_names import CLASS
from headway_core.errors import RequestError
from headway_core.json_document import LARGE_BYTES

from headway_gateway import error_responses, parsed_request
from headway_gateway.accounting import RequestRecord
from headway_gateway.body_budget import BodyBudget, BodyReservation
from headway_gateway.client_request import ClientRequest, Receive, RequestStopped, Scope, Send, StopCause
from headway_gateway.dispatcher import Grant
from headway_gateway.error_responses import ErrorResponse, RequestFailed
from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.keys import ANYBODY, Caller, KeyRing
from headway_gateway.parsed_request import ParsedRequest
from headway_gateway.pools import Pools, ServedPool
from headway_gateway.relay import Relay, UpstreamAttempt
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream, forwarded

MAX_ATTEMPTS = 3
"""Replicas that are tried when nobody even takes the request."""
MAX_RESETS = 2
"""Tries of a request whose replica broke off under it: it may be the request that breaks them."""


class Pipeline:
    """Serves requests of the two completion routes. `keys` gives the ring in force; None: everybody may ask."""

    def __init__(
        self, settings: Settings, pools: Pools, upstream: Upstream, keys: Callable[[], KeyRing | None]
    ) -> None:
        self.active: set[ClientRequest] = set()
        """Every request that is under way, for the drain and the watch over stalled clients."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self.body_budget = BodyBudget(settings.max_queue_bytes)
        self._settings = settings
        self._pools = pools
        self._keys = keys
        self._relay = Relay(upstream, settings.first_byte_hold)
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")

    # ------------------------------------------------------------ the path

    async def serve(self, client_request: ClientRequest, endpoint: parsed_request.ApiRoute) -> None:
        """The path of one request.

        Raises:
            RequestFailed: it ends early, with this answer.
            RequestStopped: the client left, or the time is over.
        """
        settings, pools = self._settings, self._pools
        try:
            caller = self.authenticate(client_request)
            with BodyReservation(self.body_budget) as reservation:
                body = await client_request.read_body(settings.max_body_bytes, settings.body_timeout, reservation)
                parsed = await self._read(client_request, endpoint, body)
            pool = pools.serving(parsed.model)
            pool.check_length(parsed)
            priority_class = pool.classify(parsed, caller, self._class_header(client_request))
        except RequestError as error:
            refused = RequestFailed(error_responses.bad_request(error))
            self._count_unclassified(refused)
            raise refused from error
        except (RequestFailed, RequestStopped) as error:
            # Not "from" itself: a cycle would keep what the frames hold, the body above all, until some collection of
            # garbage.
            self._count_unclassified(error)
            raise
        request = pool.request(
            pools.next_number(),
            parsed,
            priority_class,
            caller,
            arrival=client_request.arrival,
            retry=_is_retry(client_request),
        )
        with pool.record(request, parsed) as record, client_request.until(settings.request_timeout):
            grant = await pool.dispatcher.acquire(request, record.set_queued)
            while True:
                record.admitted()
                try:
                    with grant:
                        await self._attempt(
                            grant, pool, parsed, caller=caller, client_request=client_request, record=record
                        )
                    return
                except UpstreamError as error:
                    tried = self._may_go_on(pool, grant, error, client_request)
                grant = await pool.dispatcher.reacquire(request, tried, record.set_queued)

    async def _read(
        self, client_request: ClientRequest, endpoint: parsed_request.ApiRoute, body: bytes
    ) -> ParsedRequest:
        """Large bodies are read aside, one after another, so that they keep only each other waiting; not those whose
        client has left.

        Raises RequestError, RequestStopped.
        """
        if len(body) < LARGE_BYTES:
            return parsed_request.parse(endpoint, body)
        with client_request.until(self._settings.request_timeout):
            return await asyncio.get_running_loop().run_in_executor(self._large, parsed_request.parse, endpoint, body)

    def close(self) -> None:
        """Gives the thread back; what it has not begun is not read any more."""
        self._large.shutdown(wait=False, cancel_futures=True)

    def authenticate(self, client_request: ClientRequest) -> Caller:
        """Who asks. Raises RequestFailed with 401 when keys are in force and none of them was shown."""
        ring = self._keys()
        if ring is None:
            return ANYBODY
        caller = ring.caller(client_request.headers.get(b"authorization"))
        if caller is None:
            raise RequestFailed(error_responses.unauthorized())
        return caller

    async def _attempt(
        self,
        grant: Grant,
        pool: ServedPool,
        parsed: ParsedRequest,
        *,
        caller: Caller,
        client_request: ClientRequest,
        record: RequestRecord,
    ) -> None:
        """Sends the request to the replica of `grant` and relays the answer; what is learned goes to the pool."""
        address = pool.replicas.address_of(grant.replica_id)
        if address is None:
            raise UpstreamError(UpstreamFailure.CONNECT, "it has just gone")
        attempt = UpstreamAttempt(
            address=address,
            path=parsed.endpoint.value,
            body=parsed.body,
            headers=forwarded(client_request.headers.items(), client_request.request_id, pool.headers(grant, caller)),
            client_request=client_request,
            record=record,
            first_token=lambda: pool.add_prediction_errors(grant.first_token()),
            heard=lambda hint: pool.replicas.hint(grant.replica_id, hint),
        )
        try:
            await self._relay.run(attempt)
        except UpstreamError as error:
            # A closed keep-alive connection says nothing about the health of whoever closed it, nor does going away.
            grant.failed = error.failure in (UpstreamFailure.CONNECT, UpstreamFailure.RESET)
            if error.failure in (UpstreamFailure.CONNECT, UpstreamFailure.REFUSED):
                pool.replicas.refused(grant.replica_id, listens=error.failure is UpstreamFailure.REFUSED)
            raise
        finally:
            if attempt.prompt_tokens is not None and parsed.token_ids is None:
                pool.estimator.observe(pool.name, parsed.text, attempt.prompt_tokens)
        grant.failed = attempt.status >= 500
        if not grant.failed:
            now = asyncio.get_running_loop().time()
            pool.admission.fleet.outliers.success(grant.replica_id, now)
            pool.failures.succeeded(grant.replica_id, now)

    def _may_go_on(
        self, pool: ServedPool, grant: Grant, error: UpstreamError, client_request: ClientRequest
    ) -> list[str]:
        """The replicas not to try again, if another try is allowed.

        Raises:
            RequestFailed: it is not: something was already sent to the client, or enough replicas were tried.
        """
        if grant.failed:
            pool.failures.failed(
                grant.replica_id, error, client_request.request_id.decode("latin-1"), asyncio.get_running_loop().time()
            )
        if client_request.started:
            raise RequestFailed(error_responses.upstream_failed(), "upstream_error") from error
        client_request.failed_attempts.append((grant.replica_id, error.failure))
        failures = [failure for _, failure in client_request.failed_attempts]
        if (
            failures.count(UpstreamFailure.STALE) > 1
            or failures.count(UpstreamFailure.RESET) >= MAX_RESETS
            or len(failures) > MAX_ATTEMPTS
        ):
            raise RequestFailed(error_responses.upstream_failed(), "upstream_error") from error
        return [replica for replica, failure in client_request.failed_attempts if failure is not UpstreamFailure.STALE]

    def _class_header(self, client_request: ClientRequest) -> str | None:
        if not self._settings.trust_class_header:
            return None
        value = client_request.headers.get(CLASS.encode())
        return None if value is None else value.decode("latin-1")

    def _count_unclassified(self, error: RequestFailed | RequestStopped) -> None:
        """Books a request that ended before its pool and class were known."""
        outcome = _STOPPED.get(error.cause, "client_closed") if isinstance(error, RequestStopped) else error.outcome
        self._pools.unclassified.offered += 1
        self._pools.unclassified.outcomes[outcome] += 1

    # ------------------------------------------------------------ around it

    async def handle(self, scope: Scope, receive: Receive, send: Send, endpoint: parsed_request.ApiRoute) -> None:
        """One ASGI request of a completion route."""
        client_request = ClientRequest(scope, receive, send)
        client_request.closing = self._pools.draining
        self.active.add(client_request)
        self.idle.clear()
        try:
            await self.serve(client_request, endpoint)
        except RequestFailed as refused:
            await client_request.answer(refused.response)
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
            # It does not read: no answer would arrive either.
            await client_request.abort()
            return
        await client_request.answer(self._stop_response(cause))

    def _stop_response(self, cause: StopCause) -> ErrorResponse:
        if cause is StopCause.TIMEOUT:
            return error_responses.timed_out(self._settings.request_timeout)
        return error_responses.going_away()

    async def watch_clients(self) -> None:
        """Cuts off clients that take nothing, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for client_request in [
                client_request for client_request in self.active if client_request.sending_since is not None
            ]:
                if client_request.is_stalled(now, self._settings.stall_timeout):
                    client_request.stop(StopCause.CLIENT_STALLED)


_STOPPED = {StopCause.TIMEOUT: "timeout", StopCause.DRAIN: "shed"}
"""Outcomes of requests that are stopped before their pool is known, but by their clients."""


def _is_retry(client_request: ClientRequest) -> bool:
    count = client_request.headers.get(b"x-stainless-retry-count", b"")
    return count.isdigit() and int(count[:9]) > 0
