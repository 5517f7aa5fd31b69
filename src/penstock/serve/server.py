"""The HTTP side of a server: an event loop in a thread of its own, beside the one that generates."""

import asyncio
import ipaddress
import re
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.serve.app import ServerParts, application
from penstock.serve.metrics import ServerMetrics
from penstock.serve.refusals import RefusalError, refusal_response
from penstock.settings import ServeConfig

# Once no answer is open, what is left is to write the last bytes of replies.
_LAST_BYTES_S = 2
# Within these the headers of a connection's next request must have come.
_HEADERS_S = 10.0
# Within these a client must have taken what lies ready for it.
_TAKING_S = 30.0
# A refused client reads why, for as long as this and as long as so few are refused at a time.
_REFUSED_S, _MOST_REFUSED = 1.0, 64
# A host that has gone without a word is asked after so many seconds of silence, and so often, so many seconds apart.
_SILENT_S, _NUM_ASKED, _ASKED_AFTER_S = 30, 3, 10
_BACKLOG = 2048
# Beside the connections: the model's files, the ranks' sockets, and those who are told that there is no place.
_OTHER_FILES = 256


@dataclass(eq=False)
class _Places:
    """The connections that there are, of which an address can have no more than its part."""

    #: has the limits
    config: ServeConfig
    #: counts who is refused
    metrics: ServerMetrics
    #: address -> its connections
    taken: Counter[str] = field(default_factory=Counter)
    #: connections whose clients are being told that there is no place
    num_refused: int = 0

    def refusal(self, address: str) -> RefusalError | None:
        """Why there is no place for one more connection of an address; None where there is."""
        most, most_of_one = self.config.max_connections, self.config.max_connections_per_address
        if self.taken.total() >= most:
            reason = f"there are more than {most} connections; try again later"
        elif self.taken[address] >= most_of_one:
            reason = f"there are more than {most_of_one} connections from {address}; close some, or try again later"
        else:
            return None
        self.metrics.requests["other", 503] += 1
        return RefusalError(503, reason, None, "too_many")


class _BoundedProtocol(H11Protocol):
    """HTTP, of whose connections there are so many, and none without a request or an answer on its way.

    Uvicorn waits without end for headers of which a part has come, and for a client that does not read.
    """

    #: the places of all connections
    _places: _Places
    #: who has one of them; None for a refused connection
    _address: str | None = None
    #: ends the connection, unless its client does what is awaited
    _deadline: asyncio.TimerHandle | None = None
    #: True once nothing more is taken from it
    _refused = False

    def __init__(self, places: _Places, **named: Any) -> None:
        super().__init__(**named)
        self._places = places

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        address = _address_of(transport)
        refusal = self._places.refusal(address)
        if refusal is None:
            self._address = address
            self._places.taken[address] += 1
            self._await(_HEADERS_S)
        else:
            self._refuse(refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await(None)
        self._places.num_refused -= self._refused
        if self._address is not None:
            self._places.taken[self._address] -= 1
            if not self._places.taken[self._address]:
                del self._places.taken[self._address]

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        # Where equal lengths are repeated, h11 makes one of them.
        if self.conn.their_state is h11.IDLE and _has_two_lengths(self.conn.trailing_data[0]):
            self._refuse(RefusalError(400, "a request has one Content-Length", None, "invalid_request"))
            return
        before = self.cycle
        super().handle_events()
        # Headers have come in full; who does not take what is written must still do that.
        if self.cycle is not before and not self.flow.write_paused:
            self._await(None)

    def on_response_complete(self) -> None:
        self._await(_TAKING_S if self.transport.get_write_buffer_size() else _HEADERS_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await(_TAKING_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.cycle.response_complete:
            self._await(None)

    def send_400_response(self, msg: str) -> None:
        self._refuse(RefusalError(400, "this is no request of HTTP/1.1", None, "invalid_request"))

    def _await(self, seconds: float | None) -> None:
        """End the connection after so many seconds; None for what is not the client's to do."""
        if self._deadline is not None:
            self._deadline.cancel()
        # Aborted: to close would wait for a client that does not read.
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _refuse(self, refusal: RefusalError) -> None:
        """Say why, and take no more from this connection."""
        if self._places.num_refused >= _MOST_REFUSED or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self.connections.discard(self)
        self._refused = True
        self._places.num_refused += 1
        response = refusal_response(refusal)
        head = h11.Response(status_code=refusal.status, headers=[*response.raw_headers, CLOSE_HEADER])
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # What it may still send is read, since its kernel would drop the reply once ours refuses it.
        self.transport.write_eof()
        self._await(_REFUSED_S)


def _has_two_lengths(data: bytes) -> bool:
    """True if the headers at the beginning, once they have come in full, hold more than one length."""
    head, end, _ = _FOLD.sub(b" ", data.lstrip(b"\r\n").replace(b"\r\n", b"\n")).partition(b"\n\n")
    lengths = _LENGTH.findall(head) if end else []
    return len(lengths) > 1 or any(b"," in length for length in lengths)


_FOLD, _LENGTH = re.compile(rb"\n[ \t]+"), re.compile(rb"^content-length[ \t]*:(.*)$", re.IGNORECASE | re.MULTILINE)


def _address_of(transport: asyncio.Transport) -> str:
    """The address that a client has for itself: of IPv6 the network of 64 bits that one host can have.

    Clients without an address of IP are one.
    """
    try:
        address = ipaddress.ip_address(transport.get_extra_info("peername")[0].partition("%")[0])
    except (TypeError, ValueError, IndexError):
        return "elsewhere"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(ipaddress.ip_network((address, 64), strict=False)) if mapped is None else str(mapped)


@contextmanager
def http_thread(parts: ServerParts, listener: socket.socket) -> Iterator[None]:
    """Take requests on a socket inside the block; its end finishes the replies under way."""
    answers = application(parts)

    async def with_one_length(scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse requests whose end a proxy before this server may see elsewhere."""
        answer: ASGIApp = answers
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            parts.metrics.requests["other", 400] += 1
            refused = "a request has Content-Length or Transfer-Encoding, not both"
            answer = refusal_response(RefusalError(400, refused, None, "invalid_request"))
            answer.headers["connection"] = "close"
        await answer(scope, receive, send)

    config = uvicorn.Config(
        with_one_length,
        interface="asgi3",
        http=partial(_BoundedProtocol, _Places(parts.model.config, parts.metrics)),  # pyright: ignore[reportArgumentType]
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
        listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0].lower()
        raise ValueError(f"cannot listen at {address} port {port}: {why}; give another --address or --port") from None
    # Connections have these options from it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    timing = {"TCP_KEEPIDLE": _SILENT_S, "TCP_KEEPCNT": _NUM_ASKED, "TCP_KEEPINTVL": _ASKED_AFTER_S}
    for name, value in timing.items():
        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


def allow_connections(most: int) -> None:
    """Let this process open files enough for so many connections.

    Raises:
        ValueError: the system does not allow as many.
    """
    allowed, most_allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most + _OTHER_FILES
    if most_allowed != resource.RLIM_INFINITY and needed > most_allowed:
        raise ValueError(
            f"--max-connections {most} needs {needed} open files, but this machine allows {most_allowed} (ulimit -Hn); "
            f"give at most {max(1, most_allowed - _OTHER_FILES)}"
        )
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most_allowed))
