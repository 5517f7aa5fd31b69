"""The server's paths: completions, chat completions, models, health and metrics."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.data.tokenizer import TokenizationError
from penstock.engine.generation.requests import TokenDelta
from penstock.io.files import parse_json
from penstock.serve.asked import CompletionRequest, ServedModel, read_chat, read_completion
from penstock.serve.mailboxes import QUEUE_FULL, Mailbox, Mailboxes
from penstock.serve.metrics import CONTENT_TYPE, ServerMetrics
from penstock.serve.refusals import RefusalError, invalid, json_response, json_text, quoted, refusal_response
from penstock.serve.replies import Reply

_SHORT_BYTES = 1 << 14
"""The longest body of a short request, whose prompt is read in some hundredths of a second."""
_BODY_S = 30.0
"""Seconds that a client may take to send the body of a request."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ServerParts:
    """The parts that all paths share. key: None if clients need none; unread: requests that are not read yet."""

    model: ServedModel
    mailboxes: Mailboxes
    metrics: ServerMetrics
    key: str | None
    unread: set[Request] = field(default_factory=set)
    #: held while a short or a long request is read
    turns: tuple[asyncio.Lock, asyncio.Lock] = field(default_factory=lambda: (asyncio.Lock(), asyncio.Lock()))


def application(parts: ServerParts) -> Starlette:
    paths = [
        _path(parts, "/health", _health, "GET"),
        _path(parts, "/metrics", _metrics, "GET"),
        _path(parts, "/v1/models", _models, "GET"),
        _path(parts, "/v1/models/{name:path}", _models, "GET"),
        _path(parts, "/v1/completions", partial(_generate, read_completion), "POST"),
        _path(parts, "/v1/chat/completions", partial(_generate, read_chat), "POST"),
    ]
    return Starlette(routes=paths, exception_handlers={HTTPException: partial(_no_such_path, parts)})


Answer = Callable[[ServerParts, Request], Awaitable[Any]]


def _path(parts: ServerParts, path: str, answer: Answer, method: str) -> Route:
    async def endpoint(request: Request) -> Any:
        start_s, status = time.perf_counter(), 500
        try:
            if path.startswith("/v1/"):
                _check_key(parts.key, request)
            response = await answer(parts, request)
            status = response.status_code
            return response
        except RefusalError as refusal:
            status = refusal.status
            return refusal_response(refusal)
        except ClientDisconnect:
            status = 499  # as other servers count it; nobody reads it
            return Response(status_code=status)
        finally:
            parts.metrics.requests[path, status] += 1
            if method == "POST" and status != 200:
                parts.metrics.request_s.add(time.perf_counter() - start_s)
                _log(request.scope, status, start_s)

    return Route(path, endpoint, methods=[method])


def _log(scope: Scope, status: int, start_s: float, said: str = "") -> None:
    host = (scope.get("client") or ["-"])[0]
    took_s = time.perf_counter() - start_s
    _logger.info("%s %s %s %d in %.2f s%s", host, scope["method"], scope["path"], status, took_s, said)


def _check_key(key: str | None, request: Request) -> None:
    """Refuse a request without the key; the time that this takes says nothing of the key."""
    if key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    # Hashes are equally long, whatever was given.
    ours, theirs = (hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest() for text in (key, given.strip()))
    if not hmac.compare_digest(ours, theirs) or kind.lower() != "bearer":
        raise RefusalError(401, "the API key is missing or wrong; give it as a bearer token", None, "invalid_api_key")


async def _no_such_path(parts: ServerParts, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    parts.metrics.requests["other", error.status_code] += 1
    what = f"{request.method} {quoted(request.url.path)}"
    if error.status_code == 404:
        return refusal_response(RefusalError(404, f"there is no {what}", None, "not_found"))
    return refusal_response(RefusalError(error.status_code, f"{what}: {error.detail}"))


# ---- what is known without generating


async def _health(parts: ServerParts, request: Request) -> Response:
    if parts.mailboxes.refused is not None:
        return json_response({"status": "ending", "reason": parts.mailboxes.refused}, 503)
    return json_response({"status": "ok", "model": parts.model.name})


async def _metrics(parts: ServerParts, request: Request) -> Response:
    return Response(parts.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _models(parts: ServerParts, request: Request) -> Response:
    """The list of models, which is one, or where the path names it that model alone."""
    model, name = parts.model, request.path_params.get("name")
    if name is not None:
        model.check_name(name)
    described = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "max_model_len": model.limits.max_length,
    }
    return json_response({"object": "list", "data": [described]} if name is None else described)


# ---- answers


ReadRequest = Callable[[Any, ServedModel], CompletionRequest]


async def _generate(read: ReadRequest, parts: ServerParts, request: Request) -> "_Answering":
    start_s = time.perf_counter()
    if parts.mailboxes.refused is not None:
        raise RefusalError(503, parts.mailboxes.refused, None, "server_ended")
    body = await _body(request, parts.model.config.max_body_bytes)
    queue = parts.mailboxes.queue
    if (unfinished := sum(queue.counts) + len(parts.unread)) >= queue.max_unfinished:
        reason = f"{unfinished} answers are waiting or running, as many as there may be; try again later"
        raise RefusalError(429, reason, None, QUEUE_FULL)
    parts.unread.add(request)
    try:
        # A long prompt takes long: short ones pass it, and those that wait must not take all threads.
        async with parts.turns[len(body) > _SHORT_BYTES]:
            asked = await run_in_threadpool(_read, read, body, parts.model)
    finally:
        parts.unread.discard(request)
    mailbox = parts.mailboxes.submit(asked)
    parts.metrics.num_prompt_tokens += asked.num_prompt_tokens
    return _Answering(parts, Reply(asked, parts.model.name, parts.model.token_texts), mailbox, start_s)


async def _body(request: Request, most_bytes: int) -> bytes:
    """The request's body. Raises: RefusalError if it is compressed or too long, or does not come."""
    encodings = ", ".join(request.headers.getlist("content-encoding"))
    if encodings.strip().lower() not in ("", "identity"):
        raise RefusalError(
            415, f"the body has the Content-Encoding {quoted(encodings)}; send it as plain JSON", None, "unsupported"
        )
    too_long = RefusalError(413, f"the body is longer than {most_bytes} bytes; shorten it", None, "too_long")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > most_bytes:
                    raise too_long
    except TimeoutError:
        raise RefusalError(408, f"the body did not come within {_BODY_S:g} s", None, "timeout") from None
    return bytes(body)


def _read(read: ReadRequest, body: bytes, model: ServedModel) -> CompletionRequest:
    try:
        content = parse_json(body)
    except ValueError as error:
        raise invalid(None, f"the body is not JSON ({quoted(str(error))})") from None
    return read(content, model)


@dataclass(eq=False)
class _Answering:
    """The response of one request: generates until it is answered or its client has gone."""

    status_code = 200

    #: what all paths share
    _parts: ServerParts
    #: what is written, and where answers grow
    _reply: Reply
    _mailbox: Mailbox
    #: when the request came
    _start_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; the method's name is ASGI's."""

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        metrics = self._parts.metrics
        send_reply = self._stream if self._reply.asked.stream else self._send_whole
        replying = asyncio.create_task(send_reply(scope, receive, send))
        leaving = asyncio.create_task(gone())
        try:
            await asyncio.wait({replying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if replying.done():
                replying.result()
        except OSError:
            pass  # the client has gone while it was written to
        finally:
            for task in (replying, leaving):
                task.cancel()
            metrics.num_cancelled += self._parts.mailboxes.leave(self._mailbox)
            metrics.num_new_tokens += self._reply.num_tokens
            metrics.request_s.add(time.perf_counter() - self._start_s)
            usage, early = self._reply.usage, "" if all(self._reply.endings) else ", and then it ended early"
            said = f", {usage['prompt_tokens']} tokens read and {usage['completion_tokens']} written{early}"
            _log(scope, self.status_code, self._start_s, said)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for _ in self._grown():
                pass
            response = json_response(self._reply.whole())
        except (RefusalError, TokenizationError) as error:
            response = refusal_response(self._ended(error))
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_events(send, self._reply.openings())
        try:
            async for deltas in self._grown():
                await _send_events(send, [self._reply.part(place, delta) for place, delta in deltas])
            await _send_events(send, [self._reply.closing()])
            last = b"data: [DONE]\n\n"
        except (RefusalError, TokenizationError) as error:
            await _send_events(send, [self._ended(error).content])
            last = b""
        await send({"type": "http.response.body", "body": last})

    async def _grown(self) -> AsyncIterator[list[tuple[int, TokenDelta]]]:
        """Add new tokens to the reply as they come, and yield them by choice; counts how long the first took."""
        async for deltas in self._mailbox.deltas():
            if deltas and not any(self._reply.tokens):
                self._parts.metrics.first_token_s.add(time.perf_counter() - self._start_s)
            placed = [(self._mailbox.places[delta.number], delta) for delta in deltas]
            for place, delta in placed:
                self._reply.add(place, delta)
            yield placed

    def _ended(self, error: RefusalError | TokenizationError) -> RefusalError:
        """Count an answer that cannot go on; the tokenizer may fail to write its tokens."""
        refusal = error if isinstance(error, RefusalError) else RefusalError(500, str(error), None, "tokenizer")
        self._parts.metrics.requests["ended", refusal.status] += 1
        return refusal


async def _send_events(send: Send, contents: Sequence[dict[str, Any] | None]) -> None:
    """Send what there is as server-sent events, in one piece."""
    body = "".join(f"data: {json_text(content)}\n\n" for content in contents if content is not None)
    if body:
        await send({"type": "http.response.body", "body": body.encode(), "more_body": True})
