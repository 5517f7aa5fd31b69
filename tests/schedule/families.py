"""Which sizes the tests build each schedule in, and what was published of some."""

from functools import cache
from typing import NamedTuple

from penstock.schedule import Costs, Program, Schedule, build, lower, names

SEARCHED = ("auto",)
NAMES = tuple(name for name in names() if name not in SEARCHED)


@cache
def stages_of(name: str) -> tuple[int, ...]:
    """The numbers of local stages that a schedule's builder takes, of 1 to 4."""
    return tuple(number for number in (1, 2, 3, 4) if _takes(name, number))


def _takes(name: str, stages_per_rank: int) -> bool:
    try:
        build(name, ranks=2, microbatches=3, stages_per_rank=stages_per_rank)
    except ValueError:
        return False
    return True


@cache
def built(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@cache
def lowered(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, receives_ahead: int = 2
) -> Program:
    return lower(built(name, ranks, microbatches, stages_per_rank), receives_ahead=receives_ahead)


class Published(NamedTuple):
    """A run of eight ranks: times of F, I, W and a transfer in ms, M_W / M_B, and the bubbles of its schedules.

    `v`: local stages where they are interleaved. `search`: the paper's own at 2p microbatches; at p it is ZB-H1's.
    """

    microbatches: int
    forward: float
    inputs: float
    weights: float
    transfer: float
    share: float
    v: int
    one_f_one_b: float
    interleaved: float
    h1: float
    h2: float
    search: float

    @property
    def costs(self) -> Costs:
        return Costs(self.forward, self.inputs, self.weights, self.transfer, weight_memory_share=self.share)

    @property
    def work(self) -> float:
        return self.microbatches * (self.forward + self.inputs + self.weights)


#: Tables 5 and 9 of Zero Bubble Pipeline Parallelism, arXiv 2401.10241
PUBLISHED = (
    Published(24, 18.522, 18.086, 9.337, 0.601, 0.37, 3, 0.2431, 0.1055, 0.1585, 0.1083, 0.0433),
    Published(32, 18.513, 18.086, 9.331, 0.626, 0.37, 3, 0.1985, 0.0818, 0.1242, 0.0837, 0.0039),
    Published(64, 18.546, 18.097, 9.321, 0.762, 0.37, 3, 0.1240, 0.0443, 0.0674, 0.0444, 0.0026),
    Published(24, 29.718, 29.444, 19.927, 0.527, 0.43, 4, 0.2347, 0.0808, 0.1323, 0.0698, 0.0029),
    Published(32, 29.802, 29.428, 19.530, 0.577, 0.43, 4, 0.1898, 0.0628, 0.1045, 0.0559, 0.0022),
    Published(64, 29.935, 29.621, 19.388, 0.535, 0.43, 4, 0.1091, 0.0320, 0.0554, 0.0294, 0.0010),
)
