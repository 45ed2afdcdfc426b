"""The two generating routes: read, validate, hand to the replica, respond whole or as a stream, notice a disconnect.

Raw ASGI, because a framework's request objects and middleware hide the disconnect: here one task per request waits for
it. A stream's status goes out with its first content, so an earlier failure gets the same status as without streaming.
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
from headway_runtime.server.api.errors import ApiError
from headway_runtime.server.api.generation_request import GenerationRequest
from headway_runtime.server.api.request_body import ClientDisconnected, linger, read_body, wait_for_disconnect
from headway_runtime.server.api.request_headers import RequestHeaders, dispatch_of, read_headers, request_id_of
from headway_runtime.server.api.response_encoder import ResponseEncoder
from headway_runtime.server.generation import Generation
from headway_runtime.server.replica import Replica

log = logging.getLogger("headway.requests")

_Result = TypeVar("_Result")


class GenerateRoute:
    """One endpoint: `parse` reads its bodies, `encoder` writes its responses."""

    def __init__(
        self, replica: Replica, parse: Callable[[dict[str, Any]], GenerationRequest], encoder: type[ResponseEncoder]
    ) -> None:
        self._replica = replica
        self._parse = parse
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        arrival = time.monotonic()
        writer = ResponseWriter(request_id_of(scope["headers"]), receive, send, self._replica)
        status = 499
        try:
            status = await self._serve(scope, receive, writer, arrival)
        except ApiError as error:
            status = error.status
            with contextlib.suppress(ClientDisconnected):
                await writer.fail(error)
        except ClientDisconnected:
            pass
        except Exception:
            log.exception("a request failed through a fault of the server")
            status = 500
            with contextlib.suppress(ClientDisconnected):
                await writer.fail(errors.internal())
        finally:
            if self._replica.settings.log_requests:
                log.info("%s %s %d in %.3f s", writer.request_id, scope["path"], status, time.monotonic() - arrival)

    async def _serve(self, scope: Scope, receive: Receive, writer: ResponseWriter, arrival: float) -> int:
        """Returns the status for the log: 200, or 499 when the client disconnected."""
        replica = self._replica
        settings = replica.settings
        disconnect: asyncio.Task[None] | None = None
        generation: Generation | None = None
        try:
            try:
                replica.check_accepting()
                headers = read_headers(scope["headers"])
                body = await read_body(receive, headers.content_length, settings.max_body_bytes, settings.body_timeout)
                disconnect = asyncio.create_task(wait_for_disconnect(receive))
                request, generation = await self._accept(body, headers, arrival, disconnect)
            except RequestError as error:
                raise errors.bad_request(error) from None
            finally:
                replica.record_dispatch(dispatch_of(scope["headers"]))
            del body  # Megabytes, perhaps, for as long as the response takes.
            disconnect.add_done_callback(generation.disconnect_unless_cancelled)
            encoder = self._encoder(
                replica.model_name, logprobs=request.params.logprobs is not None, include_usage=request.include_usage
            )
            if request.stream:
                await _stream(writer, generation, encoder, headers, settings.quiet_stream_seconds)
            else:
                await _whole(writer, generation, encoder)
            return 499 if generation.disconnected else 200
        finally:
            if disconnect is not None:
                disconnect.cancel()
            if generation is not None:
                replica.release(generation)

    async def _accept(
        self, body: bytes, headers: RequestHeaders, arrival: float, disconnect: asyncio.Task[None]
    ) -> tuple[GenerationRequest, Generation]:
        """Parses the body and hands the request to the replica. Raises ApiError, ClientDisconnected, RequestError.

        Large bodies wait for each other; a large body is not parsed any more once its client has disconnected.
        """
        if len(body) < LARGE_BYTES:
            request = self._parse_body(body)
            return request, await self._replica.accept(request, headers, arrival, large=False)
        parsing = self._replica.run_in_thread(self._parse_body, body, large=True)
        request = await _unless_disconnected(disconnect, parsing)
        accepting = self._replica.accept(request, headers, arrival, large=True)
        return request, await _unless_disconnected(disconnect, accepting)

    def _parse_body(self, body: bytes) -> GenerationRequest:
        return self._parse(parse_object(body))


class ResponseWriter:
    """Sends one response: `start` and `write`, or `respond`, or `fail`, whose form depends on what was sent."""

    def __init__(self, request_id: str, receive: Receive, send: Send, replica: Replica) -> None:
        self.request_id = request_id
        self._receive = receive
        self._send = send
        self._replica = replica
        self.started = False
        """Status and headers were sent."""
        self.trailer = b""
        """Bytes in front of the event that ends a failed stream."""

    async def start(self, status: int, content_type: bytes, extra: errors.Headers = (), *, close: bool = False) -> None:
        """Status and headers."""
        headers = [
            (b"content-type", content_type),
            (header_names.REQUEST_ID.encode(), self.request_id.encode()),
            *extra,
            *self._replica.load_headers(),
        ]
        if close or self._replica.closes_connections:
            headers.append((b"connection", b"close"))
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, more: bool) -> None:
        """A part of the body, the last one unless `more`.

        Raises ClientDisconnected when the client reads nothing for `stalled_client_seconds`.
        """
        seconds = self._replica.settings.stalled_client_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            log.warning("%s: the client read nothing for %g s and is dropped", self.request_id, seconds)
            raise ClientDisconnected from None

    async def respond(self, status: int, body: bytes, extra: errors.Headers = ()) -> None:
        """A complete JSON response."""
        await self.start(status, b"application/json", [(b"content-length", b"%d" % len(body)), *extra])
        await self.write(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """An error: a response of its own or, when a stream has started, its last event."""
        body = error.body()
        if self.started:
            await self.write(self.trailer + b"data: " + body + b"\n\n", more=False)
            return
        headers = [(b"content-length", b"%d" % len(body)), *error.headers]
        await self.start(error.status, b"application/json", headers, close=error.close)
        if error.close:
            await self.write(body, more=True)
            await linger(self._receive)
            body = b""
        await self.write(body, more=False)


async def _whole(writer: ResponseWriter, generation: Generation, encoder: ResponseEncoder) -> None:
    while not generation.done:
        generation.changed.clear()
        await generation.changed.wait()
    if generation.disconnected:
        return
    if generation.error is not None:
        raise generation.error
    deltas = [choice.take_whole() for choice in generation.choices]
    await writer.respond(200, encoder.whole(deltas, generation.usage), _token_headers(generation))


async def _stream(
    writer: ResponseWriter,
    generation: Generation,
    encoder: ResponseEncoder,
    headers: RequestHeaders,
    quiet_seconds: float,
) -> None:
    """Writes chunks as they come about; after `quiet_seconds` without any an empty chunk, so that no proxy gives up."""
    opened: set[int] = set()
    done = False
    while not done:
        if generation.disconnected:
            return
        if generation.error is not None:
            writer.trailer = _usage_comment(generation) if headers.want_usage else b""
            raise generation.error
        chunks = _chunks(generation, encoder, opened)
        done = generation.done
        if done:
            comment = _usage_comment(generation) if headers.want_usage else b""
            chunks += [encoder.usage_chunk(generation.usage), comment, b"data: [DONE]\n\n"]
        elif not chunks:
            if await _changed_within(generation, quiet_seconds):
                continue
            first = generation.choices[0].index
            opening = b"" if first in opened else encoder.first_chunk(first)
            chunks = [opening or encoder.empty_chunk(first)]
            opened.add(first)
        if not writer.started:
            extra = [*_STREAM_HEADERS, *_token_headers(generation)]
            await writer.start(200, b"text/event-stream; charset=utf-8", extra)
        await writer.write(b"".join(chunks), more=not done)


def _chunks(generation: Generation, encoder: ResponseEncoder, opened: set[int]) -> list[bytes]:
    """Chunks of the choices' new text; before a choice's first one its `first_chunk`."""
    chunks: list[bytes] = []
    for choice in generation.choices:
        delta = choice.take_delta()
        if delta is None:
            continue
        if choice.index not in opened:
            opened.add(choice.index)
            chunks.append(encoder.first_chunk(choice.index))
        chunks.append(encoder.chunk(choice.index, delta))
    return chunks


_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


async def _changed_within(generation: Generation, seconds: float) -> bool:
    """Whether `generation.changed` was set within `seconds`."""
    generation.changed.clear()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    # A timer that sets the event costs a fraction of what asyncio.wait_for does, and this runs once for each token.
    timer = loop.call_at(deadline, generation.changed.set)
    await generation.changed.wait()
    timer.cancel()
    return loop.time() < deadline


async def _unless_disconnected(disconnect: asyncio.Task[None], work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is cancelled when the client disconnects first. Raises ClientDisconnected."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()


def _token_headers(generation: Generation) -> errors.Headers:
    headers = [(header_names.PROMPT_TOKENS.encode(), b"%d" % generation.prompt_tokens)]
    if generation.cached_tokens is not None:
        headers.append((header_names.CACHED_TOKENS.encode(), b"%d" % generation.cached_tokens))
    return headers


def _usage_comment(generation: Generation) -> bytes:
    """A comment line joined to the event after it: an event of comments alone makes some SDKs parse empty data."""
    usage = generation.usage
    counts = {"prompt": usage.prompt, "cached": usage.cached, "completion": usage.completion}
    return header_names.USAGE_COMMENT.encode() + json.dumps(counts, separators=(",", ":")).encode() + b"\n"
