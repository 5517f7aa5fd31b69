"""Microbatches: one source of them on every rank, and the collective by which all ranks agree on their number.

A source is a batch that is split, a list of the user's own microbatches, or an iterator, from which they are drawn one
by one as the program of the call first needs them.
"""

from __future__ import annotations

import math
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor

from penstock.data import NO_LABEL, BatchError, MicroBatchSpec, PackedBatch, Split, SplitError, agree, count, split
from penstock.data.split import SplitCounts
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.drawn import Draws
from penstock.engine.training.loss import BoundLoss, check_total
from penstock.model import Limits, Numbers
from penstock.parallel.host import gather_on_all_ranks, gather_rows
from penstock.runtime import Feed, PipelineError
from penstock.schedule import Program
from penstock.settings import Normalize, TrainConfig
from penstock.settings.declare import type_in_words

BY_DEFAULT = MicroBatchSpec(num=TrainConfig().num_microbatches, allow_fewer=True)
"""The microbatches of a call that names none: as many as those of a run that names none, whatever the layout.

So another layout changes no bit. Fewer where the batch has fewer items.
"""

END: Any = object()
"""The batch of a rank that has none left."""

_NOTHING = Split((), (), (), ())
_NO_LIMIT = 1 << 62


# ---- What each rank reports, so that all agree


@dataclass(frozen=True)
class BatchReport(SplitCounts):
    """One rank's view of its batch: whole numbers of 64 bits, numbers and truth values, sent in this order."""

    #: tokens of the rank's batch
    num_tokens: int = 0
    #: the number of microbatches that the rank has split into so far
    num_microbatches: int = 0
    #: covers counts, ids, keys and lengths, of the batch and of its microbatches
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
    rebuild: bool = False
    #: True if the rank has no batch left; its counts then ask for nothing
    ended: bool = False
    #: True if the rank has callbacks
    has_callbacks: bool = False
    #: True if its microbatches are drawn from an iterator in the course of the call
    drawn: bool = False
    #: False if the rank has no iterator where others draw
    has_iterator: bool = False

    def __str__(self) -> str:
        if self.ended:
            return "no batch left"
        if self.drawn:
            return f"an iterator of {self.num_microbatches} microbatches"
        size = f"{self.num_items} items, {self.num_tokens} tokens, asks for {self.wanted} microbatches"
        return f"{size}, digest {self.digest:x}, contents {self.contents:08x}"


_LETTERS = {int: "q", float: "d", bool: "?"}
_ROW = struct.Struct("<" + "".join(_LETTERS[type(entry.default)] for entry in fields(BatchReport)))
"""A report as bytes, equally many for every one, so that one small collective shows it to all ranks."""


@contextmanager
def agree_on_microbatches(
    pipeline: Pipeline, call: str, make_source: Callable[[], MicrobatchSource], report: BatchReport | None = None
) -> Iterator[MicrobatchSource]:
    """Make this rank's source, report it to all ranks, and divide again if another rank needs more microbatches.

    The context is that of the call: if it fails, iterators of all ranks are left at one place.

    call: the engine's method, with the settings that must be the same on all ranks. make_source: makes the source, or
    raises what is wrong with this rank's arguments. report: what this rank reports beside, such as a wish to end.

    Raises:
        SplitError: the batch cannot be split so; on all ranks alike.
        ValueError: this rank cannot use its batch or another argument; it says why on all ranks.
        PipelineError: the same on another rank, or ranks of one pipeline hold different batches.
    """
    base = replace(report or BatchReport(), job=crc32(call.encode()), has_callbacks=pipeline.has_callbacks)
    source: MicrobatchSource | None = None
    num: int | None = None
    while True:
        report, error = replace(base, failed=True), None
        try:
            source = source or make_source()
            report = source.divide_and_report(base, num)
        except Exception as exception:  # reported to all ranks, then raised there: no rank may wait for this one
            error = exception
        reports = [report]
        if pipeline.grid.control is not None:
            with pipeline.recorder.collective("agree on the batch"):
                rows = gather_rows("batch", _ROW.pack(*astuple(report)), pipeline.grid.control)
            reports = [BatchReport(*_ROW.unpack(row)) for row in rows]
        _check_reports(pipeline, reports, call, error)
        assert source is not None, "a rank without a source has failed"
        num = agree(reports, source.spec)
        if all(view.ended or view.num_microbatches == num for view in reports):
            break
        # Another rank needs more microbatches than this one wished for.
    source.begin(num, reports)
    try:
        yield source
    except BaseException:
        source.leave()
        raise


def _check_reports(pipeline: Pipeline, reports: Sequence[BatchReport], call: str, error: Exception | None) -> None:
    """Raise on every rank if any has failed, or if they were called differently; only then is more sent.

    Ranks with the same place on the dp axis share a batch.

    Raises:
        PipelineError: on other ranks than the failed ones, which raise `error`. On all ranks alike, if they make other
            calls, or hold different batches where they share one; lists their places.
    """
    if any(report.failed for report in reports) or len({report.job for report in reports}) > 1:

        def call_or_error() -> str:
            if error is not None:
                raise error
            return call

        message = "rank {rank} cannot use what it was given: {error}"
        control = pipeline.grid.control
        calls = gather_on_all_ranks(call_or_error, control, otherwise=PipelineError, message=message)
        rank, other = next((rank, text) for rank, text in enumerate(calls) if text != calls[0])
        raise PipelineError(f"all ranks must make the same calls, but rank 0 made {calls[0]} and rank {rank} {other}")
    if len({report.drawn and report.wanted for report in reports if not report.ended}) > 1:
        views = "; ".join(f"rank {rank} has {report}" for rank, report in enumerate(reports))
        raise PipelineError(f"all ranks are given batches, or all iterators of as many microbatches: {views}")
    for ranks in pipeline.ranks_by_batch:
        contents = {reports[r].contents for r in ranks} - {0}
        if len({reports[r].digest for r in ranks}) > 1 or len(contents) > 1:
            views = "; ".join(f"({pipeline.layout.coordinates(r)}) has {reports[r]}" for r in ranks)
            raise PipelineError(f"ranks that share a batch were given different ones, or cut it otherwise: {views}")


# ---- The source of a rank's microbatches


def source_of(
    pipeline: Pipeline,
    batch: Any,
    spec: MicroBatchSpec | None,
    loss: BoundLoss | None = None,
    reads_labels: bool = False,
) -> MicrobatchSource:
    """The source of a call's microbatches, of whatever was given as its batch; see `MicrobatchSource`.

    Raises: ValueError for what is no batch, list or iterator, does not fit the `spec`, or is no loss.
    """
    if loss is not None:
        reads_labels = loss.reads_labels
    if spec is not None and not isinstance(spec, MicroBatchSpec):
        raise ValueError(f"micro_batches={spec!r} is {type_in_words(spec)}; give a MicroBatchSpec, or None")
    # A rank with neither end of the model may have no iterator, where others have one.
    may_lack_one = spec is not None and not (pipeline.holds_first_stage or pipeline.holds_last_stage)
    if isinstance(batch, list | tuple):
        if not batch:
            raise BatchError("batch", "an empty list; give at least one microbatch")
        if spec is not None and len(batch) < (spec.num or 1):
            raise SplitError(
                f"micro_batches asks for {spec.num} microbatches, but the list has {len(batch)}; give as many"
            )
        kind, batch = MicrobatchList, tuple(batch)
    elif batch is END:
        kind, batch = MicrobatchList, ()
    elif is_iterator(batch) or (batch is None and may_lack_one):
        if spec is None or spec.num is None:
            raise ValueError(
                "how many microbatches an iterator gives is known to the caller alone; say it, as in "
                "micro_batches=MicroBatchSpec(num=8), or give a list"
            )
        kind = DrawnMicrobatches
    else:
        kind = SplitBatch
        check_batch(batch, pipeline.units[0].limits, reads_labels)
    return kind(pipeline, batch, spec or BY_DEFAULT, loss, reads_labels)


_NO_SOURCES = PackedBatch | list | tuple | str | bytes | Mapping | Tensor


def is_iterator(batch: Any) -> bool:
    """True if microbatches are drawn from it in the course of a call: of an iterable that is no list."""
    return isinstance(batch, Iterable) and not isinstance(batch, _NO_SOURCES)


@dataclass(eq=False)
class MicrobatchSource:
    """This rank's microbatches of one call, in the order in which they are computed.

    A rank reports what it has until all ranks agree, and only then begins. Where they are drawn, `split`, `weights` and
    the totals are complete once they are added up.
    """

    #: False where tokens and weights of all are known only once they are added up
    knows_counts: ClassVar[bool] = True

    #: the part of the model that computes them
    pipeline: Pipeline
    #: what they come from: a batch, microbatches, or an iterator
    batch: Any
    #: how many there are, and the most tokens of each
    spec: MicroBatchSpec = BY_DEFAULT
    #: the loss, which weighs them; None where there is none
    loss: BoundLoss | None = None
    #: True if labels are token ids, which a loss or a score reads
    reads_labels: bool = False
    #: this rank's microbatches as far as they are known, and where their items stand in the batch
    split: Split = _NOTHING
    #: the loss weight of each of these; empty where the rank does not see labels
    weights: list[float] = field(default_factory=list)
    #: the number of this rank's microbatches; 0 where it has no batch left
    num: int = 0
    #: what each rank has reported
    reports: Sequence[BatchReport] = ()
    #: data-parallel rank -> the sum of its loss weights
    rank_totals: Sequence[float] = ()
    #: tokens of all data-parallel ranks
    num_tokens: int = 0

    def divide_and_report(self, known: BatchReport, num: int | None) -> BatchReport:
        """Divide into `num` microbatches, or with None into as many as wanted, and complete the rank's report.

        Raises: ValueError for microbatches that cannot be computed.
        """
        raise NotImplementedError

    def begin(self, num: int, reports: Sequence[BatchReport]) -> None:
        """Take note of what all ranks have agreed on. Raises: ZeroLossWeight where there has to be some."""
        pipeline = self.pipeline
        self.reports, self.num = reports, 0 if reports[pipeline.grid.rank].ended else num
        seeing_labels = [reports[rank] for rank in pipeline.output_ranks]
        self.rank_totals = [report.weight for report in seeing_labels]
        if not any(report.drawn for report in reports):
            self._add_up(self.rank_totals, sum(report.num_tokens for report in seeing_labels))
        if self.loss and self.loss.divisor is Normalize.MICROBATCH_MEAN and pipeline.context and self.weights:
            # From now on the weights of this rank's part of each microbatch.
            parts, self.weights = [pipeline.context.shard(part)[0] for part in self.split.microbatches], []
            for part in parts:
                self._weigh(part)

    def feeds(self, make: Callable[[PackedBatch, Numbers], Feed], step: int, program: Program) -> Iterable[Feed]:
        """The microbatches as that program takes them in a step of that number; `make` reads labels before it runs."""
        return [make(known, Numbers(number, self.num, step)) for number, known in enumerate(self.split.microbatches)]

    def factor(self, number: int) -> float:
        """The factor on the loss of the microbatch of that number; 0 where no labels are seen."""
        assert self.loss is not None
        weights, num_dp = self.weights, len(self.rank_totals)
        match divisor := self.loss.divisor:
            case _ if not weights:
                return 0.0
            case Normalize.GLOBAL:
                return 1.0 / math.fsum(self.rank_totals)
            case Normalize.DP:
                rank_total = math.fsum(weights)
                return 1.0 / (rank_total * num_dp) if rank_total else 0.0
            case Normalize.TOKEN_PER_MICROBATCH | Normalize.MICROBATCH_MEAN:
                # Each context-parallel rank has a mean of its own.
                num_ranks = num_dp * (self.pipeline.layout.cp if divisor is Normalize.MICROBATCH_MEAN else 1)
                # The mean of a microbatch without loss tokens is none, of its auxiliary losses either.
                return 1.0 / (weights[number] * self.num * num_ranks) if weights[number] else 0.0
        assert isinstance(divisor, float)
        return 1.0 / divisor

    def add_up_drawn(self) -> None:
        """Learn the totals of microbatches that were drawn; all ranks call it after the program.

        Raises: ZeroLossWeight where there has to be some.
        """
        pipeline, totals = self.pipeline, (0.0, 0.0)
        if any(report.drawn for report in self.reports):
            if pipeline.grid.rank in pipeline.output_ranks:
                totals = sum(self.weights), float(sum(known.num_tokens for known in self.split.microbatches))
            weight, num_tokens = pipeline.sum_over_ranks("add up the tokens", *totals)
            self._add_up([weight], int(num_tokens))

    def leave(self) -> None:
        """Leave an iterator, after a call that failed, at the place where it would have ended."""

    def _add_up(self, rank_totals: Sequence[float], num_tokens: int) -> None:
        self.rank_totals, self.num_tokens = rank_totals, num_tokens
        if self.loss is not None and self.loss.divisor is not None:
            check_total(rank_totals, self.pipeline.layout.dp)

    def _digests(self, batches: Sequence[PackedBatch], counts: SplitCounts) -> dict[str, int]:
        """The part of a report in which ranks that share batches are compared; none where nobody shares them."""
        if self.pipeline.grid.batch_control is None:
            return {}
        digest = crc32(repr((counts, [batch.digest() for batch in batches])).encode())
        contents = crc32(repr([batch.contents_digest() for batch in batches]).encode())
        return {"digest": digest, "contents": contents if batches[0].data is not None else 0}

    def _weigh(self, microbatch: PackedBatch) -> None:
        if self.pipeline.holds_last_stage and self.loss is not None:
            self.weights.append(self.loss.weight(microbatch, len(self.weights)))

    def _check(self, batch: PackedBatch, microbatches: Sequence[PackedBatch]) -> None:
        """Refuse what context-parallel ranks cannot share, or a user's own layers cannot take. Raises: ValueError."""
        pipeline = self.pipeline
        if pipeline.context is not None:
            for microbatch in microbatches:
                pipeline.context.spread(microbatch)
        if pipeline.own_layers is not None:
            pipeline.own_layers.prepare_for(batch)

    def _check_made(self, microbatch: Any, where: str) -> None:
        """Refuse a microbatch of the user's own that cannot be computed. Raises: `SplitError`, which says which one."""
        try:
            check_batch(microbatch, self.pipeline.units[0].limits, self.reads_labels)
            if (most := self.spec.max_tokens) is not None and microbatch.num_tokens > most:
                raise SplitError(f"it has {microbatch.num_tokens} tokens, but micro_batches allows {most}")
            self._check(microbatch, [microbatch])
        except ValueError as error:
            raise SplitError(f"{where}: {error}") from error


class SplitBatch(MicrobatchSource):
    """A batch, split into microbatches of nearly equal load."""

    def divide_and_report(self, known: BatchReport, num: int | None) -> BatchReport:
        counts = count(self.batch, self.spec)
        report = replace(known, num_tokens=self.batch.num_tokens, **vars(counts), **self._digests([self.batch], counts))
        try:
            num = num or agree([counts], self.spec)
        except SplitError:
            # So it is with the counts of all ranks, which then refuse it alike.
            return report
        self.split, self.weights = split(self.batch, self.spec, num), []
        self._check(self.batch, self.split.microbatches)
        for microbatch in self.split.microbatches:
            self._weigh(microbatch)
        lengths = [microbatch.num_tokens for microbatch in self.split.microbatches]
        digest = crc32(repr((report.digest, lengths)).encode())
        return replace(report, num_microbatches=num, weight=sum(self.weights), digest=digest)


class MicrobatchList(MicrobatchSource):
    """Microbatches as the user made them, never regrouped; an empty list is that of a rank with no batch left."""

    def divide_and_report(self, known: BatchReport, num: int | None) -> BatchReport:
        microbatches: Sequence[PackedBatch] = self.batch
        if not microbatches:
            return replace(known, num_items=_NO_LIMIT, ended=True)
        num = len(microbatches)
        for number, microbatch in enumerate(microbatches):
            self._check_made(microbatch, f"microbatch {number} of {num}")
            self._weigh(microbatch)
        self.split, counts = split_of(microbatches), SplitCounts(num, num, num, 1)
        return replace(
            known,
            num_tokens=sum(microbatch.num_tokens for microbatch in microbatches),
            num_microbatches=num,
            weight=sum(self.weights),
            **vars(counts),
            **self._digests(microbatches, counts),
        )


@dataclass(eq=False)
class DrawnMicrobatches(MicrobatchSource):
    """Microbatches that are drawn from an iterator, each when this rank's program first needs it.

    Each rank of a pipeline has an iterator of its own, or none where it holds neither end of the model. What the first
    one gives, the others hear of: all its lengths where they need them for messages, and digests for comparison.
    """

    #: see `MicrobatchSource`
    knows_counts: ClassVar[bool] = False

    #: what draws them
    _draws: Draws = field(init=False)

    def divide_and_report(self, known: BatchReport, num: int | None) -> BatchReport:
        num, has_iterator = self.spec.num or 1, self.batch is not None
        counts = vars(SplitCounts(num, num, num, 1))
        return replace(known, drawn=True, has_iterator=has_iterator, digest=num, num_microbatches=num, **counts)

    def begin(self, num: int, reports: Sequence[BatchReport]) -> None:
        super().begin(num, reports)
        iterator = None if self.batch is None else iter(self.batch)
        has_iterator = [report.has_iterator for report in reports]
        self._draws = Draws(self.pipeline, iterator, num, self._check_made, has_iterator)

    def feeds(self, make: Callable[[PackedBatch, Numbers], Feed], step: int, program: Program) -> Iterable[Feed]:
        def weighed(microbatch: PackedBatch, number: int) -> Feed:
            self._weigh(microbatch)
            return make(microbatch, Numbers(number, self.num, step))

        # Not a generator, which would hold each until the next is asked for.
        return map(weighed, self._draws.in_order(program), range(self.num))

    def add_up_drawn(self) -> None:
        self.split = split_of(self._draws.end())
        super().add_up_drawn()

    def leave(self) -> None:
        self._draws.leave()


def split_of(microbatches: Sequence[PackedBatch]) -> Split:
    """A user's own microbatches as a split, whose items stand in their order."""
    loads = tuple(load for microbatch in microbatches for load in microbatch.item_lengths(microbatch.main_key))
    order = tuple(range(len(loads)))
    return Split(tuple(microbatches), order, order, loads)


# ---- Checks of a batch's numbers against the model


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
        num_classes = limits.vocab_size if limits is not None and limits.bounds_labels else None
        possible = "and more" if num_classes is None else f"to {num_classes - 1}"
        known = f"possible are 0 {possible}, and {NO_LABEL} for a token without loss"
        _check_range(batch, "labels", num_classes or _NO_INT_LIMIT, known, besides=NO_LABEL)
    if "positions" in batch and limits is not None and limits.reads_positions:
        if batch.dtypes["positions"] not in _INTEGERS:
            wrong = f"{batch.dtypes['positions']}; positions are torch.int64 or torch.int32"
            raise BatchError("data['positions']", wrong)
        _check_range(batch, "positions", limits.max_length, f"the model's positions are 0 to {limits.max_length - 1}")


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
