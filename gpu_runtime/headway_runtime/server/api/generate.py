"""The two generating routes, as raw ASGI: read, validate, hand to the replica, answer whole or as a stream, notice a
client that leaves.

Raw, because a framework's request objects and middleware hide the disconnect: here one task per request waits for
nothing else. A stream's status goes out with its first content, so everything that fails before that is answered with
the same status as without streaming.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headway_core.contract import header_names
from headway_core.errors import RequestError
from headway_core.json_document import LARGE_BYTES, parse_object
from starlette.types import Receive, Scope, Send

from headway_runtime.server.api import errors
from headway_runtime.server.api.answer import ResponseFormatter, ResponseLayout
from headway_runtime.server.api.body import ClientGone, linger, read_body, until_gone
from headway_runtime.server.api.errors import ApiError
from headway_runtime.server.api.generation_request import GenerationRequest
from headway_runtime.server.api.request_headers import RequestHeaders, dispatch_of, read_headers, request_id_of
from headway_runtime.server.generation import Generation
from headway_runtime.server.replica import Replica

log = logging.getLogger("headway.requests")

_Result = TypeVar("_Result")


class GenerateRoute:
    """One endpoint: `parse` its bodies, lay its answers out as `layout`."""

    def __init__(
        self, replica: Replica, parse: Callable[[dict[str, Any]], GenerationRequest], layout: ResponseLayout
    ) -> None:
        self._replica = replica
        self._parse = parse
        self._layout = layout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        started = time.monotonic()
        exchange = ResponseWriter(scope, receive, send, self._replica)
        status = 499
        try:
            status = await self._serve(exchange, started)
        except ApiError as error:
            status = error.status
            with contextlib.suppress(ClientGone):
                await exchange.refuse(error)
        except ClientGone:
            pass
        except Exception:
            log.exception("a request failed for a reason that is ours")
            status = 500
            with contextlib.suppress(ClientGone):
                await exchange.refuse(errors.internal())
        finally:
            if self._replica.settings.log_requests:
                log.info("%s %s %d in %.3f s", exchange.request_id, scope["path"], status, time.monotonic() - started)

    async def _serve(self, exchange: ResponseWriter, arrival: float) -> int:
        replica = self._replica
        settings = replica.settings
        leaving: asyncio.Task[None] | None = None
        generation: Generation | None = None
        try:
            try:
                replica.check_open()
                headers = read_headers(exchange.scope["headers"])
                body = await read_body(
                    exchange.receive, headers.content_length, settings.max_body_bytes, settings.body_timeout
                )
                leaving = asyncio.create_task(until_gone(exchange.receive))
                request, generation = await self._accept(body, headers, arrival, leaving)
            except RequestError as error:
                raise errors.bad_request(error) from None
            finally:
                replica.saw_dispatch(dispatch_of(exchange.scope["headers"]))
            del body  # Megabytes, perhaps, for as long as the answer takes.
            leaving.add_done_callback(generation.leave_unless_cancelled)
            logprobs = request.params.logprobs is not None
            answer = ResponseFormatter(
                self._layout, replica.model_name, logprobs=logprobs, include_usage=request.include_usage
            )
            if request.stream:
                await _stream(exchange, generation, answer, headers, settings.quiet_stream_seconds)
            else:
                await _whole(exchange, generation, answer)
            return 499 if generation.gone else 200
        finally:
            if leaving is not None:
                leaving.cancel()
            if generation is not None:
                replica.release(generation)

    async def _accept(
        self, body: bytes, headers: RequestHeaders, arrival: float, leaving: asyncio.Task[None]
    ) -> tuple[GenerationRequest, Generation]:
        """Large bodies wait for each other; one whose client leaves meanwhile is not read any more. Raises ClientGone,
        RequestError."""
        if len(body) < LARGE_BYTES:
            request = self._read(body)
            return request, await self._replica.accept(request, headers, arrival, large=False)
        request = await _while_there(leaving, self._replica.aside(self._read, body, large=True))
        return request, await _while_there(leaving, self._replica.accept(request, headers, arrival, large=True))

    def _read(self, body: bytes) -> GenerationRequest:
        return self._parse(parse_object(body))


class ResponseWriter:
    """One request and the answer to it: what has gone out already decides what may still be said."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, replica: Replica) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._replica = replica
        self.request_id = request_id_of(scope["headers"])
        self.begun = False
        self.trailer = b""
        """What goes in front of the record that ends a broken stream."""

    async def begin(self, status: int, content_type: bytes, extra: errors.Headers = (), *, close: bool = False) -> None:
        """Status and headers."""
        headers = [
            (b"content-type", content_type),
            (header_names.REQUEST_ID.encode(), self.request_id.encode()),
            *extra,
            *self._replica.response_headers(),
        ]
        if close or self._replica.closing:
            headers.append((b"connection", b"close"))
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        """A part of the body, the last one unless `more`. Raises ClientGone when the client takes nothing for too
        long."""
        seconds = self._replica.settings.stalled_client_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            log.warning("%s: the client took nothing for %g s and is dropped", self.request_id, seconds)
            raise ClientGone from None

    async def whole(self, status: int, body: bytes, extra: errors.Headers = ()) -> None:
        """A complete JSON answer."""
        await self.begin(status, b"application/json", [(b"content-length", b"%d" % len(body)), *extra])
        await self.write(body, more=False)

    async def refuse(self, error: ApiError) -> None:
        """An error, as an answer of its own or, when a stream has begun, as its last record."""
        body = error.body()
        if self.begun:
            await self.write(self.trailer + b"data: " + body + b"\n\n", more=False)
            return
        await self.begin(
            error.status,
            b"application/json",
            [(b"content-length", b"%d" % len(body)), *error.headers],
            close=error.close,
        )
        if error.close:
            await self.write(body, more=True)
            await linger(self.receive)
            body = b""
        await self.write(body, more=False)


async def _whole(exchange: ResponseWriter, generation: Generation, answer: ResponseFormatter) -> None:
    while not generation.done:
        generation.changed.clear()
        await generation.changed.wait()
    if generation.gone:
        return
    if generation.failure is not None:
        raise generation.failure
    pieces = [choice.take_all() for choice in generation.choices]
    await exchange.whole(200, answer.whole(pieces, generation.usage), _token_headers(generation))


async def _stream(
    exchange: ResponseWriter,
    generation: Generation,
    answer: ResponseFormatter,
    headers: RequestHeaders,
    quiet_seconds: float,
) -> None:
    """Writes records as they come about. After `quiet_seconds` without any it writes one that says nothing, so that no
    proxy gives up."""
    opened: set[int] = set()
    done = False
    while not done:
        if generation.gone:
            return
        if generation.failure is not None:
            exchange.trailer = _usage_comment(generation) if headers.want_usage else b""
            raise generation.failure
        records = _news(generation, answer, opened)
        done = generation.done
        if done:
            records += [
                answer.usage(generation.usage),
                _usage_comment(generation) if headers.want_usage else b"",
                b"data: [DONE]\n\n",
            ]
        elif not records:
            if await _changes_within(generation, quiet_seconds):
                continue
            first = generation.choices[0].index
            records = [
                answer.keep_alive(first) if first in opened else answer.opening(first) or answer.keep_alive(first)
            ]
            opened.add(first)
        if not exchange.begun:
            await exchange.begin(
                200, b"text/event-stream; charset=utf-8", [*_STREAM_HEADERS, *_token_headers(generation)]
            )
        await exchange.write(b"".join(records), more=not done)


def _news(generation: Generation, answer: ResponseFormatter, opened: set[int]) -> list[bytes]:
    """Records of what the choices have gained; the first of a choice comes after its opening."""
    records: list[bytes] = []
    for choice in generation.choices:
        piece = choice.take_news()
        if piece is None:
            continue
        if choice.index not in opened:
            opened.add(choice.index)
            records.append(answer.opening(choice.index))
        records.append(answer.growing(choice.index, piece))
    return records


_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


async def _changes_within(generation: Generation, seconds: float) -> bool:
    """Whether anything happens to the request in time."""
    generation.changed.clear()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    # A timer that sets the event costs a fraction of what asyncio.wait_for does, and this runs once for each token.
    timer = loop.call_at(deadline, generation.changed.set)
    await generation.changed.wait()
    timer.cancel()
    return loop.time() < deadline


async def _while_there(leaving: asyncio.Task[None], work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is given up when the client leaves first. Raises ClientGone."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()


def _token_headers(generation: Generation) -> errors.Headers:
    headers = [(header_names.PROMPT_TOKENS.encode(), b"%d" % generation.prompt_tokens)]
    if generation.cached_tokens is not None:
        headers.append((header_names.CACHED_TOKENS.encode(), b"%d" % generation.cached_tokens))
    return headers


def _usage_comment(generation: Generation) -> bytes:
    """A comment line glued to the record after it: a record of comments alone makes some SDKs parse empty data."""
    usage = generation.usage
    figures = {"prompt": usage.prompt, "cached": usage.cached, "completion": usage.completion}
    return header_names.USAGE_COMMENT.encode() + json.dumps(figures, separators=(",", ":")).encode() + b"\n"
