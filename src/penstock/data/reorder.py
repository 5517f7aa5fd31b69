"""Outputs that were computed microbatch by microbatch, put back into the order of the batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.data.errors import PartitionError
from penstock.data.split import Split


def reorder(outputs: Any, split: Split, lengths: Sequence[int] | None = None) -> Any:
    """Outputs in the order of the batch's items, from the order in which the microbatches hold them.

    outputs: a tensor whose first dimension holds all items' rows end to end; or a list with one entry per item, of any
    type; or a mapping of such. lengths: rows per item of a tensor in the order of the *batch*; by default the items'
    lengths (for outputs that lack a row per item: those minus one; for one row per item: ones).

    Raises: `PartitionError` if lengths, rows or entries do not fit the number of items; `TypeError` for other types.
    """
    num_items = len(split.forward_indices)
    if isinstance(outputs, Mapping):
        return {name: reorder(value, split, lengths) for name, value in outputs.items()}
    if isinstance(outputs, (list, tuple)):
        if len(outputs) != num_items:
            raise PartitionError(f"{len(outputs)} outputs for {num_items} items; expected one per item")
        return type(outputs)([outputs[i] for i in split.backward_indices])
    if not isinstance(outputs, Tensor):
        raise TypeError(f"cannot put a {type(outputs).__name__} in order; expected a tensor, a list or a mapping")
    rows = tuple(lengths) if lengths is not None else split.item_lengths
    check_lengths(rows, num_items)
    if sum(rows) != outputs.shape[0]:
        raise PartitionError(f"output lengths {list(rows)} sum to {sum(rows)}; the output has {outputs.shape[0]} rows")
    pieces = outputs.split([rows[i] for i in split.forward_indices])
    return torch.cat([pieces[i] for i in split.backward_indices])


def merge(results: Sequence[Any], split: Split, lengths: Sequence[int] | None = None) -> Any:
    """One result per microbatch into one for the batch, in the order of its items.

    Tensors are joined along their first dimension, lists end to end, mappings key by key. What can not be taken apart
    (scalars, objects of any other type) comes back as a list, one per microbatch. lengths: rows per item, in the order
    of the batch; left out, a tensor may have a row per token, per sequence or per item.

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
    """One result per microbatch into one per item, in the order of the batch; None if they can not be taken apart.

    A tensor gives each item its rows, a list its entry, a mapping a mapping of such. `lengths` as in `merge`.

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
        return reorder([entry for result in results for entry in result], split)
    return None


def check_lengths(lengths: Sequence[int], num_items: int) -> None:
    """Refuse rows per item that can not be those of so many items. Raises: `PartitionError`."""
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


def _rows_per_item(given: Sequence[int], split: Split, lengths: Sequence[int] | None) -> Sequence[int]:
    """How many rows each item has, in the order of the batch, where the microbatches' results have `given` rows."""
    expected: dict[str, list[int]] = {}
    for what, rows in _candidates(split, lengths).items():
        of_items = iter(split.forward_indices)
        expected[what] = [sum(rows[next(of_items)] for _ in part.ids) for part in split.microbatches]
        if expected[what] == list(given):
            return rows
    told = ", ".join(f"{counts} for {what}" for what, counts in expected.items())
    raise PartitionError(f"the microbatches' results have {list(given)} rows; expected were {told}")


def _candidates(split: Split, lengths: Sequence[int] | None) -> dict[str, Sequence[int]]:
    num_items = len(split.forward_indices)
    if lengths is not None:
        check_lengths(lengths, num_items)
        return {"the output lengths given": lengths}
    first = split.microbatches[0]
    key = "tokens" if "tokens" in first else first.main_key
    items = [item for part in split.microbatches for item in part.lengths[key]]
    items = [items[i] for i in split.backward_indices]
    return {
        "a row per token": [sum(item) for item in items],
        "a row for each of the longest key": split.item_lengths,
        "a row per sequence": [len(item) for item in items],
        "a row per item": [1] * num_items,
    }
