"""`penstock store`: the store where torchrun's agents meet, held by a host that trains nothing and so outlives them."""

import signal
import socket
from collections.abc import Sequence

from penstock.cli.commands import Parser

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_BACKLOG = 4096


def parser() -> Parser:
    """The parser of `penstock store`."""
    parser = Parser(
        "penstock store",
        "Hold the store at which torchrun's agents meet, until SIGTERM or Ctrl-C. Started on a host that trains\n"
        "nothing, it outlives each of those that do: any of them may be lost and come back.",
        examples=[
            "penstock store login1:29400",
            ("torchrun --rdzv-endpoint login1:29400 --rdzv-conf is_host=0 ...", "on all other hosts"),
        ],
    )
    parser.add_argument("endpoint", metavar="ADDRESS:PORT", help="where to listen; 0.0.0.0 stands for all networks")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command: hold the store until SIGTERM, SIGINT or SIGHUP; returns 0.

    Raises: ValueError if the endpoint is none, or nothing can listen there.
    """
    listener = _listener(parser().parse_args(argv).endpoint)
    host, port = listener.getsockname()[:2]
    # Before the store's threads start, which would otherwise take the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    store = _store(listener)
    print(f"listening on {host} port {port}", flush=True)
    signal.sigwait(_STOPS)
    del store
    return 0


def _listener(endpoint: str) -> socket.socket:
    address, colon, port = endpoint.rpartition(":")
    if not colon or not address or not (port.isascii() and port.isdecimal()) or int(port) >= 2**16:
        raise ValueError(f"{endpoint!r} is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400")
    try:
        found = socket.getaddrinfo(address.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, *_, place = found[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python adds to the system's words the address that it tried.
        why = (error.strerror or str(error)).partition(" (")[0].lower()
        raise ValueError(f"cannot listen at {endpoint}: {why}") from None


def _store(listener: socket.socket) -> object:
    """The store, for as long as the returned object lives."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
