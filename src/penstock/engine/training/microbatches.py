"""A batch checked, and split into microbatches, the same number on every rank, with one small collective."""

from __future__ import annotations

import inspect
import math
import numbers
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from penstock.data import NO_LABEL, BatchError, MicroBatchSpec, PackedBatch, Split, SplitError, agree, count, split
from penstock.engine.pipeline import Pipeline
from penstock.model import Limits, argument_of, numbers_asked, reduction_of_labels
from penstock.parallel.host import gather_json, gather_rows, shown_to_all_ranks
from penstock.runtime import PipelineError
from penstock.settings import TrainConfig
from penstock.settings.declare import type_in_words

# ---- Checks of what a caller gives: of the batch's numbers against the model, and of the other arguments' kinds


_INTEGERS = (torch.int64, torch.int32)
_NO_INT_LIMIT = sys.maxsize
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
            "batch",
            f"{type_in_words(batch)}; give a PackedBatch, as PackedBatch.from_documents makes of token ids, or a list "
            "or an iterator of microbatches, each a PackedBatch",
        )
    if "tokens" not in batch:
        raise BatchError(
            "keys",
            f"no 'tokens', which the first layer is given; this batch has {sorted(batch.keys)} (a layer of your own "
            "may take images or other rows under that name)",
        )
    if reads_labels and "labels" not in batch:
        raise BatchError("keys", f"no 'labels', which the loss reads; this batch has {sorted(batch.keys)}")
    tokens = batch.sequence_lengths("tokens")
    for key in _PER_TOKEN:
        if key not in batch or (key == "labels" and not reads_labels):
            continue
        others = batch.sequence_lengths(key)
        for number, (length, other) in enumerate(zip(tokens, others, strict=False)):
            if length != other:
                raise BatchError(f"lengths[{key!r}]", f"sequence {number} has {other}, but {length} tokens")
        if len(tokens) != len(others):
            raise BatchError(f"lengths[{key!r}]", f"{len(others)} sequences, but there are {len(tokens)} of tokens")
    if limits is not None and max(tokens) > limits.max_length:
        number = next(number for number, length in enumerate(tokens) if length > limits.max_length)
        wrong = f"sequence {number} has {tokens[number]}, past max_length={limits.max_length}"
        raise BatchError("lengths['tokens']", wrong)
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
            raise BatchError("data['positions']", wrong)
        _check_range(batch, "positions", limits.max_length, f"the model's positions are 0 to {limits.max_length - 1}")


def check_labels(batch: PackedBatch, num_classes: int | None) -> None:
    """Refuse labels that are no classes; without a number of classes, those that are negative. Raises: BatchError."""
    if batch.data is None:
        return
    possible = "and more" if num_classes is None else f"to {num_classes - 1}"
    known = f"possible are 0 {possible}, and {NO_LABEL} for a token without loss"
    _check_range(batch, "labels", num_classes or _NO_INT_LIMIT, known, besides=NO_LABEL)


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
        form.bind(*(arguments.split(", ") if arguments else ()), **dict.fromkeys(numbers_asked(function)))
    except TypeError:
        raise ValueError(f"{name} is a function of {form}; give one of ({arguments})") from None


def check_loss(loss_fn: Any, loss_weight_fn: Any) -> None:
    """Refuse a loss or its weight that cannot be called. Raises: ValueError."""
    check_callable("loss_fn", loss_fn, "output, microbatch")
    if (reduction := reduction_of_labels(loss_fn)) == "":
        raise ValueError(
            "loss_fn takes (logits, labels) and does not say what it gives of them; give "
            "Labels(loss_fn, reduction='mean') or 'sum', or let it have an attribute `reduction`, as torch's losses do"
        )
    if reduction not in (None, "mean", "sum"):
        raise ValueError(f"loss_fn has reduction={reduction!r}; a loss of (logits, labels) has 'mean' or 'sum'")
    if reduction is not None and (ignored := argument_of(loss_fn, "ignore_index", NO_LABEL)) != NO_LABEL:
        raise ValueError(f"loss_fn has ignore_index={ignored}; tokens without a label have {NO_LABEL} here")
    if reduction is not None and argument_of(loss_fn, "weight", None) is not None:
        raise ValueError("loss_fn has a weight for each class; a loss of (output, microbatch) that gives a sum may")
    check_callable("loss_weight_fn", loss_weight_fn, "microbatch")


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


def _check_ids(batch: PackedBatch, key: str) -> None:
    if batch.dtypes[key] not in _INTEGERS:
        raise BatchError(f"data[{key!r}]", f"{batch.dtypes[key]}; token ids are torch.int64 or torch.int32")
    if batch.trailing_shapes[key]:
        raise BatchError(f"data[{key!r}]", f"shape {list(batch[key].shape)}; token ids have one dimension")


def _check_range(batch: PackedBatch, key: str, end: int, possible: str, besides: int | None = None) -> None:
    """Raise unless all values are in 0 ... end - 1, or equal to `besides`; names the first that is not."""
    values = batch[key].flatten()
    if besides is not None:
        values = values.masked_fill(values == besides, 0)
    if not values.numel():
        return
    least, most = map(int, values.aminmax())
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


# ---- The split of a batch into microbatches, the same number on every rank, with one small collective


BY_DEFAULT = MicroBatchSpec(num=TrainConfig().num_microbatches, allow_fewer=True)
"""The microbatches of a call that names none: as many as those of a run that names none, whatever the layout.

So another layout changes no bit. Fewer where the batch has fewer items.
"""

_NOTHING = Split((), (), (), ())
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class BatchReport:
    """One rank's view of its batch: whole numbers of 64 bits, numbers and truth values, sent in this order."""

    #: tokens of the rank's batch
    num_tokens: int = 0
    #: the numbers that data-parallel ranks need to split alike, see `penstock.data.SplitCounts`
    wanted: int = 0
    needed: int = 0
    num_items: int = 0
    longest_item: int = 0
    #: the number of microbatches that the rank has split into so far
    num_microbatches: int = 0
    #: covers ids, keys and lengths
    digest: int = 0
    #: covers the data; 0 for metadata alone
    contents: int = 0
    #: covers the engine's method and its settings
    job: int = 0
    #: the sum of the loss weights
    weight: float = 0.0
    #: True if the rank cannot go on with its batch
    failed: bool = False
    #: True if the rank was asked to end after the step
    stop: bool = False
    #: True if a parameter of the rank was frozen or thawed since the last step
    refit: bool = False
    #: the step's number
    step: int = 0
    #: True if the rank has no batch left; its counts then ask for nothing
    ended: bool = False
    #: True if the rank has callbacks
    watched: bool = False
    #: True if its microbatches are drawn from a source in the course of the call
    drawn: bool = False

    @classmethod
    def of_end(cls) -> BatchReport:
        """The report of a rank that has no batch left."""
        return cls(num_items=_NO_LIMIT, ended=True)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.wanted, self.needed, self.num_items, self.longest_item

    def __str__(self) -> str:
        if self.ended:
            return "no batch left"
        if self.drawn:
            return f"a source of {self.num_microbatches} microbatches"
        asked = f"{self.num_items} items, {self.num_tokens} tokens, asks for {self.wanted} microbatches"
        return f"{asked}, digest {self.digest:x}, contents {self.contents:08x}"


_LETTERS = {"int": "q", "float": "d", "bool": "?"}
_ROW = struct.Struct("<" + "".join(_LETTERS[str(own.type)] for own in fields(BatchReport)))
"""A report as bytes, equally many for every one, so that one small collective shows it to all ranks."""


@dataclass(frozen=True)
class BatchCall:
    """The engine's method that a batch was given to."""

    #: its name, with the settings that must be the same on all ranks
    name: str
    #: refuses other arguments by an exception
    check: Callable[[], object] = lambda: None
    #: True if labels are token ids, which a loss or a score reads
    reads_labels: bool = False
    #: a microbatch's loss weight; None where there are no losses
    loss_weight_fn: Callable[[PackedBatch], float] | None = None
    #: what else this rank reports, such as a wish to end after the step
    asked: BatchReport = BatchReport()


@dataclass(frozen=True)
class AgreedSplit:
    """A split that all ranks agree on."""

    #: this rank's microbatches, and where their items stand in the batch
    split: Split
    #: the loss weight of each microbatch; empty where the rank does not see labels
    weights: Sequence[float]
    #: data-parallel rank -> the sum of its loss weights
    rank_totals: Sequence[float]
    #: tokens of all data-parallel ranks
    num_tokens: int
    #: True if some rank asks all to end after this step
    stop_requested: bool
    #: True if on some rank a parameter was frozen or thawed since the last step
    refit: bool = False
    #: data-parallel ranks that have no batch left, in order
    ended: Sequence[int] = ()
    #: the number of this rank's microbatches
    num: int = 0
    #: the same microbatches in order, or where they are drawn in the course of the call, the object that draws them
    microbatches: Iterable[PackedBatch] = ()
    #: True if they are drawn, and `split` is empty
    is_drawn: bool = False
    #: this rank's source; None where it has none
    source: Iterator[Any] | None = None
    #: by rank, True if it has one
    has_source: Sequence[bool] = ()
    #: the most tokens of a microbatch that is drawn, if any
    max_tokens: int | None = None

    def places(self, step: int) -> Iterator[tuple[int, int, int]]:
        """The `penstock.model.NUMBERS` of each microbatch in a step of that number."""
        return ((number, self.num, step) for number in range(self.num))


def agree_on_microbatches(
    pipeline: Pipeline, batch: PackedBatch | Iterable[PackedBatch] | None, spec: MicroBatchSpec | None, call: BatchCall
) -> AgreedSplit:
    """Split the batch, report the result to all ranks, and split again if another rank needs more microbatches.

    A rank that has `ended` gives no batch, and gets no microbatches. A user's own microbatches stay as they are. spec:
    left out, `BY_DEFAULT`.

    Raises:
        SplitError: the batch cannot be split so; on all ranks alike.
        ValueError: this rank cannot use its batch or another argument; it says why on all ranks.
        PipelineError: the same on another rank, or ranks of one pipeline hold different batches.
    """
    (view, own, error), num = _seen(pipeline, batch, spec, call), None
    spec = spec if isinstance(spec, MicroBatchSpec) else BY_DEFAULT
    if isinstance(batch, PackedBatch):
        view = replace(view, num_tokens=batch.num_tokens, digest=batch.digest(), contents=batch.contents_digest())
        view = replace(view, **count(batch, spec)._asdict())
    while True:
        parts, weights, report = None, [], replace(view, failed=True)
        try:
            if error is not None:
                raise error
            parts = own or split(batch, spec, num)  # pyright: ignore[reportArgumentType]  # where it is no own split
            if own is None and (pipeline.context is not None or pipeline.own_layers is not None):
                _check_parts(pipeline, batch, parts.microbatches, call.reads_labels)
            if pipeline.holds_last_stage and (weight_fn := call.loss_weight_fn) is not None:
                weights = [checked_weight(weight_fn, m, i) for i, m in enumerate(parts.microbatches)]
            num_own = view.wanted if view.drawn else len(parts.microbatches)
            report = replace(view, num_microbatches=num_own, weight=sum(weights))
        except Exception as exception:
            error = exception
        with pipeline.recorder.collective("agree on the batch"):
            rows = gather_rows("batch", _ROW.pack(*astuple(report)), pipeline.grid.control)
        reports = [BatchReport(*_ROW.unpack(row)) for row in rows]
        kinds = _kinds(reports)
        if all(any(r.counts) for r in reports) and len(kinds) <= 1:
            num = agree([r.counts for r in reports], spec)
        _check_alike(pipeline, reports, call.name, error)
        if parts is not None and all(r.ended or r.num_microbatches == num for r in reports):
            break
    pipeline.is_watched_anywhere = any(r.watched for r in reports)
    seeing_labels = [reports[rank] for rank in pipeline.output_ranks]
    return AgreedSplit(
        parts,
        weights,
        rank_totals=[r.weight for r in seeing_labels],
        num_tokens=sum(r.num_tokens for r in seeing_labels),
        stop_requested=any(r.stop for r in reports),
        refit=any(r.refit for r in reports),
        ended=[dp for dp, r in enumerate(seeing_labels) if r.ended],
        num=0 if view.ended else num or 0,
        microbatches=parts.microbatches,
        is_drawn=any(kinds),
        source=iter(batch) if view.drawn and isinstance(batch, Iterable) else None,
        has_source=[r.contents > 0 for r in reports],
        max_tokens=spec.max_tokens,
    )


def _seen(
    pipeline: Pipeline, batch: Any, spec: MicroBatchSpec | None, call: BatchCall
) -> tuple[BatchReport, Split | None, Exception | None]:
    """A rank's report on what it was given, the user's own split if it is one, and why it cannot be used, if so."""
    view = replace(call.asked, job=crc32(call.name.encode()), watched=pipeline.is_watched)
    own = None if isinstance(batch, PackedBatch) else _NOTHING
    try:
        if spec is not None and not isinstance(spec, MicroBatchSpec):
            raise ValueError(f"micro_batches={spec!r} is {type_in_words(spec)}; give a MicroBatchSpec, or None")
        if own is None:
            check_batch(batch, pipeline.units[0].limits, call.reads_labels)
        elif not view.ended:
            own, view = _own_microbatches(pipeline, batch, spec, call.reads_labels, view)
        call.check()
    except Exception as exception:  # reported to all ranks, then raised there: no rank may wait for this one
        return view, own, exception
    return view, own, None


_NO_SOURCES = PackedBatch | list | tuple | str | bytes | Mapping | Tensor


def is_source(batch: Any) -> bool:
    """True if microbatches are drawn from it in the course of a call: of an iterable that is no list."""
    return isinstance(batch, Iterable) and not isinstance(batch, _NO_SOURCES)


def _own_microbatches(
    pipeline: Pipeline, batch: Any, spec: MicroBatchSpec | None, reads_labels: bool, view: BatchReport
) -> tuple[Split, BatchReport]:
    """A user's own microbatches, and their report: those of a list as a split, of a source their number alone.

    Raises: ValueError.
    """
    at_ends = pipeline.holds_first_stage or pipeline.holds_last_stage
    if isinstance(batch, list | tuple) and batch:
        num, least, most = len(batch), 1 if spec is None else spec.at_least, None if spec is None else spec.max_tokens
        for number, own in enumerate(batch):
            check_given(pipeline, own, f"microbatch {number} of {num}", most, reads_labels)
        if num < least:
            raise SplitError(f"micro_batches asks for {least} microbatches, but the list has {num}; give as many")
        digest, contents = (crc32(repr([f(own) for own in batch]).encode()) for f in _DIGESTS)
        contents *= batch[0].data is not None
        view = replace(view, num_tokens=sum(own.num_tokens for own in batch), digest=digest, contents=contents)
        parts = split_of(batch)
    elif is_source(batch) or (batch is None and spec is not None and not at_ends):
        if spec is None or spec.num is None:
            raise ValueError(
                "how many microbatches a source gives is known to the caller alone; say it, as in "
                "micro_batches=MicroBatchSpec(num=8), or give a list"
            )
        num, parts = spec.num, _NOTHING
        view = replace(view, drawn=True, digest=1, contents=int(batch is not None))
    elif isinstance(batch, list | tuple):
        raise BatchError("batch", "an empty list; give at least one microbatch")
    else:
        check_batch(batch, None, False)
        raise AssertionError("a batch is split")
    return parts, replace(view, wanted=num, needed=num, num_items=num, longest_item=1)


_DIGESTS = PackedBatch.digest, PackedBatch.contents_digest


def split_of(microbatches: Sequence[PackedBatch]) -> Split:
    """A user's own microbatches as a split, whose items stand in their order."""
    loads = tuple(load for own in microbatches for load in own.item_lengths(own.main_key))
    order = tuple(range(len(loads)))
    return Split(tuple(microbatches), order, order, loads)


def check_given(pipeline: Pipeline, own: Any, where: str, max_tokens: int | None, reads_labels: bool) -> None:
    """Refuse a user's own microbatch that cannot be computed. Raises: `SplitError`, which says where it was given."""
    try:
        check_batch(own, pipeline.units[0].limits, reads_labels)
        if max_tokens is not None and own.num_tokens > max_tokens:
            raise SplitError(f"it has {own.num_tokens} tokens, but micro_batches allows {max_tokens}")
        _check_parts(pipeline, own, [own], reads_labels)
    except ValueError as error:
        raise SplitError(f"{where}: {error}") from error


def _check_parts(pipeline: Pipeline, batch: Any, parts: Sequence[PackedBatch], reads_labels: bool) -> None:
    """Refuse what cannot be shared among context-parallel ranks, or a user's own layers cannot take."""
    if pipeline.context is not None:
        for microbatch in parts:
            pipeline.context.spread(microbatch)
    if pipeline.own_layers is not None:
        pipeline.own_layers.prepare_for(batch, check_labels if reads_labels else None)


def _kinds(reports: Sequence[BatchReport]) -> set[int]:
    """0 for ranks that were given batches; for sources, the number of microbatches that these are asked for."""
    return {report.drawn and report.wanted for report in reports if not report.ended}


def _check_alike(pipeline: Pipeline, reports: Sequence[BatchReport], call: str, own_error: Exception | None) -> None:
    """Raise on every rank if any has failed, or if they were called differently; only then is more sent.

    Ranks with the same place on the dp axis share a batch.

    Raises:
        PipelineError: on other ranks than the failed ones, which raise `own_error`. On all ranks alike, if they make
            other calls or take different steps, or hold different batches where they share one; lists their places.
    """
    if any(report.failed for report in reports) or len({report.job for report in reports}) > 1:

        def own_call() -> str:
            if own_error is not None:
                raise own_error
            return call

        message = "rank {rank} cannot use what it was given: {error}"
        gather = partial(gather_json, group=pipeline.grid.control)
        _, calls = shown_to_all_ranks(lambda: (None, own_call()), gather, otherwise=PipelineError, message=message)
        rank, other = next((rank, theirs) for rank, theirs in enumerate(calls) if theirs != calls[0])
        raise PipelineError(f"all ranks make the same calls, but rank 0 made {calls[0]} and rank {rank} {other}")
    if len(steps := {report.step for report in reports}) > 1:
        raise PipelineError(f"ranks take different steps: {', '.join(map(str, sorted(steps)))}")
    if len(_kinds(reports)) > 1:
        views = "; ".join(f"rank {rank} has {report}" for rank, report in enumerate(reports))
        raise PipelineError(f"all ranks are given batches, or all sources of as many microbatches: {views}")
    for ranks in pipeline.ranks_by_batch:
        contents = {reports[r].contents for r in ranks} - {0}
        if len({(reports[r].digest, reports[r].counts) for r in ranks}) > 1 or len(contents) > 1:
            views = "; ".join(f"({pipeline.layout.coordinates(r)}) has {reports[r]}" for r in ranks)
            raise PipelineError(f"ranks that share a batch were given different ones: {views}")
