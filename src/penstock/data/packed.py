"""A batch of packed sequences: items laid end to end without padding, and the metadata that every rank needs.

Shape suffixes: T all tokens of a key end to end; a key's trailing shape follows it.
"""

import hashlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Self

import torch
from torch import Tensor

from penstock.io.files import parse_json
from penstock.settings.declare import NamedValue, match, mismatch, type_in_words

ItemId = int | str
Lengths = tuple[tuple[int, ...], ...]

NO_LABEL = -100  # the default `ignore_index` of PyTorch's cross entropy


class BatchError(ValueError):
    """A batch contradicts itself; `field` names the part at fault ("ids", "lengths['tokens']", ...).

    >>> PackedBatch.from_documents(["text"])
    Traceback (most recent call last):
    penstock.data.packed.BatchError: sequences['tokens']: 'text' is not a list of numbers ...
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
    """A batch cannot be divided as asked, its parts overlap or leave items out, or results do not fit its items."""


class Extent(NamedValue):
    """The rows of a key that is added to a batch: one per item, per token, or per token but each sequence's first.

    >>> batch = PackedBatch.from_documents([[5, 6, 7], [8, 9]])
    >>> batch.with_key("rewards", torch.zeros(2), "item").item_lengths("rewards")
    (1, 1)
    """

    ITEM = "item"
    TOKEN = "token"
    TRANSITION = "transition"


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Items of one or more sequences each, packed key by key; with its data, or as metadata alone.

    Every rank of a pipeline holds the same metadata, so that shapes are never negotiated; only stages that read a key
    need its data. A batch is immutable: each method returns a new one, which may share tensors with this one.

    ids: one per item, unique. lengths: key -> per item -> per sequence. data: key -> tensor [T, *trailing shape], or
    None for metadata alone. metadata: name -> one value per item; it follows its item through every method.

    Raises: a `BatchError` that names the field, if the parts contradict each other.

    >>> batch = PackedBatch.from_documents([torch.tensor([5, 6, 7]), torch.tensor([8, 9])])
    >>> batch.num_items, batch.num_tokens, batch["tokens"].tolist()
    (2, 5, [5, 6, 7, 8, 9])
    """

    ids: tuple[ItemId, ...]
    lengths: Mapping[str, Lengths]
    dtypes: Mapping[str, torch.dtype]
    trailing_shapes: Mapping[str, tuple[int, ...]]
    data: Mapping[str, Tensor] | None
    metadata: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        ids = checked_ids(self.ids)
        if not self.lengths:
            raise BatchError("lengths", "a batch needs at least one key")
        lengths = {key: checked_lengths(key, value, len(ids)) for key, value in self.lengths.items()}
        check_tables(lengths=self.lengths, metadata=self.metadata)
        tables = [name for name in _TABLES[1:] if getattr(self, name) is not None]
        check_tables(**{name: getattr(self, name) for name in tables})
        for name in tables:
            check_keys(lengths, getattr(self, name), name)
        shapes = {key: tuple(self.trailing_shapes[key]) for key in lengths}
        for key in lengths:
            if not isinstance(dtype := self.dtypes[key], torch.dtype):
                raise BatchError(f"dtypes[{key!r}]", f"{dtype!r} is not a torch dtype")
            if any(type(size) is not int or size < 0 for size in shapes[key]):
                raise BatchError(f"trailing_shapes[{key!r}]", f"{shapes[key]} is not a shape")
        self.__dict__.update(
            ids=ids,
            lengths=lengths,
            dtypes={key: self.dtypes[key] for key in lengths},
            trailing_shapes=shapes,
            metadata=checked_metadata(self.metadata, len(ids)),
        )
        if self.data is not None:
            data = {key: self.data[key] for key in lengths}
            for key, tensor in data.items():
                check_tensor(key, tensor, (sum(self.item_lengths(key)), *shapes[key]), self.dtypes[key])
            self.__dict__.update(data=data)

    # ---- making one

    @classmethod
    def trusted(cls, **parts: Any) -> Self:
        """Make a batch without checks, of fields that are known to agree because they come from a checked batch."""
        batch = object.__new__(cls)
        batch.__dict__.update(parts)
        return batch

    @classmethod
    def from_data(
        cls,
        data: Mapping[str, Tensor],
        lengths: Mapping[str, Iterable[int | Iterable[int]]],
        ids: Iterable[ItemId] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Make a batch of tensors that are already packed; ids default to 0, 1, ..."""
        check_tables(lengths=lengths, data=data)
        check_keys(lengths, data, "data")
        for key, tensor in data.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise BatchError(f"data[{key!r}]", "expected a tensor of at least one dimension")
        listed: dict[str, Any] = {key: list(value) for key, value in lengths.items()}
        num_items = len(next(iter(listed.values()), ()))
        return cls(
            ids=checked_ids(ids) if ids is not None else tuple(range(num_items)),
            lengths=listed,
            dtypes={key: tensor.dtype for key, tensor in data.items()},
            trailing_shapes={key: tuple(tensor.shape[1:]) for key, tensor in data.items()},
            data=data,
            metadata=metadata or {},  # pyright: ignore[reportArgumentType]
        )

    @classmethod
    def from_sequences(
        cls,
        sequences: Mapping[str, Sequence[Any]],
        ids: Iterable[ItemId] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> Self:
        """Pack sequences: key -> per item a list of numbers or a tensor, or a list of these.

        `from_sequences({"tokens": [[5, 6, 7], [8, 9]], "rewards": [[0.5], [1.0]]})` packs two items. Whole numbers
        become int64, others float32. An item may be without rows of any key but "tokens": `[]`.
        """
        check_tables(sequences=sequences)
        data: dict[str, Tensor] = {}
        lengths: dict[str, list[list[int]]] = {}
        for key, items in sequences.items():
            if isinstance(items, str) or not isinstance(items, Iterable):
                raise BatchError(f"sequences[{key!r}]", f"{type_in_words(items)}; give a list of items")
            per_item = [as_sequences(key, item) for item in items]
            flat = list(chain.from_iterable(per_item))
            if not flat:
                raise BatchError(f"sequences[{key!r}]", "has no item")
            # An empty list says nothing of the rows that it lacks.
            rows = next((s for s in flat if s.shape[0]), flat[0])
            flat = [rows[:0] if s.shape == (0,) else s for s in flat]
            if len({(s.dtype, s.shape[1:]) for s in flat}) > 1:
                raise BatchError(f"sequences[{key!r}]", "the sequences differ in dtype or trailing shape")
            lengths[key] = [[s.shape[0] for s in item] for item in per_item]
            data[key] = torch.cat(flat)
        return cls.from_data(data, lengths, ids, metadata)

    @classmethod
    def from_documents(
        cls,
        documents: Sequence[Any],
        ids: Iterable[ItemId] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> "PackedBatch":
        """Make a batch to train on: token ids under "tokens", and the next token of each under "labels".

        The last token of a sequence has no next token; its label is `NO_LABEL`.
        """
        batch = cls.from_sequences({"tokens": documents}, ids, metadata)
        labels_T = torch.roll(batch["tokens"], -1)
        ends = torch.tensor(list(accumulate(batch.sequence_lengths("tokens"))), device=labels_T.device) - 1
        labels_T[ends] = NO_LABEL
        return batch.with_key("labels", labels_T)

    # ---- asking

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the packed tensors."""
        return tuple(self.lengths)

    @property
    def num_items(self) -> int:
        """The number of items, which a split never cuts."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """The total length of the main key."""
        return sum(self.item_lengths(self.main_key))

    @cached_property
    def main_key(self) -> str:
        """The key with the largest total length, which measures load; ties go to "tokens", else the first by name."""
        return min(self.lengths, key=lambda key: (-sum(self.item_lengths(key)), key != "tokens", key))

    def sequence_lengths(self, key: str = "tokens") -> tuple[int, ...]:
        """The length of every sequence of every item, in order; attention stays within a sequence."""
        return tuple(chain.from_iterable(self._lengths_of(key)))

    def item_lengths(self, key: str = "tokens") -> tuple[int, ...]:
        """The length of every item: the sum over its sequences."""
        return tuple(map(sum, self._lengths_of(key)))

    def __getitem__(self, key: str) -> Tensor:
        self._lengths_of(key)
        if self.data is None:
            raise BatchError(f"data[{key!r}]", "this batch holds metadata alone")
        return self.data[key]

    def __contains__(self, key: str) -> bool:
        return key in self.lengths

    def __repr__(self) -> str:
        place = "metadata alone" if self.data is None else f"on {next(iter(self.data.values())).device}"
        return f"PackedBatch({self.num_items} items, {self.num_tokens} tokens, keys {list(self.keys)}, {place})"

    def digest(self) -> int:
        """A hash (63 bits) of ids, keys and lengths, the same in every process; equal digests mean equal shapes."""
        text = json.dumps([self.ids, sorted(self.lengths.items())], separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def contents_digest(self) -> int:
        """A hash (32 bits) of the data, the same in every process; 0 for metadata alone."""
        value = 0
        for key in sorted(self.data or ()):
            rows = self[key].detach().cpu().contiguous().flatten()
            data: Any = rows.view(torch.uint8).numpy()
            value = zlib.crc32(data, zlib.crc32(key.encode(), value))
        return value

    def _lengths_of(self, key: str) -> Lengths:
        try:
            return self.lengths[key]
        except (KeyError, TypeError):
            raise BatchError("keys", f"no {key!r}; this batch has {sorted(self.lengths)}") from None

    # ---- items: joining, cutting, ordering

    @classmethod
    def gather(cls, batches: Sequence["PackedBatch"], keys: Iterable[str] | None = None) -> "PackedBatch":
        """Join the items of all batches in order, with the keys of the first batch or those given.

        Raises: `BatchError` if an id occurs twice, or keys, dtypes, trailing shapes or metadata names differ, or some
        batches have data and some not.
        """
        check_list("batches", batches, PackedBatch, "batches")
        if not batches:
            raise BatchError("ids", "nothing to gather")
        first = batches[0].select(keys if keys is not None else batches[0].keys)
        parts = [first, *(batch.select(first.keys) for batch in batches[1:])]
        for part in parts[1:]:
            check_keys(first.metadata, part.metadata, "metadata")
            if part.dtypes != first.dtypes:
                raise BatchError("dtypes", f"{dict(part.dtypes)} in one batch, {dict(first.dtypes)} in the first")
            if part.trailing_shapes != first.trailing_shapes:
                raise BatchError("trailing_shapes", "differ between the batches")
            if (part.data is None) != (first.data is None):
                raise BatchError("data", "some of the batches hold metadata alone")
        return first.with_parts(
            ids=checked_ids(chain.from_iterable(part.ids for part in parts)),
            lengths={key: tuple(chain.from_iterable(part.lengths[key] for part in parts)) for key in first.keys},
            data=None if first.data is None else {key: torch.cat([part[key] for part in parts]) for key in first.keys},
            metadata={name: tuple(chain.from_iterable(p.metadata[name] for p in parts)) for name in first.metadata},
        )

    def unpack(self) -> tuple["PackedBatch", ...]:
        """One batch per item."""
        return self.split_with([1] * self.num_items)

    def split_with(self, parts: Sequence[int] | Sequence[range]) -> tuple["PackedBatch", ...]:
        """Cut into contiguous parts, given by numbers of items or as ranges; tensors are views of this batch's.

        Raises: ValueError unless the parts are non-empty, in order, and cover every item once.
        """
        check_list("parts", parts, int | range, "numbers of items, or ranges of them")
        ranges, start = [], 0
        for part in parts:
            items = part if isinstance(part, range) else range(start, start + part)
            if items.start != start or items.step != 1 or len(items) == 0:
                raise PartitionError(
                    f"{part} is no part of the items from {start} on; parts are non-empty and adjacent"
                )
            ranges.append(items)
            start = items.stop
        if start != self.num_items:
            raise PartitionError(f"the parts {list(parts)} cover {start} items, but the batch has {self.num_items}")
        return self.divided(ranges)

    def reorder(self, indices: Sequence[int]) -> "PackedBatch":
        """Reorder the items: the new item i is the old item `indices[i]`.

        Raises: ValueError if `indices` is not a permutation.
        """
        check_list("indices", indices, int, "whole numbers")
        if sorted(indices) != list(range(self.num_items)):
            raise PartitionError(f"{list(indices)} is not a permutation of the {self.num_items} items")
        if list(indices) == list(range(self.num_items)):
            return self
        return self.divided([indices])[0]

    def divided(self, groups: Sequence[Sequence[int]]) -> tuple["PackedBatch", ...]:
        """A batch of each group of items; neighbours, in their order, stay views of this batch's tensors."""
        # Once for keys that share a table, as tokens and labels do.
        tables = {id(table): table for table in self.lengths.values()}
        pieces, ends = dict[str, Sequence[Tensor]](), dict[str, list[int]]()
        for key in self.data or ():
            lengths = self.item_lengths(key)
            pieces[key], ends[key] = self[key].split(lengths), list(accumulate(lengths, initial=0))
        parts: list[PackedBatch] = []
        for items in groups:
            first, last = items[0], items[-1] + 1
            are_neighbours = list(items) == list(range(first, last))
            chosen = {number: tuple(table[i] for i in items) for number, table in tables.items()}
            data = {
                key: self[key][ends[key][first] : ends[key][last]]
                if are_neighbours
                else torch.cat([of_key[i] for i in items])
                for key, of_key in pieces.items()
            }
            part = self.with_parts(
                ids=tuple(self.ids[i] for i in items),
                lengths={key: chosen[id(table)] for key, table in self.lengths.items()},
                data=None if self.data is None else data,
                metadata={name: tuple(values[i] for i in items) for name, values in self.metadata.items()},
            )
            parts.append(part)
        return tuple(parts)

    def shuffled(self, seed: int) -> "PackedBatch":
        """The items in a random order that depends only on the seed and the number of items."""
        indices = list(range(self.num_items))
        random.Random(seed).shuffle(indices)
        return self.reorder(indices)

    # ---- keys

    def select(self, keys: Iterable[str]) -> "PackedBatch":
        """A batch of these items with only these keys."""
        if not isinstance(keys, str):
            check_list("keys", keys, str, "names")
        names = (keys,) if isinstance(keys, str) else tuple(keys)
        if not names:
            raise BatchError("keys", "a batch needs at least one key")
        for key in names:
            self._lengths_of(key)
        return self._with_tables(lambda table: {key: table[key] for key in names})

    def remap(self, names: Mapping[str, str]) -> "PackedBatch":
        """A batch of these items with keys renamed, old name -> new name; other keys stay."""
        for old in names:
            self._lengths_of(old)
        new = [names.get(key, key) for key in self.keys]
        if len(set(new)) != len(new):
            raise BatchError("keys", f"renaming {dict(names)} would give two keys the same name")
        renamed = dict(zip(self.keys, new, strict=True))
        return self._with_tables(lambda table: {renamed[key]: value for key, value in table.items()})

    def update(self, other: "PackedBatch") -> "PackedBatch":
        """Add the other batch's keys and metadata, replacing those of the same name.

        Raises: `BatchError` unless both have the same ids in the same order, and both have data or neither.
        """
        if self.ids != other.ids:
            raise BatchError("ids", "the batches do not hold the same items in the same order")
        if (self.data is None) != (other.data is None):
            raise BatchError("data", "one of the batches holds metadata alone")
        tables = [name for name in _TABLES if getattr(self, name) is not None]
        return self.with_parts(
            **{name: {**getattr(self, name), **getattr(other, name)} for name in tables},
            metadata={**self.metadata, **other.metadata},
        )

    def with_key(self, key: str, data: Tensor, extent: Extent | str = Extent.TOKEN) -> "PackedBatch":
        """Add a key whose lengths follow from the main key's; for other lengths use `update`.

        Raises: `BatchError` for an extent other than "item", "token" or "transition", a key that is there already, or
        data of other lengths.
        """
        is_one, extent = match(Extent, extent)
        if not is_one:
            raise BatchError("extent", mismatch("extent", extent, Extent))
        if key in self.lengths:
            raise BatchError("keys", f"{key!r} is there already")
        main = self.lengths[self.main_key]
        if extent is Extent.TOKEN:
            lengths = main
        elif extent is Extent.ITEM:
            lengths = ((1,),) * self.num_items
        else:
            lengths = tuple(tuple(length - 1 for length in item) for item in main)
        added = PackedBatch.from_data({key: data}, {key: lengths}, self.ids)
        return self.update(added.with_parts(lengths={key: lengths}))

    # ---- data and form

    def without_data(self) -> "PackedBatch":
        """The metadata alone, which is all that a middle stage needs."""
        return self.with_parts(data=None)

    def with_data(self, data: Mapping[str, Tensor]) -> "PackedBatch":
        """A batch of this metadata and this data, checked against it."""
        return PackedBatch(self.ids, self.lengths, self.dtypes, self.trailing_shapes, data, self.metadata)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch with its data on a device; copies to an accelerator do not block."""
        if self.data is None:
            return self
        non_blocking = torch.device(device).type != "cpu"
        return self.with_parts(data={key: x.to(device, non_blocking=non_blocking) for key, x in self.data.items()})

    def on_device(self, data: Mapping[str, Tensor]) -> "PackedBatch":
        """This batch with copies of some of its data on a device; their `host` is this batch."""
        if self.data is None:
            return self
        copy = self.with_parts(data={**self.data, **data})
        copy.__dict__["_host"] = self
        return copy

    @property
    def host(self) -> "PackedBatch":
        """The batch from which `on_device` made this one, whose values are read without waiting; else this one."""
        return self.__dict__.get("_host", self)

    def to_json(self) -> str:
        """Everything but the data as JSON; metadata must consist of JSON values."""
        dtypes = {key: str(dtype).removeprefix("torch.") for key, dtype in self.dtypes.items()}
        spec = {"ids": self.ids, "lengths": self.lengths, "dtypes": dtypes}
        return json.dumps({**spec, "trailing_shapes": self.trailing_shapes, "metadata": self.metadata})

    @classmethod
    def from_json(cls, text: str) -> "PackedBatch":
        """Read the metadata that `to_json` wrote, and check it.

        Raises: `BatchError` naming the field that is missing or wrong.
        """
        try:
            spec = parse_json(text)
        except ValueError as error:
            raise BatchError("json", f"not JSON: {error}") from error
        names = {field.name for field in fields(cls)} - {"data"}
        check_keys(names, spec if isinstance(spec, dict) else (), "json")
        dtypes = {key: getattr(torch, str(name), name) for key, name in spec["dtypes"].items()}
        return cls(**{**spec, "dtypes": dtypes, "data": None})

    def with_parts(self, **changes: Any) -> "PackedBatch":
        """The batch with some of its fields replaced, unchecked: they are known to agree with the others."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return PackedBatch.trusted(**{**parts, **changes})

    def _with_tables(self, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> "PackedBatch":
        return self.with_parts(**{name: change(of) for name in _TABLES if (of := getattr(self, name)) is not None})


# The fields that are kept by key.
_TABLES = ("lengths", "dtypes", "trailing_shapes", "data")


# ---- Checks of what a batch is made of, each naming the field at fault


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
        ((repeated, _),) = Counter(result).most_common(1)
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


def check_list(field: str, items: Any, kind: Any, what: str) -> None:
    """Raise unless `items` is a list, or the like, of objects of this kind; `what` names them in the plural."""
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise BatchError(field, f"{type_in_words(items)}; give a list of {what}")
    for item in items if isinstance(items, Sequence) else ():
        if not isinstance(item, kind) or isinstance(item, bool):
            raise BatchError(field, f"{item!r} is {type_in_words(item)}; give {what}")


def check_keys(expected: Iterable[str], names: Iterable[str], field: str) -> None:
    """Raise unless the keys `names` of `field` are exactly the `expected` ones."""
    wanted, present = set(expected), set(names)
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
