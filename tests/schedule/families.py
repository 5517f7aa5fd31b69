"""Which sizes the tests build each schedule in."""

from functools import cache

from penstock.schedule import Program, Schedule, build, lower, names, options

STAGES = {
    **dict.fromkeys(("1f1b", "combined-1f1b", "zb-h1", "zb-h2"), (1,)),
    **dict.fromkeys(("zb-v", "v-half", "v-min", "dualpipe-v", "dualpipe"), (2,)),
}
SEARCHED = ("auto",)
NAMES = tuple(name for name in names() if name not in SEARCHED)


def stages_of(name: str) -> tuple[int, ...]:
    """The numbers of local stages that a schedule can have, of 1 to 4."""
    return STAGES.get(name, (1, 2, 3, 4))


def grouped(name: str) -> bool:
    return "group_size" in options(name)


@cache
def built(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


@cache
def lowered(
    name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None, receives_ahead: int = 2
) -> Program:
    return lower(built(name, ranks, microbatches, stages_per_rank), receives_ahead=receives_ahead)
