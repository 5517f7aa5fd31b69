"""The check of a user's own parts: a few steps of the engine in several stages, held against a plain loop.

Both run in this process, on copies of the layers. What a layer, a loss or an optimizer may do is torch's contract and a
few additions (docs/guides/check.md); a part that breaks one gives other bits in stages, after a save and load, or under
activation checkpointing, and the first bit that differs says where.
"""

from __future__ import annotations

import copy
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data import MicroBatchSpec, PackedBatch, Split, merge, split
from penstock.engine.check.observed import (
    Observed,
    Point,
    Quantity,
    check_number,
    check_numbers,
    difference_in_words,
    has_equal_bits,
)
from penstock.engine.check.own_parts import OwnParts
from penstock.engine.check.ranks_in_turn import RanksInTurn
from penstock.engine.check.report import Cause, CheckReport, Difference, Way
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.options import EngineOptions, changed
from penstock.engine.training.loss import LossFn, LossWeightFn, StepLoss, num_loss_tokens, token_cross_entropy
from penstock.model import UnitSpec, decoder_units
from penstock.runtime import PipelineError
from penstock.settings import Layout, Precision, RunConfig, ScheduleConfig, checked
from penstock.settings.declare import words_of


@dataclass(eq=False)
class Check:
    """One check: parts and a batch, computed by a plain loop and in each `Way`."""

    parts: OwnParts
    batch: PackedBatch
    layout: Layout
    num_steps: int
    #: the number of microbatches, and another one to compare with
    num_microbatches: int
    other_num: int
    #: the quantities of the plain loop
    plain: Observed = field(default_factory=Observed)
    #: full names of the parameters
    parameters: frozenset[str] = frozenset()
    #: see `PlainLoop`
    strangers: Sequence[Tensor] = ()
    torn: Sequence[tuple[str, str]] = ()
    #: what could not be compared, and why, in words
    omitted: str = ""

    @property
    def num_saved(self) -> int:
        """The steps before the one save: about half."""
        return (self.num_steps + 1) // 2

    def split(self, num: int) -> Split:
        """The batch, whose tensors are a copy, in microbatches."""
        return split(copy.deepcopy(self.batch), MicroBatchSpec(num=num))

    @property
    def compared_layers(self) -> set[str]:
        """The names of layers whose outputs are compared: all but a module that stands in several places."""
        num_uses = Counter(map(id, self.parts.layers))
        return {
            part.name if isinstance(part, UnitSpec) else f"layers.{i}"
            for i, part in enumerate(self.parts.layers)
            if num_uses[id(part)] == 1
        }

    def run_plain(self, parts: OwnParts, num: int, num_steps: int, observed: Observed) -> Observed:
        """Train copies of the layers by a plain loop.

        Raises: whatever a user's own parts raise there; ValueError where it computes NaN.
        """
        loop = parts.plain_loop()
        observed.note_outputs(loop.modules, self.compared_layers)
        for step in range(1, num_steps + 1):
            observed.take(loop, self.split(num).microbatches, step)
        check_numbers(observed, loop.parameters)
        self.parameters, self.strangers, self.torn = frozenset(loop.parameters), loop.strangers, loop.torn()
        return observed

    def run_engine(
        self, layout: Layout, num: int, steps: range, observed: Observed, folder: Path | None = None, **changes: Any
    ) -> None:
        """Train in stages, on copies for each rank; with a folder, saved in the middle, or loaded where steps begin.

        Raises: the engine's error.
        """
        ranks = RanksInTurn(layout, self.parts.device)

        def work(rank: int) -> None:
            parts, rank_observed = self.parts.copied(), Observed()
            engine = parts.engine(ranks, rank, self.plain.width or 1, changes)
            if not changes.get("recompute"):
                rank_observed.note_outputs(engine.modules, self.compared_layers)
            if folder is not None and steps.start > 1:
                engine.load(folder)
            for step in steps:
                rank_observed.take(engine, self.split(num).microbatches, step)
                observed.values |= rank_observed.values
                if folder is not None and step == self.num_saved:
                    engine.save(folder)
            for unit, layer in zip(engine.pipeline.units, parts.layers, strict=True):
                if unit.name not in engine.modules and isinstance(layer, nn.Module):
                    reached = [name for name, parameter in layer.named_parameters() if parameter.grad is not None]
                    observed.reached |= {f"{unit.name}.{name}": rank for name in reached}

        ranks.turns.run(work)

    def compare(self, way: Way, plain: Observed, run: Callable[[Observed], object]) -> Difference | None:
        """The first difference between the quantities that `run` computes and the plain loop's; None if they agree."""
        observed, error = Observed(), None
        try:
            run(observed)
        except Exception as caught:
            error = caught
        steps = {place.step for place in observed.values}
        for place, expected in plain.values.items():
            was_computed = place in observed.values
            if was_computed and has_equal_bits(expected, observed.values[place]):
                continue
            if not was_computed and (error or place.step not in steps or place.kind is Quantity.OUTPUT):
                continue
            values = difference_in_words(expected, observed.values[place]) if was_computed else "it is not there"
            if place.kind is Quantity.GRADIENT and place.name in observed.reached:
                values += f"; rank {observed.reached[place.name]}, which does not hold it, reaches it, too"
            what = f"{place.kind.value} {place.name}".strip() + " differs"
            microbatch = None if place.microbatch < 0 else place.microbatch
            return Difference(way, place.step, microbatch, what, values, self._causes(way, place, observed.reached))
        if error is None:
            return None
        causes = self._causes(way, Point(1, Quantity.OUTPUT, -1, ""), {})
        if isinstance(error, ValueError | PipelineError):
            causes = (Cause.REFUSED, *causes)
        num_before = self.num_saved if way is Way.RESUMED else 0
        step, values = max(steps, default=num_before) + 1, f"{type(error).__name__}: {words_of(error)}"
        return Difference(way, step, None, "the engine fails", values, causes)

    def _causes(self, way: Way, place: Point, reached: Mapping[str, int]) -> tuple[Cause, ...]:
        """The usual causes of a difference at a place, the likeliest first."""
        is_parameter = place.kind is Quantity.STATE and place.name in self.parameters
        match way:
            case Way.AGAIN:
                return Cause.CHANCE, Cause.ELSEWHERE
            case Way.RESUMED:
                return (Cause.OPTIMIZER_STATE, Cause.UNDECLARED) if is_parameter else (Cause.UNDECLARED, Cause.CALLS)
            case Way.RECOMPUTED:
                return Cause.REPLAYED, Cause.CALLS
        if is_parameter:
            return Cause.JOINT, Cause.IN_PLACE
        is_later = place.step > 1 and place.kind is not Quantity.STATE
        if place.kind is Quantity.GRADIENT or place.name in reached or is_later:
            return Cause.ELSEWHERE, Cause.LEFT_BEHIND, Cause.IN_PLACE
        return Cause.LEFT_BEHIND, Cause.CALLS, Cause.IN_PLACE

    def differences(self) -> Iterator[Difference]:
        """The first difference of each way; after a difference in stages no other way is tried."""
        self.run_plain(self.parts.copied(), self.num_microbatches, self.num_steps, self.plain)
        with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
            for way, first_difference in self._ways(Path(folder)).items():
                if (difference := first_difference()) is not None:
                    yield difference
                    if way in (Way.AGAIN, Way.STAGES, Way.APART):
                        return

    def _ways(self, folder: Path) -> dict[Way, Callable[[], Difference | None]]:
        """All ways in order, each with a function that gives its first difference."""
        num, steps, layout = self.num_microbatches, range(1, self.num_steps + 1), self.layout

        def in_stages(way: Way, layout: Layout, steps: range, **changes: Any) -> Callable[[], Difference | None]:
            return partial(self.compare, way, self.plain, partial(self.run_engine, layout, num, steps, **changes))

        def with_fewer() -> Difference | None:
            plain = self.run_plain(self.parts.copied(), self.other_num, 1, Observed())
            return self.compare(Way.SPLIT, plain, partial(self.run_engine, layout, self.other_num, steps[:1]))

        ways = {Way.AGAIN: self._again, Way.STAGES: in_stages(Way.STAGES, layout, steps, folder=folder)}
        apart = Layout(pp=min(len(self.parts.layers), _MOST_STAGES))
        # Stages of one layer share nothing; layers that are tied may lie together.
        if apart.pp > layout.pp and not any(unit.tied for unit in self.parts.copied().units()):
            ways[Way.APART] = in_stages(Way.APART, apart, steps, schedule=ScheduleConfig())
        return ways | {
            Way.RESUMED: in_stages(Way.RESUMED, layout, steps[self.num_saved :], folder=folder),
            Way.RECOMPUTED: in_stages(Way.RECOMPUTED, layout, steps, recompute="full"),
            Way.SPLIT: with_fewer,
            Way.SUMS: self._sums,
        }

    def _again(self) -> Difference | None:
        """Compare a second plain loop, while the original layers have other values: copies must not read those."""
        layers = [layer for layer in self.parts.layers if isinstance(layer, nn.Module)]
        tensors = {id(tensor): tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
        floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        if self.strangers:
            is_original = any(tensor is stranger for tensor in floats for stranger in self.strangers)
            values = f"it is of {list(self.strangers[0].shape)}"
            cause = Cause.ELSEWHERE if is_original else Cause.UNTRAINED
            return Difference(Way.AGAIN, 1, None, "a tensor gets a gradient that no layer holds", values, (cause,))
        if self.torn:
            what = f"{' and '.join(self.torn[0])} share memory"
            return Difference(Way.AGAIN, 1, None, what, "an engine gives each its own", (Cause.SHARED,))
        second_loop = partial(self.run_plain, self.parts.copied(), self.num_microbatches, self.num_steps)
        before = [tensor.data for tensor in floats]
        try:
            for tensor, values in zip(floats, before, strict=True):
                # Other memory; what the user gave is not written to.
                tensor.data = values + 1.0
            return self.compare(Way.AGAIN, self.plain, second_loop)
        finally:
            for tensor, values in zip(floats, before, strict=True):
                tensor.data = values

    def _sums(self) -> Difference | None:
        """Compare the batch's loss, weight and outputs in evaluation for both numbers of microbatches."""
        (loss, weight, rows), (other_loss, other_weight, other_rows) = map(
            self._evaluated, (self.num_microbatches, self.other_num)
        )
        differs = partial(Difference, Way.SUMS, 1, None)
        if not math.isclose(weight, other_weight, rel_tol=1e-6):
            values = f"{weight:.9g} and {other_weight:.9g}"
            return differs("the sum of loss_weight_fn differs", values, (Cause.NO_SUM,))
        # Layers that draw random numbers in evaluation too depend on the number of microbatches.
        if self._evaluated(self.num_microbatches, shift=1)[0] != loss:
            self.omitted = "the sums over microbatches, for a layer draws random numbers in evaluation too"
            return None
        rounding = self._rounding()
        if rows is not None and other_rows is not None:
            spread = float((rows - other_rows).abs().max() / rows.abs().max().clamp_min(1e-12))
            if spread > rounding:
                what, values = "what the last layer gives for a sequence differs", f"by {spread:.3g} of the largest"
                return differs(what, values, (Cause.MIXED, Cause.UNDECLARED))
        if not math.isclose(loss, other_loss, rel_tol=rounding, abs_tol=1e-6):
            values = f"{loss:.6g} of {self.num_microbatches} microbatches, {other_loss:.6g} of {self.other_num}"
            return differs("the loss differs", values, (Cause.NO_SUM, Cause.MIXED))
        return None

    def _rounding(self) -> float:
        """The relative difference that sums in another order may have, by the coarsest type of the parameters."""
        types = {parameter.dtype for parameter in self.parts.copied().plain_loop().parameters.values()}
        # A part of the digits: 1e-5 in fp32, 0.03 in bf16.
        return max(torch.finfo(dtype).eps for dtype in types | {torch.float32}) ** 0.7

    def _evaluated(self, num: int, shift: int = 0) -> tuple[float, float, Tensor | None]:
        """The batch's loss and weight in evaluation mode, and the last layer's rows if it gives one for each token.

        shift: of the seed from which layers draw, once they have their first weights.
        """
        parts, batch_split, outputs = self.parts.copied(), self.split(num), list[Any]()
        loop, microbatches = parts.plain_loop(), batch_split.microbatches
        loop.seed += shift
        list(loop.modules.values())[-1].register_forward_hook(lambda module, arguments, output: outputs.append(output))
        losses = loop.losses_of(microbatches, 1, training=False)
        weight = math.fsum(float(parts.loss_weight_fn(microbatch)) for microbatch in microbatches)
        shapes = [output.shape[:1] if isinstance(output, Tensor) else None for output in outputs]
        are_rows = shapes == [(microbatch.num_tokens,) for microbatch in microbatches]
        rows = merge([output.detach().double() for output in outputs], batch_split) if are_rows else None
        for microbatch, loss in enumerate(losses):
            check_number(loss, f"in evaluation, microbatch {microbatch} of {num}: the loss")
        return math.fsum(map(float, losses)) * weight, weight, rows


_MOST_STAGES = 8
"""The most stages of one layer each; each is a thread."""
_CHANGE_BITS = ("compile", "adapter", "quantize", "measure_lengths")


@checked
def check(
    layers: Sequence[nn.Module | partial[Any]],
    batch: PackedBatch,
    layout: Layout | None = None,
    loss_fn: LossFn = token_cross_entropy,
    loss_weight_fn: LossWeightFn = num_loss_tokens,
    steps: int = 2,
    **changes: Any,
) -> CheckReport:
    """Hold a few steps of the engine, in stages, against a plain loop over your own layers, loss and optimizer.

    It takes one process, without torchrun, and leaves the layers as they are: all is done on copies. Compared bit for
    bit are every layer's output, losses, gradients, parameters, buffers, extra state and torch's random numbers; then
    once more after a save and load, under activation checkpointing, and with another number of microbatches. Last, the
    loss of the batch must not depend on how it is split.

    Args:
        layers: those of `Engine.from_layers`; a model cut down to a few layers will do.
        batch: two items at least, better four or more of different lengths.
        layout: pipeline stages alone, `Layout(pp=2)` if it is left out.
        loss_fn: the loss, and `loss_weight_fn` its weight, as `Engine.train_batch` takes them.
        steps: two at least, so that one comes after a save and load.
        **changes: options of the engine by name, such as `optimizer`.

    Raises: ValueError for arguments that cannot be checked; whatever your own parts raise in a plain loop.

    >>> layers = [torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)]
    >>> batch = PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 6, 4)])
    >>> check(layers, batch, optimizer="sgd").raise_if_different()
    """
    options = changed(None, changes)
    return compare_parts(OwnParts(layers, loss_fn, loss_weight_fn, options), batch, layout or Layout(pp=2), steps)


def compare_parts(parts: OwnParts, batch: PackedBatch, layout: Layout, steps: int) -> CheckReport:
    """Check parts on a batch; see `check`. Raises: ValueError, and whatever the parts raise in a plain loop."""
    if layout.world_size != layout.pp or layout.pp < 2:
        raise ValueError(f"a check runs pipeline stages alone, two or more, not {layout}; give Layout(pp=2)")
    if layout.pp > len(parts.layers):
        raise ValueError(f"{layout.pp} stages need as many layers; there are {len(parts.layers)}")
    if steps < 2:
        raise ValueError(f"steps = {steps}: one step comes before a save and load and one after; give 2 or more")
    num_items = len(batch.ids)
    if batch.data is None or num_items < 2:
        raise ValueError(f"a check needs a batch with data, of 2 items or more to split; this one has {num_items}")
    num = min(4, num_items)
    other = num - num // 2
    parts = replace(parts, options=_comparable(parts.options))
    one = Check(parts, batch, layout, steps, num, other)
    with _said_once():
        differences = tuple(one.differences())
    compared = (
        f"{steps} steps in {layout.pp} stages as in a plain loop, after a save and load, under activation "
        f"checkpointing, and with {num} and {other} microbatches"
    )
    return CheckReport(differences, compared + (f"; not compared are {one.omitted}" if one.omitted else ""))


@contextmanager
def _said_once() -> Iterator[None]:
    """Within this context each warning of a loss is given once, however many engines and loops have it."""
    said, logger = set[str](), logging.getLogger(StepLoss.__module__)

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return text not in said and not said.add(text)

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _comparable(options: EngineOptions) -> EngineOptions:
    """The options with which bits are compared: on the CPU unless a device is named. Raises: ValueError."""
    defaults = EngineOptions()
    if changing := [name for name in _CHANGE_BITS if getattr(options, name) != getattr(defaults, name)]:
        value = getattr(options, changing[0])
        raise ValueError(f"a check compares bits, which {changing[0]} = {value!r} changes; leave it out")
    if options.precision in (Precision.FP16, Precision.BF16_AUTOCAST):
        raise ValueError(f"precision = {options.precision} cannot be checked; possible are fp32, fp64 and bf16")
    device = "cpu" if options.device == "auto" else options.device
    return replace(options, device=device, recompute="none", num_kept_microbatches=0)


def compare_run(config: RunConfig, num_stages: int, steps: int, num_layers: int) -> CheckReport:
    """Check a run's model, cut down to its first layers, with weights of its seed, on made-up tokens.

    Raises: ValueError if the settings cannot go together, or the model cannot be checked.
    """
    settings = check_run(with_pretrained(config))
    shape = replace(settings.model, pretrained=None, num_layers=min(settings.model.num_layers, num_layers))
    if shape.native is False or shape.experts.num_experts:
        what = "transformers' own layers" if shape.native is False else "experts"
        raise ValueError(f"a model of {what} is not checked: the plain loop knows Penstock's dense layers and your own")
    vocab_size = shape.vocab_size or _VOCAB_SIZE
    schedule = replace(settings.schedule, cut=None, measure=False)
    options = EngineOptions.of(replace(settings, schedule=schedule))
    units = decoder_units(shape.whole(vocab_size))
    draw = torch.Generator().manual_seed(options.seed)
    tokens = [torch.randint(0, vocab_size, (length,), generator=draw) for length in _LENGTHS]
    parts = OwnParts(units, token_cross_entropy, num_loss_tokens, options)
    return compare_parts(parts, PackedBatch.from_documents(tokens), Layout(pp=num_stages), steps)


_LENGTHS = (24, 17, 31, 20, 28, 19)
"""Lengths of the made-up documents. So few of their tokens lack a label that the last layer computes all rows."""
_VOCAB_SIZE = 256
"""The vocabulary of a model whose settings leave it to the tokenizer."""
