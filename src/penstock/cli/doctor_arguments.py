"""The command line of `penstock doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.cli.commands import Parser


@dataclass(frozen=True)
class DoctorArguments:
    """One call of the command; `sizes` are those of the layout that were given, by axis."""

    sizes: dict[str, int]
    order: tuple[str, ...] | None
    links: bool
    device: str
    timeout_s: float
    json: bool


def read_arguments(words: Sequence[str]) -> DoctorArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    parser = Parser(
        "penstock doctor",
        """Say what this machine has, which ranks of a layout talk to each other, and test the links between them: a
word and a block of data go round a ring of all processes, and every group of the layout is made and used once.
Started plainly, the processes are local ones on the loopback; under torchrun, Slurm or Kubernetes they are those of
the group that is found, so real hosts are tested.""",
        examples=(
            "penstock doctor                                   this machine, and two processes on it",
            "penstock doctor --pp 2 --dp 2 --tp 2              the groups of a layout, and eight processes",
            "penstock doctor --pp 16 --tp 8 --no-links         the groups alone, nothing is started",
            "torchrun ... -m penstock.cli.doctor --pp 8        the links of the hosts that torchrun has joined",
        ),
    )
    for axis, what in (
        ("pp", "ranks of a pipeline"),
        ("dp", "copies of the model"),
        ("cp", "ranks that share every sequence"),
        ("tp", "ranks that share every layer"),
        ("ep", "ranks that share every layer's experts, among those of dp and cp"),
    ):
        parser.add_argument(f"--{axis}", type=int, metavar="N", help=f"{what} (default 1)")
    parser.add_argument("--order", metavar="AXES", help="how ranks are numbered, the last axis fastest: dp-pp-cp-tp")
    parser.add_argument("--no-links", action="store_true", help="start nothing and test no link")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for a silent peer (default 30)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    given = parser.parse_args(list(words))
    if not 0 < given.timeout < float("inf"):
        raise ValueError(f"--timeout is {given.timeout}; it must be more than 0")
    sizes = {axis: getattr(given, axis) for axis in ("pp", "dp", "cp", "tp", "ep") if getattr(given, axis) is not None}
    return DoctorArguments(
        sizes,
        tuple(given.order.split("-")) if given.order else None,
        not given.no_links,
        given.device,
        given.timeout,
        given.json,
    )
