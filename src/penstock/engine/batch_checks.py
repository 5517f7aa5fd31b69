"""Checks of what a caller gives: of the batch's numbers against the model, and of the other arguments' kinds.

All raise `ValueError`s before anything is computed: one sentence says what is wrong, where, and what is possible.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.data.checks import BatchError, DtypeMismatch, KeyMismatch, LengthError, ShapeMismatch
from penstock.model import Limits
from penstock.settings.arguments import type_in_words

_INTEGERS = (torch.int64, torch.int32)
_NO_LIMIT = sys.maxsize
# Ranks tell each other in 64 bits.
LAST_STEP = 2**63 - 1
# Keys that a model's own code reads token by token.
_PER_TOKEN = ("labels", "positions")


def check_batch(batch: Any, limits: Limits | None, reads_labels: bool) -> None:
    """Refuse a batch that a model of these limits cannot compute; None where they are not known.

    reads_labels: the labels are token ids.

    Raises:
        BatchError: naming the field, and the sequence and value at fault.
    """
    if not isinstance(batch, PackedBatch):
        raise BatchError(
            "batch", f"{type_in_words(batch)}; give a PackedBatch, as PackedBatch.from_documents makes of token ids"
        )
    if "tokens" not in batch:
        raise KeyMismatch(
            "keys",
            f"no 'tokens', which the first layer is given; this batch has {sorted(batch.keys)} (a layer of your own "
            "may take images or other rows under that name)",
        )
    if reads_labels and "labels" not in batch:
        raise KeyMismatch("keys", f"no 'labels', which the loss reads; this batch has {sorted(batch.keys)}")
    for key in _PER_TOKEN:
        if key in batch and (key != "labels" or reads_labels):
            _check_same_lengths(batch, key)
    if limits is not None:
        _check_longest(batch, limits.max_length)
    if batch.data is None:
        return
    # The first of a user's own layers may take anything that has more dimensions than token ids.
    if limits is not None or not batch.trailing_shapes["tokens"]:
        _check_ids(batch, "tokens")
    if limits is not None:
        _check_range(batch, "tokens", limits.vocab_size, f"the model knows 0 to {limits.vocab_size - 1}")
    if reads_labels:
        _check_ids(batch, "labels")
        # The classes that a user's own layers know are not known here, but none is negative.
        check_labels(batch, limits.vocab_size if limits is not None and limits.bounds_labels else None)
    if "positions" in batch and limits is not None and limits.reads_positions:
        if batch.dtypes["positions"] not in _INTEGERS:
            wrong = f"{batch.dtypes['positions']}; positions are torch.int64 or torch.int32"
            raise DtypeMismatch("data['positions']", wrong)
        _check_range(batch, "positions", limits.max_length, f"the model's positions are 0 to {limits.max_length - 1}")


def check_labels(batch: PackedBatch, num_classes: int | None) -> None:
    """Refuse labels that are no classes; without a number of classes, those that are negative. Raises: BatchError."""
    if batch.data is None:
        return
    possible = "and more" if num_classes is None else f"to {num_classes - 1}"
    known = f"possible are 0 {possible}, and {NO_LABEL} for a token without loss"
    _check_range(batch, "labels", num_classes or _NO_LIMIT, known, besides=NO_LABEL)


def check_callable(name: str, function: Any, arguments: str, optional: bool = False) -> None:
    """Refuse an argument that cannot be called. Raises: ValueError."""
    if optional and function is None:
        return
    if not callable(function):
        raise ValueError(f"{name}={function!r} is {type_in_words(function)}; give a function of ({arguments})")
    try:
        form = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return
    try:
        form.bind(*(arguments.split(", ") if arguments else ()))
    except TypeError:
        raise ValueError(f"{name} is a function of {form}; give one of ({arguments})") from None


def check_loss(loss_fn: Any, loss_weight_fn: Any) -> None:
    """Refuse a loss or its weight that cannot be called. Raises: ValueError."""
    check_callable("loss_fn", loss_fn, "output, microbatch")
    check_callable("loss_weight_fn", loss_weight_fn, "microbatch")


def check_step(number: Any) -> None:
    """Refuse anything but the number of a step. Raises: ValueError."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LAST_STEP:
        raise ValueError(f"step = {number!r} is not the number of a step; steps are counted from 1 to {LAST_STEP}")


def check_spec(spec: Any) -> None:
    """Refuse anything but a way to split. Raises: ValueError."""
    if spec is not None and not isinstance(spec, MicroBatchSpec):
        raise ValueError(f"micro_batches={spec!r} is {type_in_words(spec)}; give a MicroBatchSpec, or None")


def checked_weight(weight_fn: Callable[[PackedBatch], float], microbatch: PackedBatch, number: int) -> float:
    """The weight of a microbatch. Raises: ValueError unless it is a finite number of at least 0."""
    weight = weight_fn(microbatch)
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise ValueError(f"loss_weight_fn gave {type_in_words(weight)} for microbatch {number}; it gives a number")
    weight = float(weight)
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"loss_weight_fn gave {weight} for microbatch {number}; possible are numbers from 0 on")
    return weight


def _check_same_lengths(batch: PackedBatch, key: str) -> None:
    tokens, others = batch.sequence_lengths("tokens"), batch.sequence_lengths(key)
    for number, (length, other) in enumerate(zip(tokens, others, strict=False)):
        if length != other:
            raise LengthError(f"lengths[{key!r}]", f"sequence {number} has {other}, but {length} tokens")
    if len(tokens) != len(others):
        raise LengthError(f"lengths[{key!r}]", f"{len(others)} sequences, but there are {len(tokens)} of tokens")


def _check_longest(batch: PackedBatch, max_length: int) -> None:
    for number, length in enumerate(batch.sequence_lengths("tokens")):
        if length > max_length:
            raise LengthError("lengths['tokens']", f"sequence {number} has {length}, past max_length={max_length}")


def _check_ids(batch: PackedBatch, key: str) -> None:
    if batch.dtypes[key] not in _INTEGERS:
        raise DtypeMismatch(f"data[{key!r}]", f"{batch.dtypes[key]}; token ids are torch.int64 or torch.int32")
    if batch.trailing_shapes[key]:
        raise ShapeMismatch(f"data[{key!r}]", f"shape {list(batch[key].shape)}; token ids have one dimension")


def _check_range(batch: PackedBatch, key: str, end: int, possible: str, besides: int | None = None) -> None:
    """Raise unless all values are in 0 ... end - 1, or equal to `besides`; names the first that is not."""
    values = batch[key].flatten()
    if besides is not None:
        values = values.masked_fill(values == besides, 0)
    if not values.numel():
        return
    least, most = (int(value) for value in values.aminmax())
    if least >= 0 and most < end:
        return
    place = int(((values < 0) | (values >= end)).nonzero()[0])
    # A position may have several numbers.
    row = place // (values.numel() // max(1, batch[key].shape[0]))
    starts = [0, *accumulate(batch.sequence_lengths(key))]
    number = bisect_right(starts, row) - 1
    raise BatchError(
        f"data[{key!r}]", f"sequence {number} has {int(values[place])} at its place {row - starts[number]}; {possible}"
    )
