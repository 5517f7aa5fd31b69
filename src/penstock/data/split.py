"""A batch divided into microbatches or among ranks, and its microbatches' results joined in the order of the batch.

Microbatches have nearly equal load, and every data-parallel rank has the same number of them.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.data.packed import NO_LABEL, Lengths, PackedBatch, PartitionError

# ---- Grouping of items into nearly equal loads, none above a capacity: pure functions on whole numbers


Groups = list[list[int]]

MAX_SEARCH_ITEMS = 12  # for more items the greedy result is within a few per cent anyway
MAX_SEARCH_NODES = 20_000  # about ten milliseconds


def arrange(loads: Sequence[int], at_least: int, capacity: int | None) -> Groups:
    """Group item indices into at least `at_least` groups within the capacity, as few and as even as can be found.

    The caller has checked that `at_least` is at most the number of items and every load within the capacity.
    """
    groups = balanced(loads, at_least)
    if capacity is None or max(_totals(groups, loads)) <= capacity:
        return groups
    # First-fit decreasing: each item goes into the first group that still has room.
    fallback: Groups = []
    totals: list[int] = []
    for item in _heaviest_first(loads):
        index = next((g for g, total in enumerate(totals) if total + loads[item] <= capacity), len(fallback))
        if index == len(fallback):
            fallback.append([])
            totals.append(0)
        fallback[index].append(item)
        totals[index] += loads[item]
    smallest_possible = -(-sum(loads) // capacity)
    for num_groups in range(max(at_least + 1, smallest_possible), len(fallback)):
        groups = balanced(loads, num_groups)
        if max(_totals(groups, loads)) <= capacity:
            return groups
    return _divided(fallback, loads, max(at_least, len(fallback)))


def arrange_exactly(loads: Sequence[int], num_groups: int, capacity: int | None) -> Groups:
    """As `arrange`, but exactly `num_groups`, which must be at least as many as `arrange(loads, 1, capacity)` makes."""
    groups = balanced(loads, num_groups)
    if capacity is None or max(_totals(groups, loads)) <= capacity:
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
    if max(heap)[0] <= _lower_bound(loads, num_groups):
        return groups
    groups = _improved(groups, loads)
    return _searched(groups, loads) if len(loads) <= MAX_SEARCH_ITEMS else groups


def _improved(groups: Groups, loads: Sequence[int]) -> Groups:
    """Move and swap items out of the heaviest group while that lowers the larger of the two loads."""
    totals = _totals(groups, loads)
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
        offered, taken = exchange
        for source, target, item in ((heavy, light, offered), (light, heavy, taken)):
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
    best, best_largest = groups, max(_totals(groups, loads))
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
    return sorted(range(len(loads)), key=loads.__getitem__, reverse=True)


def _totals(groups: Groups, loads: Sequence[int]) -> list[int]:
    return [sum(map(loads.__getitem__, group)) for group in groups]


Pieces = Sequence[tuple[range, ...]]
"""For each sequence the positions that a rank has of it."""


SplitError = PartitionError
"""A batch cannot be split as specified: an item exceeds the token budget, or there are too few items."""


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """Split a batch into at least `num` microbatches of at most `max_tokens` tokens each.

    num: None leaves the number to the token budget. allow_fewer: if a batch has fewer items than `num`, take as many
    microbatches as it has items instead of refusing.

    >>> batch = PackedBatch.from_documents([torch.arange(n) for n in (4, 3, 2, 1)])
    >>> [part.num_tokens for part in split(batch, MicroBatchSpec(num=2)).microbatches]
    [5, 5]
    """

    num: int | None = 1
    max_tokens: int | None = None
    allow_fewer: bool = False

    def __post_init__(self) -> None:
        for name in ("num", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise SplitError(f"{name} is {value!r}; it must be a whole number of at least 1, or None")
        if type(self.allow_fewer) is not bool:
            raise SplitError(f"allow_fewer is {self.allow_fewer!r}; it must be True or False")


@dataclass(frozen=True, slots=True)
class Split:
    """A batch in microbatches, and the way back.

    forward_indices: the batch's items in the order of the microbatches. backward_indices: its inverse,
    so that `gather(microbatches).reorder(backward_indices)` is the batch. item_lengths: the load of each item, in the
    order of the batch.
    """

    microbatches: tuple[PackedBatch, ...]
    forward_indices: tuple[int, ...]
    backward_indices: tuple[int, ...]
    item_lengths: tuple[int, ...]


@dataclass(frozen=True)
class SplitCounts:
    """Four whole numbers that ranks exchange in order to split alike.

    wanted: microbatches by the rank's own split. needed: the fewest that its token budget allows. Both are 0 if an
    item exceeds the budget.
    """

    wanted: int = 0
    needed: int = 0
    num_items: int = 0
    longest_item: int = 0


def count(batch: PackedBatch, spec: MicroBatchSpec) -> SplitCounts:
    """This rank's counts; never raises for the batch's contents, so that every rank reaches the collective."""
    loads, at_least = batch.item_lengths(batch.main_key), spec.num or 1
    if spec.max_tokens is not None and max(loads) > spec.max_tokens:
        return SplitCounts(0, 0, len(loads), max(loads))
    if spec.max_tokens is None:
        return SplitCounts(at_least, 1, len(loads), max(loads))
    needed = len(arrange(loads, 1, spec.max_tokens))
    wanted = len(arrange(loads, min(at_least, len(loads)), spec.max_tokens))
    return SplitCounts(max(wanted, at_least), min(needed, wanted), len(loads), max(loads))


def agree(counts: Sequence[SplitCounts], spec: MicroBatchSpec) -> int:
    """The number of microbatches for all ranks; each computes the same from the counts by rank.

    Raises: `SplitError`, the same on every rank, naming the first rank at fault.
    """

    def on(rank: int) -> str:
        return f" on rank {rank}" if len(counts) > 1 else ""

    for rank, one in enumerate(counts):
        if spec.max_tokens is not None and one.longest_item > spec.max_tokens:
            raise SplitError(
                f"an item of {one.longest_item} tokens{on(rank)} exceeds max_tokens={spec.max_tokens}; "
                f"items are never cut, so max_tokens must be at least {one.longest_item}"
            )
    wanted, num_items = max(one.wanted for one in counts), [one.num_items for one in counts]
    most = min(num_items)
    if wanted <= most:
        return wanted
    if spec.allow_fewer and max(one.needed for one in counts) <= most:
        return most
    raise SplitError(
        f"{wanted} microbatches were asked for or are needed, but the batch{on(num_items.index(most))} has {most} "
        f"items; at most {most} microbatches are possible" + ("" if spec.allow_fewer else ", or set allow_fewer")
    )


def split(batch: PackedBatch, spec: MicroBatchSpec, num: int | None = None) -> Split:
    """Split the batch into microbatches balanced by tokens: no item is cut, and the order is that of first items.

    Every rank of a pipeline gets the same split from the same metadata. With several data-parallel ranks, `num` is the
    result of `agree` on all ranks' counts; None agrees with this rank's counts alone.

    Raises: `SplitError`.
    """
    if num is None:
        num = agree([count(batch, spec)], spec)
    loads = batch.item_lengths(batch.main_key)
    groups = arrange_exactly(loads, num, spec.max_tokens)
    groups = sorted(map(sorted, groups))
    forward = tuple(chain.from_iterable(groups))
    backward = tuple(sorted(range(len(forward)), key=forward.__getitem__))
    return Split(batch.divided(groups), forward, backward, loads)


# ---- results in the order of the batch


def merge(results: Sequence[Any], split: Split, lengths: Sequence[int] | None = None) -> Any:
    """Join one result per microbatch into one for the batch, in the order of its items.

    Tensors are joined along their first dimension, lists end to end, mappings key by key. Results that cannot be
    taken apart (scalars, objects of any other type) come back as a list, one per microbatch. lengths: rows per item, in
    the order of the batch; left out, a tensor may have a row per token, per sequence or per item.

    Raises: `PartitionError` if results, rows or entries do not fit, or differ in type from microbatch to microbatch.
    """
    _check_results(results, split)
    if isinstance(results[0], Mapping):
        return {name: merge([result[name] for result in results], split, lengths) for name in results[0]}
    pieces = take_apart(results, split, lengths)
    if pieces is None:
        return list(results)
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces)
    return type(results[0])(pieces)


def take_apart(results: Sequence[Any], split: Split, lengths: Sequence[int] | None = None) -> list[Any] | None:
    """Split one result per microbatch into one per item, in the order of the batch; None if that is impossible.

    A tensor gives each item its rows, a list its entry, a mapping a mapping of these. `lengths` as in `merge`.

    Raises: `PartitionError` as `merge`.
    """
    _check_results(results, split)
    first = results[0]
    if isinstance(first, Mapping):
        of_name = {name: take_apart([result[name] for result in results], split, lengths) for name in first}
        if not of_name or any(pieces is None for pieces in of_name.values()):
            return None
        return [dict(zip(of_name, values, strict=True)) for values in zip(*of_name.values(), strict=True)]  # type: ignore[arg-type]
    if isinstance(first, Tensor) and first.dim() > 0:
        rows = _rows_per_item([result.shape[0] for result in results], split, lengths)
        items = iter(split.forward_indices)
        counts = [[rows[next(items)] for _ in part.ids] for part in split.microbatches]
        pieces = [piece for result, of_items in zip(results, counts) for piece in result.split(of_items)]
        return [pieces[i] for i in split.backward_indices]
    if isinstance(first, (list, tuple)):
        entries = [entry for result in results for entry in result]
        if len(entries) != len(split.backward_indices):
            raise PartitionError(
                f"{len(entries)} outputs for {len(split.backward_indices)} items; expected one per item"
            )
        return [entries[i] for i in split.backward_indices]
    return None


def check_lengths(lengths: Sequence[int], num_items: int) -> None:
    """Refuse rows per item that cannot belong to `num_items` items. Raises: `PartitionError`."""
    if len(lengths) != num_items:
        raise PartitionError(f"{len(lengths)} output lengths for {num_items} items; expected one per item")
    if min(lengths) < 0:
        raise PartitionError(f"an output length is {min(lengths)}; an item has 0 rows or more")


def _check_results(results: Sequence[Any], split: Split) -> None:
    if len(results) != len(split.microbatches):
        raise PartitionError(f"{len(results)} results for {len(split.microbatches)} microbatches")
    kinds = (Tensor, Mapping, list, tuple)
    kind = next((k for k in kinds if isinstance(results[0], k)), None)
    if any(isinstance(r, kinds) if kind is None else not isinstance(r, kind) for r in results):
        raise PartitionError(f"results of different types: {sorted({type(result).__name__ for result in results})}")
    if isinstance(results[0], Mapping) and any(result.keys() != results[0].keys() for result in results):
        raise PartitionError("results with different keys")
    if isinstance(results[0], Tensor) and len({result.shape[1:] if result.dim() else () for result in results}) > 1:
        raise PartitionError(f"results of different shapes: {[tuple(result.shape) for result in results]}")


def _rows_per_item(num_rows: Sequence[int], split: Split, lengths: Sequence[int] | None) -> Sequence[int]:
    """The number of rows of each item, in the order of the batch, if the microbatches' results have `num_rows`."""
    num_items = len(split.forward_indices)
    if lengths is not None:
        check_lengths(lengths, num_items)
        possible = {"the output lengths given": lengths}
    else:
        first = split.microbatches[0]
        key = "tokens" if "tokens" in first else first.main_key
        items = [item for part in split.microbatches for item in part.lengths[key]]
        items = [items[i] for i in split.backward_indices]
        possible = {
            "a row per token": [sum(item) for item in items],
            "a row for each of the longest key": split.item_lengths,
            "a row per sequence": [len(item) for item in items],
            "a row per item": [1] * num_items,
        }
    expected: dict[str, list[int]] = {}
    for what, rows in possible.items():
        of_items = iter(split.forward_indices)
        expected[what] = [sum(rows[next(of_items)] for _ in part.ids) for part in split.microbatches]
        if expected[what] == list(num_rows):
            return rows
    counts = ", ".join(f"{rows} for {what}" for what, rows in expected.items())
    raise PartitionError(f"the microbatches' results have {list(num_rows)} rows; expected were {counts}")


# ---- parts of a batch that have some of every sequence's tokens


def part_of(batch: PackedBatch, pieces: Pieces) -> PackedBatch:
    """Select a rank's positions of each sequence, given in the order of `sequence_lengths("tokens")`.

    Keys with one row per token are cut, and so are keys with one row fewer per sequence, whose row t belongs to the
    step from token t to the next. Each label stands at the token before it, so each part keeps the labels of its
    tokens. Other keys (one row per item, say) stay whole in every part. A part may have sequences of length 0.
    """
    # A rehearsal's batch has values, which no device will need.
    with _disable_current_modes():
        places_R = torch.cat([torch.arange(0), *(torch.arange(r.start, r.stop) for of in pieces for r in of)])
        counts = torch.tensor([sum(map(len, of)) for of in pieces])
        return _cut(batch, torch.arange(len(pieces)).repeat_interleave(counts), places_R)


_SHARE_LEFT_OUT = 0.1
"""Of the tokens, from which on those without a label are left out: where head and loss are half of a step, fewer are at
most 5% of it. So a microbatch in which documents end has the bits of a loop over all its tokens."""


def rows_with_label(labels_T: Tensor) -> Tensor | None:
    """The rows [R] int64 of the tokens with a label, on the host; None if hardly any token has none.

    Of tokens that have no label at all it is the first, so that there is something to compute.
    """
    # Labels have values where a rehearsal's tensors have none.
    with _disable_current_modes():
        rows_R = (labels_T != NO_LABEL).cpu().nonzero().squeeze(1)
        if len(rows_R) > (1 - _SHARE_LEFT_OUT) * len(labels_T) or not len(labels_T):
            return None
        return rows_R if len(rows_R) else torch.zeros(1, dtype=torch.int64)


def labels_of_share(num_tokens: int, share: float) -> Tensor:
    """Labels of a text of which this share of tokens, the last ones, has a label."""
    labels_T = torch.zeros(num_tokens, dtype=torch.int64)
    labels_T[: num_tokens - math.ceil(share * num_tokens)] = NO_LABEL
    return labels_T


def labelled_part(batch: PackedBatch) -> tuple[PackedBatch, Tensor | None]:
    """The tokens whose outputs a loss over labels reads, cut as `part_of` does, and their rows; None if it is all."""
    if (rows_R := rows_with_label(batch["labels"])) is None:
        return batch, None
    with _disable_current_modes():
        lengths_S = torch.tensor(batch.sequence_lengths("tokens"))
        ends_S = lengths_S.cumsum(0)
        sequences_R = torch.bucketize(rows_R, ends_S, right=True)
        return _cut(batch, sequences_R, rows_R - (ends_S - lengths_S)[sequences_R]), rows_R


def _cut(batch: PackedBatch, sequences_R: Tensor, places_R: Tensor) -> PackedBatch:
    """Keep some tokens' rows of the keys that have one for each token, or one fewer for each sequence.

    sequences_R, places_R: the sequence of each of these tokens, ascending, and its place there.
    """
    whole = batch.sequence_lengths("tokens")
    tables: dict[int, tuple[Lengths, Tensor]] = {}
    lengths, data = dict(batch.lengths), dict(batch.data or {})
    for key, table in batch.lengths.items():
        flat = batch.sequence_lengths(key)
        if len(flat) != len(whole) or (flat != whole and flat != tuple(n - 1 for n in whole)):
            continue
        if id(table) not in tables:
            lengths_S = torch.tensor(flat)
            inside_R = places_R < lengths_S[sequences_R]
            left = iter(sequences_R[inside_R].bincount(minlength=len(flat)).tolist())
            rows_R = ((lengths_S.cumsum(0) - lengths_S)[sequences_R] + places_R)[inside_R]
            tables[id(table)] = tuple(tuple(next(left) for _ in item) for item in table), rows_R
        lengths[key], rows_R = tables[id(table)]
        if batch.data is not None:
            data[key] = batch[key].index_select(0, rows_R.to(batch[key].device))
    return batch.with_parts(lengths=lengths, data=None if batch.data is None else data)
