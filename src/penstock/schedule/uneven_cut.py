"""The cut of a model's units into one stage a rank, where ranks differ in speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def uneven_cut(
    times: Sequence[float], sizes: Sequence[float], speeds: Sequence[float], rooms: Sequence[float]
) -> tuple[range, ...]:
    """Cut units into contiguous stages, one for each rank in order, whose slowest stage is as fast as possible.

    A stage takes its units' `times` over its rank's speed, and the sum of their `sizes` is at most the rank's room.
    Every stage gets at least one unit. Among equally fast cuts, the earlier ranks get fewer units.

    >>> uneven_cut([1.0] * 6, sizes=[1.0] * 6, speeds=[2.0, 1.0], rooms=[9.0, 9.0])
    (range(0, 4), range(4, 6))
    >>> uneven_cut([1.0] * 6, sizes=[1.0] * 6, speeds=[2.0, 1.0], rooms=[3.0, 9.0])
    (range(0, 3), range(3, 6))

    Raises: ValueError if no cut fits into the rooms, or there are fewer units than ranks.
    """
    time_until, size_until = [0.0, *accumulate(times)], [0.0, *accumulate(sizes)]
    num_units = len(times)
    # The slowest stage of the best cut of the first units among the ranks so far, by their number.
    slowest, begins = [0.0] + [inf] * num_units, list[list[int]]()
    for speed, room in zip(speeds, rooms, strict=True):
        best, begin_of = [inf] * (num_units + 1), [0] * (num_units + 1)
        for end in range(1, num_units + 1):
            for begin in range(end):
                if size_until[end] - size_until[begin] > room:
                    continue
                found = max(slowest[begin], (time_until[end] - time_until[begin]) / speed)
                if found < best[end]:
                    best[end], begin_of[end] = found, begin
        slowest = best
        begins.append(begin_of)
    if slowest[num_units] == inf:
        raise ValueError(
            f"{num_units} units of {size_until[-1] / 2**30:,.2f} GiB do not fit into {len(rooms)} stages on ranks with "
            f"{', '.join(f'{room / 2**30:,.2f}' for room in rooms)} GiB; give more ranks, or fewer and shorter answers"
        )
    stages, end = list[range](), num_units
    for begin_of in reversed(begins):
        stages.append(range(begin_of[end], end))
        end = begin_of[end]
    return tuple(reversed(stages))
