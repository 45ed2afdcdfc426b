"""The path of a request: authenticate, classify, admit, wait for a turn, send to the replica chosen, stream, account.

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
from headway_gateway.error_responses import ErrorResponse, RequestRejected
from headway_gateway.http_connection import UpstreamError, UpstreamFailure
from headway_gateway.keys import ANYBODY, Caller, KeyRing
from headway_gateway.parsed_request import ParsedRequest
from headway_gateway.pools import Pools, ServedPool
from headway_gateway.relay import Relay, UpstreamAttempt
from headway_gateway.settings import Settings
from headway_gateway.upstream import Upstream, forwarded

MOST_CONNECTS = 3
"""Replicas that are tried when nobody even takes the request."""
MOST_BREAKS = 2
"""Tries of a request whose replica broke off under it: it may be the request that breaks them."""


class Pipeline:
    """Serves requests of the two completion routes. `keys` gives the ring in force; None: everybody may ask."""

    def __init__(
        self, settings: Settings, pools: Pools, upstream: Upstream, keys: Callable[[], KeyRing | None]
    ) -> None:
        self.open: set[ClientRequest] = set()
        """Every exchange that is under way, for the drain and the watch over stalled clients."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self.body_room = BodyBudget(settings.max_queue_bytes)
        self._settings = settings
        self._pools = pools
        self._keys = keys
        self._relay = Relay(upstream, settings.first_byte_hold)
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")

    # ------------------------------------------------------------ the path

    async def serve(self, exchange: ClientRequest, endpoint: parsed_request.ApiRoute) -> None:
        """The path of one request.

        Raises:
            Refused: it ends early, with this answer.
            Stopped: the client left, or the time is over.
        """
        settings, pools = self._settings, self._pools
        try:
            caller = self.authenticate(exchange)
            with BodyReservation(self.body_room) as place:
                body = await exchange.read_body(settings.max_body_bytes, settings.body_timeout, place)
                asked = await self._read(exchange, endpoint, body)
            pool = pools.serving(asked.model)
            pool.check_length(asked)
            slo = pool.classify(asked, caller, self._class_header(exchange))
        except RequestError as error:
            refused = RequestRejected(error_responses.bad_request(error))
            self._book_unplaced(refused)
            raise refused from error
        except (RequestRejected, RequestStopped) as error:
            # Not "from" itself: a cycle would keep what the frames hold, the body above all, until some collection of
            # garbage.
            self._book_unplaced(error)
            raise
        request = pool.request(
            pools.next_number(), asked, slo, caller, arrival=exchange.arrival, retry=_is_retry(exchange)
        )
        with pool.ticket(request, asked) as ticket, exchange.until(settings.request_timeout):
            turn = await pool.dispatcher.turn(request, ticket.waits)
            while True:
                ticket.admitted()
                try:
                    with turn:
                        await self._try(turn, pool, asked, caller=caller, exchange=exchange, ticket=ticket)
                    return
                except UpstreamError as error:
                    tried = self._may_go_on(pool, turn, error, exchange)
                turn = await pool.dispatcher.another(request, tried, ticket.waits)

    async def _read(self, exchange: ClientRequest, endpoint: parsed_request.ApiRoute, body: bytes) -> ParsedRequest:
        """Large bodies are read aside, one after another, so that they keep only each other waiting; not those whose
        client has left.

        Raises RequestError, Stopped.
        """
        if len(body) < LARGE_BYTES:
            return parsed_request.parse(endpoint, body)
        with exchange.until(self._settings.request_timeout):
            return await asyncio.get_running_loop().run_in_executor(self._large, parsed_request.parse, endpoint, body)

    def close(self) -> None:
        """Gives the thread back; what it has not begun is not read any more."""
        self._large.shutdown(wait=False, cancel_futures=True)

    def authenticate(self, exchange: ClientRequest) -> Caller:
        """Who asks. Raises Refused with 401 when keys are in force and none of them was shown."""
        ring = self._keys()
        if ring is None:
            return ANYBODY
        caller = ring.caller(exchange.headers.get(b"authorization"))
        if caller is None:
            raise RequestRejected(error_responses.unauthorized())
        return caller

    async def _try(
        self,
        turn: Grant,
        pool: ServedPool,
        asked: ParsedRequest,
        *,
        caller: Caller,
        exchange: ClientRequest,
        ticket: RequestRecord,
    ) -> None:
        """Sends the request to the replica of `turn` and relays the answer; what is learned goes to the pool."""
        place = pool.replicas.place(turn.replica)
        if place is None:
            raise UpstreamError(UpstreamFailure.CONNECT, "it has just gone")
        attempt = UpstreamAttempt(
            place=place,
            path=asked.endpoint.value,
            body=asked.body,
            headers=forwarded(exchange.headers.items(), exchange.request_id, pool.headers(turn, caller)),
            exchange=exchange,
            ticket=ticket,
            first_token=lambda: pool.compared(turn.first_token()),
            heard=lambda hint: pool.replicas.hint(turn.replica, hint),
        )
        try:
            await self._relay.run(attempt)
        except UpstreamError as error:
            # A closed keep-alive connection says nothing about the health of whoever closed it, nor does going away.
            turn.failed = error.failure in (UpstreamFailure.CONNECT, UpstreamFailure.RESET)
            if error.failure in (UpstreamFailure.CONNECT, UpstreamFailure.REFUSED):
                pool.replicas.refused(turn.replica, listens=error.failure is UpstreamFailure.REFUSED)
            raise
        finally:
            if attempt.prompt_tokens is not None and asked.token_ids is None:
                pool.estimator.observe(pool.name, asked.text, attempt.prompt_tokens)
        turn.failed = attempt.status >= 500
        if not turn.failed:
            now = asyncio.get_running_loop().time()
            pool.door.fleet.outliers.success(turn.replica, now)
            pool.failures.succeeded(turn.replica, now)

    def _may_go_on(self, pool: ServedPool, turn: Grant, error: UpstreamError, exchange: ClientRequest) -> list[str]:
        """The replicas not to try again, if another try is allowed.

        Raises:
            Refused: it is not: something was already sent to the client, or enough replicas were tried.
        """
        if turn.failed:
            pool.failures.failed(
                turn.replica, error, exchange.request_id.decode("latin-1"), asyncio.get_running_loop().time()
            )
        if exchange.started:
            raise RequestRejected(error_responses.upstream_failed(), "upstream_error") from error
        exchange.tries.append((turn.replica, error.failure))
        failures = [failure for _, failure in exchange.tries]
        if (
            failures.count(UpstreamFailure.STALE) > 1
            or failures.count(UpstreamFailure.RESET) >= MOST_BREAKS
            or len(failures) > MOST_CONNECTS
        ):
            raise RequestRejected(error_responses.upstream_failed(), "upstream_error") from error
        return [replica for replica, failure in exchange.tries if failure is not UpstreamFailure.STALE]

    def _class_header(self, exchange: ClientRequest) -> str | None:
        if not self._settings.trust_class_header:
            return None
        value = exchange.headers.get(CLASS.encode())
        return None if value is None else value.decode("latin-1")

    def _book_unplaced(self, error: RequestRejected | RequestStopped) -> None:
        """Books a request that ended before its pool and class were known."""
        outcome = _STOPPED.get(error.cause, "client_closed") if isinstance(error, RequestStopped) else error.outcome
        self._pools.unplaced.offered += 1
        self._pools.unplaced.outcomes[outcome] += 1

    # ------------------------------------------------------------ around it

    async def handle(self, scope: Scope, receive: Receive, send: Send, endpoint: parsed_request.ApiRoute) -> None:
        """One ASGI request of a completion route."""
        exchange = ClientRequest(scope, receive, send)
        exchange.closing = self._pools.draining
        self.open.add(exchange)
        self.idle.clear()
        try:
            await self.serve(exchange, endpoint)
        except RequestRejected as refused:
            await exchange.answer(refused.answer)
        except RequestStopped as stopped:
            await self._stopped(exchange, stopped.cause)
        finally:
            self.open.discard(exchange)
            if not self.open:
                self.idle.set()

    async def _stopped(self, exchange: ClientRequest, cause: StopCause) -> None:
        if cause is StopCause.CLIENT_GONE:
            return
        if cause is StopCause.CLIENT_STALLED or exchange.sending_since is not None:
            # It does not read: no answer would arrive either.
            await exchange.abort()
            return
        await exchange.answer(self._last_words(cause))

    def _last_words(self, cause: StopCause) -> ErrorResponse:
        if cause is StopCause.TIMEOUT:
            return error_responses.timed_out(self._settings.request_timeout)
        return error_responses.going_away()

    async def watch_clients(self) -> None:
        """Cuts off clients that take nothing, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            now = loop.time()
            for exchange in [exchange for exchange in self.open if exchange.sending_since is not None]:
                if exchange.is_stalled(now, self._settings.stall_timeout):
                    exchange.stop(StopCause.CLIENT_STALLED)


_STOPPED = {StopCause.TIMEOUT: "timeout", StopCause.DRAIN: "shed"}
"""Outcomes of requests that are stopped before their pool is known, but by their clients."""


def _is_retry(exchange: ClientRequest) -> bool:
    count = exchange.headers.get(b"x-stainless-retry-count", b"")
    return count.isdigit() and int(count[:9]) > 0
