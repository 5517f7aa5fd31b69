"""`penstock store`: the store where torchrun's agents meet, held by a host that trains nothing and so outlives them."""

import re
import signal
from collections.abc import Sequence

from penstock.cli.options import Parser
from penstock.cli.processes.meeting import listen, store_at

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def parser() -> Parser:
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
    """Run the command: hold the store until SIGTERM, SIGINT or SIGHUP; returns 0."""
    endpoint = parser().parse_args(argv).endpoint
    address, _, port = endpoint.rpartition(":")
    if not address or not re.fullmatch("[0-9]+", port) or int(port) >= 2**16:
        raise ValueError(f"{endpoint!r} is no ADDRESS:PORT such as login1:29400 or 0.0.0.0:29400")
    listener = listen(address.strip("[]"), int(port))
    host, port = listener.getsockname()[:2]
    # Before the store's threads start, which would otherwise take the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    store = store_at(listener)
    print(f"listening on {host} port {port}", flush=True)
    signal.sigwait(_STOPS)
    del store
    return 0
