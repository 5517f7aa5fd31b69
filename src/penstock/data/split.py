"""A batch into microbatches of nearly equal load, the same number on every data-parallel rank."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from penstock.data.balance import arrange, arrange_exactly
from penstock.data.errors import ItemTooLong, SplitError, TooFewItems
from penstock.data.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class MicroBatchSpec:
    """How to split a batch: into at least `num` microbatches, none of more than `max_tokens` tokens.

    num: None leaves the number to the budget of tokens. allow_fewer: where a batch has fewer items than `num`, take
    as many microbatches as it has items instead of refusing.

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

    @property
    def at_least(self) -> int:
        """The number of microbatches asked for, before the budget of tokens is looked at."""
        return self.num or 1


@dataclass(frozen=True, slots=True)
class Split:
    """A batch in microbatches, and the way back.

    forward_indices: the batch's items in the order in which the microbatches hold them. backward_indices: its inverse,
    so that `gather(microbatches).reorder(backward_indices)` is the batch. item_lengths: the load of each item, in the
    order of the batch.
    """

    microbatches: tuple[PackedBatch, ...]
    forward_indices: tuple[int, ...]
    backward_indices: tuple[int, ...]
    item_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """What one rank must tell the others before they split alike; four whole numbers.

    wanted: microbatches by its own split. needed: the fewest that its budget of tokens allows. Both are 0 where an
    item exceeds the budget.
    """

    wanted: int
    needed: int
    num_items: int
    longest_item: int

    def row(self) -> tuple[int, int, int, int]:
        """The numbers to gather from all ranks, for `agree`."""
        return astuple(self)


def count(batch: PackedBatch, spec: MicroBatchSpec) -> SplitCounts:
    """This rank's counts; never raises for what the batch holds, so that every rank reaches the collective."""
    loads = batch.item_lengths(batch.main_key)
    if spec.max_tokens is not None and max(loads) > spec.max_tokens:
        return SplitCounts(0, 0, len(loads), max(loads))
    if spec.max_tokens is None:
        return SplitCounts(spec.at_least, 1, len(loads), max(loads))
    needed = len(arrange(loads, 1, spec.max_tokens))
    wanted = len(arrange(loads, min(spec.at_least, len(loads)), spec.max_tokens))
    return SplitCounts(max(wanted, spec.at_least), min(needed, wanted), len(loads), max(loads))


def agree(rows: Sequence[Sequence[int]], spec: MicroBatchSpec) -> int:
    """The number of microbatches for all ranks, decided alike on each from the gathered rows of all, by rank.

    Raises: `ItemTooLong` or `TooFewItems`, the same on every rank, naming the first rank at fault.
    """
    counts = [SplitCounts(*map(int, row)) for row in rows]
    where = [f" on rank {rank}" if len(counts) > 1 else "" for rank in range(len(counts))]
    for rank, one in enumerate(counts):
        if spec.max_tokens is not None and one.longest_item > spec.max_tokens:
            raise ItemTooLong(
                f"an item of {one.longest_item} tokens{where[rank]} exceeds max_tokens={spec.max_tokens}; "
                f"items are never cut, so max_tokens must be at least {one.longest_item}"
            )
    wanted = max(one.wanted for one in counts)
    smallest = min(range(len(counts)), key=lambda rank: counts[rank].num_items)
    most = counts[smallest].num_items
    if wanted <= most:
        return wanted
    if spec.allow_fewer and max(one.needed for one in counts) <= most:
        return most
    raise TooFewItems(
        f"{wanted} microbatches were asked for or are needed, but the batch{where[smallest]} has {most} items; "
        f"at most {most} microbatches are possible" + ("" if spec.allow_fewer else ", or set allow_fewer")
    )


def split(batch: PackedBatch, spec: MicroBatchSpec, num: int | None = None) -> Split:
    """The batch in microbatches balanced by tokens: no item cut, deterministic, ordered by their first items.

    Every rank of a pipeline gets the same split from the same metadata. With several data-parallel ranks `num` is what
    `agree` found from all ranks' counts; alone, a rank agrees with itself.

    Raises: `ItemTooLong` or `TooFewItems`.
    """
    if num is None:
        num = agree([count(batch, spec).row()], spec)
    loads = batch.item_lengths(batch.main_key)
    groups = arrange_exactly(loads, num, spec.max_tokens)
    groups = sorted(sorted(group) for group in groups)
    forward = tuple(item for group in groups for item in group)
    backward = [0] * len(forward)
    for position, item in enumerate(forward):
        backward[item] = position
    parts = batch.reorder(forward).split_with([len(group) for group in groups])
    return Split(parts, forward, tuple(backward), loads)
