"""Grouping of items into nearly equal loads, none above a capacity: pure functions on whole numbers.

Largest load first into the lightest group (Graham 1969, section 5), then single moves and swaps out of the heaviest
group until none helps; then, for few items, a search of bounded size for a better result (Korf 1998, section 2.3:
complete greedy). Contiguous cuts are another problem, solved in `penstock.schedule.partition`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

Groups = list[list[int]]

MAX_SEARCH_ITEMS = 12  # for more items the greedy result is within a few per cent anyway
MAX_SEARCH_NODES = 20_000  # about ten milliseconds


def arrange(loads: Sequence[int], at_least: int, capacity: int | None) -> Groups:
    """Group item indices into at least `at_least` groups within the capacity, as few and as even as can be found.

    The caller has checked that `at_least` is at most the number of items and every load within the capacity.
    """
    groups = balanced(loads, at_least)
    if capacity is None or _largest(groups, loads) <= capacity:
        return groups
    fallback = _first_fit(loads, capacity)
    smallest_possible = -(-sum(loads) // capacity)
    for num_groups in range(max(at_least + 1, smallest_possible), len(fallback)):
        groups = balanced(loads, num_groups)
        if _largest(groups, loads) <= capacity:
            return groups
    return _divided(fallback, loads, max(at_least, len(fallback)))


def arrange_exactly(loads: Sequence[int], num_groups: int, capacity: int | None) -> Groups:
    """As `arrange`, but exactly `num_groups`, which must be at least as many as `arrange(loads, 1, capacity)` makes."""
    groups = balanced(loads, num_groups)
    if capacity is None or _largest(groups, loads) <= capacity:
        return groups
    return _divided(arrange(loads, 1, capacity), loads, num_groups)


def balanced(loads: Sequence[int], num_groups: int) -> Groups:
    """Exactly `num_groups` non-empty groups with a small largest load, ignoring capacity."""
    heap = [(0, index) for index in range(num_groups)]
    groups: Groups = [[] for _ in range(num_groups)]
    for item in _heaviest_first(loads):
        load, index = heappop(heap)
        groups[index].append(item)
        heappush(heap, (load + loads[item], index))
    groups = _improved(groups, loads)
    return _searched(groups, loads) if len(loads) <= MAX_SEARCH_ITEMS else groups


def _improved(groups: Groups, loads: Sequence[int]) -> Groups:
    """Move and swap items out of the heaviest group while that lowers the larger of the two loads."""
    totals = [sum(loads[i] for i in group) for group in groups]
    bound = _lower_bound(loads, len(groups))
    for _ in range(4 * len(loads)):
        heavy = max(range(len(groups)), key=lambda g: (totals[g], -g))
        if totals[heavy] <= bound:
            break
        for light in sorted(range(len(groups)), key=lambda g: (totals[g], g)):
            exchange = _best_exchange(groups[heavy], groups[light], loads, totals[heavy] - totals[light])
            if exchange is not None:
                break
        else:
            break
        given, taken = exchange
        for source, target, item in ((heavy, light, given), (light, heavy, taken)):
            if item is not None:
                groups[source].remove(item)
                groups[target].append(item)
                totals[source] -= loads[item]
                totals[target] += loads[item]
    return groups


def _best_exchange(
    heavy: list[int], light: list[int], loads: Sequence[int], difference: int
) -> tuple[int, int | None] | None:
    """The item to give, and the one to take in return or None, that bring two groups closest; None if nothing helps."""
    offers: list[tuple[int, int | None]] = sorted((loads[item], item) for item in light)
    if len(heavy) > 1:
        offers.insert(0, (0, None))
    offered_loads = [load for load, _ in offers]
    best: tuple[int, int | None] | None = None
    best_distance = difference  # twice the distance of the gain from half of the difference
    for item in sorted(heavy):
        wanted = loads[item] - difference / 2
        at = bisect_left(offered_loads, wanted)
        for candidate in offers[max(at - 1, 0) : at + 1]:
            gain = loads[item] - candidate[0]
            distance = abs(2 * gain - difference)
            if 0 < gain < difference and distance < best_distance:
                best, best_distance = (item, candidate[1]), distance
    return best


def _searched(groups: Groups, loads: Sequence[int]) -> Groups:
    """The groups, or better ones found by assigning items depth first, heavy items first, to light groups first."""
    order = _heaviest_first(loads)
    bound = _lower_bound(loads, len(groups))
    best, best_largest = groups, _largest(groups, loads)
    totals = [0] * len(groups)
    chosen: list[int] = []
    nodes = 0

    def assign() -> None:
        nonlocal best, best_largest, nodes
        nodes += 1
        if len(chosen) == len(order):
            best_largest = max(totals)
            best = [[order[at] for at, g in enumerate(chosen) if g == group] for group in range(len(groups))]
            return
        load = loads[order[len(chosen)]]
        tried = set()
        for group in sorted(range(len(groups)), key=totals.__getitem__):
            # equal totals are interchangeable; the bound and the budget end the search early
            if totals[group] in tried or totals[group] + load >= best_largest:
                continue
            if best_largest <= bound or nodes > MAX_SEARCH_NODES:
                return
            tried.add(totals[group])
            totals[group] += load
            chosen.append(group)
            assign()
            chosen.pop()
            totals[group] -= load

    if best_largest > bound:
        assign()
    return best if all(best) else groups


def _lower_bound(loads: Sequence[int], num_groups: int) -> int:
    return max(max(loads), -(-sum(loads) // num_groups))


def _first_fit(loads: Sequence[int], capacity: int) -> Groups:
    """First-fit decreasing: each item goes into the first group that still has room."""
    groups: Groups = []
    totals: list[int] = []
    for item in _heaviest_first(loads):
        index = next((g for g, total in enumerate(totals) if total + loads[item] <= capacity), len(groups))
        if index == len(groups):
            groups.append([])
            totals.append(0)
        groups[index].append(item)
        totals[index] += loads[item]
    return groups


def _divided(groups: Groups, loads: Sequence[int], num_groups: int) -> Groups:
    """Halve groups, the heaviest with several items first, until there are `num_groups`; then even them out."""
    heap = [(-sum(loads[i] for i in group), index) for index, group in enumerate(groups) if len(group) > 1]
    heapify(heap)
    groups = [list(group) for group in groups]
    while len(groups) < num_groups:
        _, index = heappop(heap)
        members = groups[index]
        halves = balanced([loads[i] for i in members], 2)
        groups[index], other = ([members[i] for i in half] for half in halves)
        groups.append(other)
        for part in (index, len(groups) - 1):
            if len(groups[part]) > 1:
                heappush(heap, (-sum(loads[i] for i in groups[part]), part))
    return _improved(groups, loads)


def _heaviest_first(loads: Sequence[int]) -> list[int]:
    return sorted(range(len(loads)), key=lambda item: (-loads[item], item))


def _largest(groups: Groups, loads: Sequence[int]) -> int:
    return max(sum(loads[i] for i in group) for group in groups)
