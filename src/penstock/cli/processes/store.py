"""`penstock store`: the store where torchrun's agents meet, held by a host that trains nothing and so outlives them."""

import signal
import socket
from collections.abc import Sequence
from ipaddress import ip_address

from penstock.cli.options import Parser

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
    address = address.strip("[]")
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
        reached = [row for row in found if not _is_loopback(str(row[4][0]))]
        if not reached and _is_of_a_host(address):
            raise ValueError(
                f"{address} is {found[0][4][0]} on this host (see /etc/hosts), where no other host reaches the store; "
                f"give the host's address in the network of the run, or 0.0.0.0:{port} for all networks"
            )
        family, *_, place = (reached or found)[0]
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python adds to the system's words the address that it tried.
        why = (error.strerror or str(error)).partition(" (")[0].lower()
        raise ValueError(f"cannot listen at {endpoint}: {why}") from None


def _is_loopback(place: str) -> bool:
    return ip_address(place.partition("%")[0]).is_loopback


def _is_of_a_host(address: str) -> bool:
    """Return whether an address is a host's name, by which others look for it, rather than a number or localhost."""
    try:
        ip_address(address.partition("%")[0])
    except ValueError:
        return address != "localhost"
    return False


def _store(listener: socket.socket) -> object:
    """The store, for as long as the returned object lives."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
