"""The HTTP side of a server: an event loop in a thread of its own, beside the one that generates."""

import asyncio
import socket
import threading

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


class HttpThread:
    """Serves an application on a socket until `end`."""

    #: uvicorn's server, and what its paths share
    _server: uvicorn.Server
    _parts: ServerParts
    #: answers requests
    _application: ASGIApp
    #: where it listens
    _listener: socket.socket
    #: runs the event loop
    _thread: threading.Thread
    #: set when requests can come, or when they never will
    _started: threading.Event

    def __init__(self, parts: ServerParts, listener: socket.socket) -> None:
        self._application = application(parts)
        config = uvicorn.Config(
            self._bounded,
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
        self._server, self._parts, self._listener = uvicorn.Server(config), parts, listener
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock http", daemon=True)

    def start(self) -> None:
        """Take requests from now on."""
        self._thread.start()
        self._started.wait()

    def end(self) -> None:
        """Finish the replies under way, and take no more."""
        self._server.should_exit = True
        self._thread.join(_LAST_BYTES_S + 2.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._started.set()

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, for no more connections than there may be."""
        most, answer = self._parts.config.max_connections, self._application
        if len(self._server.server_state.connections) > most:
            self._parts.metrics.requests["other", 503] += 1
            answer = refusal_response(
                RefusalError(503, f"there are more than {most} connections; try again later", None, "too_many")
            )
        await answer(scope, receive, send)

    async def _serve(self) -> None:
        self._parts.mailboxes.open(asyncio.get_running_loop())
        self._started.set()
        await self._server.serve([self._listener])


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
