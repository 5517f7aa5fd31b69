"""The HTTP side of a server: uvicorn's event loop in a thread of its own, beside the one that generates."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from penstock.serve.app import ServerParts, application

# Once no answer is open, what is left is to write the last bytes of replies.
_LAST_BYTES_S = 2
# How long a connection may be idle after a reply.
_IDLE_S = 5
_BACKLOG = 2048


@contextmanager
def http_thread(parts: ServerParts, listener: socket.socket) -> Iterator[None]:
    """Take requests on a socket inside the block; its end finishes the replies under way."""
    config = uvicorn.Config(
        application(parts),
        interface="asgi3",
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # It refuses whoever makes the number full.
        limit_concurrency=parts.model.config.max_connections + 1,
        timeout_keep_alive=_IDLE_S,
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
