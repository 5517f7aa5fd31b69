"""Mistakes in data, and the checks of a packed batch, each naming the field at fault.

All kinds are `ValueError`s whose message is one clear sentence.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.settings.declare import type_in_words

ItemId = int | str
Lengths = tuple[tuple[int, ...], ...]


class BatchError(ValueError):
    """A batch contradicts itself; `field` names the part at fault ("ids", "lengths['tokens']", ...).

    >>> PackedBatch.from_documents(["text"])
    Traceback (most recent call last):
    penstock.data.checks.BatchError: sequences['tokens']: 'text' is not a list of numbers ...
    """

    #: the part at fault, and what is wrong with it
    field: str
    problem: str

    def __init__(self, field: str, problem: str):
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class PartitionError(ValueError):
    """Parts of a batch overlap, leave items out, or are empty; or indices are no permutation."""


class SplitError(ValueError):
    """A batch cannot be split as specified."""


class ItemTooLong(SplitError):
    """One item alone exceeds the token budget of a microbatch."""


class TooFewItems(SplitError):
    """There are fewer items than requested microbatches."""


class CorpusError(ValueError):
    """A corpus is missing, empty, unreadable, or does not fit the model."""


class LoaderStateError(ValueError):
    """A saved position belongs to another corpus, packing or order, or is damaged."""


def checked_ids(ids: Iterable[ItemId]) -> tuple[ItemId, ...]:
    """The ids as a tuple: at least one, each an int or a string, none twice."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise BatchError("ids", f"{ids!r} is {type_in_words(ids)}; give a list with an int or a string per item")
    result = tuple(ids)
    if not result:
        raise BatchError("ids", "a batch needs at least one item")
    for item_id in result:
        if type(item_id) is not int and type(item_id) is not str:
            raise BatchError("ids", f"{item_id!r} is {type_in_words(item_id)}; ids are ints or strings")
    if len(set(result)) != len(result):
        seen: set[ItemId] = set()
        repeated = next(i for i in result if i in seen or seen.add(i))
        raise BatchError("ids", f"{repeated!r} occurs more than once; ids must be unique")
    return result


def checked_lengths(key: str, lengths: Iterable[int | Iterable[int]], num_items: int) -> Lengths:
    """The lengths of each item's sequences; a bare int stands for an item of one sequence.

    Only tokens have a row in every sequence: an item may be without images, say.
    """
    least = 1 if key == "tokens" else 0
    field = f"lengths[{key!r}]"
    result = tuple((item,) if isinstance(item, int) else tuple(item) for item in lengths)
    if len(result) != num_items:
        raise BatchError(field, f"{len(result)} items, but there are {num_items} ids")
    for index, item in enumerate(result):
        if not item:
            raise BatchError(field, f"item {index} has no sequence; every item needs at least one")
        for length in item:
            if type(length) is not int:
                raise BatchError(field, f"item {index} has length {length!r}, {type_in_words(length)}, not an int")
            if length < least:
                raise BatchError(field, f"item {index} has length {length}; lengths are at least {least}")
    return result


def checked_metadata(metadata: Mapping[str, Sequence[Any]], num_items: int) -> dict[str, tuple[Any, ...]]:
    """Metadata as tuples, one value per item under each name."""
    for name, values in metadata.items():
        if not isinstance(values, (list, tuple)):
            raise BatchError(f"metadata[{name!r}]", f"{type_in_words(values)}; expected a list with a value per item")
        if len(values) != num_items:
            raise BatchError(f"metadata[{name!r}]", f"{len(values)} values, but there are {num_items} items")
    return {name: tuple(values) for name, values in metadata.items()}


def check_tables(**tables: Any) -> None:
    """Raise unless each of these, by field, is a mapping whose keys are names."""
    for field, table in tables.items():
        if not isinstance(table, Mapping):
            raise BatchError(field, f"{type_in_words(table)}; give a dict from names to values")
        for key in table:
            if not isinstance(key, str):
                raise BatchError(field, f"the key {key!r} is {type_in_words(key)}; keys are names")


def check_list(field: str, given: Any, kind: Any, what: str) -> None:
    """Raise unless `given` is a list, or the like, of objects of this kind; `what` names them in the plural."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise BatchError(field, f"{type_in_words(given)}; give a list of {what}")
    for item in given if isinstance(given, Sequence) else ():
        if not isinstance(item, kind) or isinstance(item, bool):
            raise BatchError(field, f"{item!r} is {type_in_words(item)}; give {what}")


def check_keys(expected: Iterable[str], found: Iterable[str], field: str) -> None:
    """Raise unless the keys `found` in `field` are exactly the `expected` ones."""
    wanted, present = set(expected), set(found)
    if wanted != present:
        missing, surplus = sorted(wanted - present), sorted(present - wanted)
        parts = [f"lacks {missing}"] * bool(missing) + [f"has {surplus} besides"] * bool(surplus)
        raise BatchError(field, f"{' and '.join(parts)}; its keys must be {sorted(wanted)}")


def check_tensor(key: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise unless `tensor` has the shape and dtype that the metadata declare."""
    field = f"data[{key!r}]"
    if not isinstance(tensor, Tensor):
        raise BatchError(field, f"{type_in_words(tensor)}; expected a tensor")
    if tuple(tensor.shape) != shape:
        raise BatchError(field, f"shape {tuple(tensor.shape)}; lengths and trailing shape promise {shape}")
    if tensor.dtype != dtype:
        raise BatchError(field, f"dtype {tensor.dtype}; declared is {dtype}")


def as_sequences(key: str, item: Any) -> list[Tensor]:
    """An item's sequences as tensors; the item is one sequence or a list of sequences."""
    nested = isinstance(item, (list, tuple)) and item and isinstance(item[0], (list, tuple, Tensor))
    try:
        sequences = [s if isinstance(s, Tensor) else torch.tensor(s) for s in (item if nested else [item])]
    except (TypeError, ValueError, RuntimeError):
        problem = f"{item!r} is not a list of numbers or a tensor; text becomes one through a tokenizer"
        raise BatchError(f"sequences[{key!r}]", problem) from None
    for index, sequence in enumerate(sequences):
        if sequence.dim() == 0:
            raise BatchError(f"sequences[{key!r}]", f"{item!r} is a number; an item is a list of numbers")
        if sequence.shape[0] == 0 and key == "tokens":
            raise BatchError(f"sequences[{key!r}]", f"sequence {index} of an item is empty; lengths are at least 1")
    return sequences
