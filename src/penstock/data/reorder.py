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
    if len(rows) != num_items:
        raise PartitionError(f"{len(rows)} output lengths for {num_items} items; expected one per item")
    if min(rows) < 0 or sum(rows) != outputs.shape[0]:
        raise PartitionError(f"output lengths {list(rows)} sum to {sum(rows)}; the output has {outputs.shape[0]} rows")
    pieces = outputs.split([rows[i] for i in split.forward_indices])
    return torch.cat([pieces[i] for i in split.backward_indices])


def merge(results: Sequence[Any], split: Split, lengths: Sequence[int] | None = None) -> Any:
    """One result per microbatch into one for the batch, in the order of its items.

    Tensors are joined along their first dimension, lists end to end, mappings key by key, and then put in order.
    Results of any other type cannot be taken apart: they come back as a list, one per microbatch.

    Raises: `PartitionError` as `reorder`, or if the results are not one per microbatch of one type.
    """
    if len(results) != len(split.microbatches):
        raise PartitionError(f"{len(results)} results for {len(split.microbatches)} microbatches")
    first = results[0]
    kind = next((k for k in (Tensor, Mapping, list, tuple) if isinstance(first, k)), None)
    if kind is None:
        return list(results)
    if not all(isinstance(result, kind) for result in results):
        raise PartitionError(f"results of different types: {sorted({type(result).__name__ for result in results})}")
    if kind is Tensor:
        return reorder(torch.cat(list(results)), split, lengths)
    if isinstance(first, Mapping):
        if any(result.keys() != first.keys() for result in results):
            raise PartitionError("results with different keys")
        return {name: merge([result[name] for result in results], split, lengths) for name in first}
    return reorder([entry for result in results for entry in result], split, lengths)
