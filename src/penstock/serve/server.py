"""The HTTP side of a server: an event loop in a thread of its own, beside the one that generates."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.serve.app import ServerParts, application
from penstock.serve.refusals import RefusalError, refusal_response

# Once no answer is open, what is left is to write the last bytes of replies.
_LAST_BYTES_S = 2
# Within these the headers of a connection's first request must have come.
_HEADERS_S = 10.0
_BACKLOG = 2048


class _PromptProtocol(H11Protocol):
    """HTTP, whose clients must begin: uvicorn waits without end for the first request of a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]

        def check_begun() -> None:
            if self.cycle is None:  # no headers have come in full
                self.transport.close()

        super().connection_made(transport)
        self.loop.call_later(_HEADERS_S, check_begun)


@contextmanager
def http_thread(parts: ServerParts, listener: socket.socket) -> Iterator[None]:
    """Take requests on a socket inside the block; its end finishes the replies under way."""
    answers, most = application(parts), parts.model.config.max_connections

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer for no more connections than there may be."""
        answer: ASGIApp = answers
        if len(server.server_state.connections) > most:
            parts.metrics.requests["other", 503] += 1
            answer = refusal_response(
                RefusalError(503, f"there are more than {most} connections; try again later", None, "too_many")
            )
        await answer(scope, receive, send)

    config = uvicorn.Config(
        bounded,
        interface="asgi3",
        http=_PromptProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_LAST_BYTES_S,
    )
    # Set when requests can come, or when they never will.
    server, started = uvicorn.Server(config), threading.Event()

    async def serve() -> None:
        parts.mailboxes.open(asyncio.get_running_loop())
        started.set()
        await server.serve([listener])

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="penstock http", daemon=True)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(_LAST_BYTES_S + 2.0)


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ValueError: nothing can listen there.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0].lower()
        raise ValueError(f"cannot listen at {address} port {port}: {why}; give another --address or --port") from None
