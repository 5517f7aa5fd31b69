"""Which sizes the tests build each schedule in."""

from functools import cache

from penstock.schedule import Program, Schedule, build, lower, names

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
