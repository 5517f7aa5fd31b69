"""The check of a user's own parts: a few steps of the engine in several stages, held against a plain loop.

Both run in this process, on copies of the layers. What a layer, a loss or an optimizer may do is torch's contract and a
few additions (docs/guides/check.md); a part that breaks one gives other bits in stages, after a save and load, or under
activation checkpointing, and the first bit that differs says where.
"""

from __future__ import annotations

import copy
import enum
import math
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data import MicroBatchSpec, PackedBatch, Split, merge, split
from penstock.engine.checkpoint.manifest import random_state
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.in_turn import EngineInTurn, PipelineInTurn, RanksInTurn
from penstock.engine.options import EngineOptions, changed
from penstock.engine.own_layers import units_of_layers
from penstock.engine.plain_loop import PlainLoop
from penstock.engine.training.loss import LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.model import UnitSpec, decoder_units
from penstock.parallel.device import agree_on_device
from penstock.runtime import PipelineError
from penstock.settings import Layout, Precision, RunConfig, ScheduleConfig, checked
from penstock.settings.declare import words_of

# ---- The report


class Cause(enum.Enum):
    """A usual cause of a difference: what a part of a user's own does, and what it may do instead."""

    CHANCE = (
        "two plain loops do not have this in common: random numbers of another source than torch's generators (which "
        "are seeded for each layer, microbatch and step), the time, or a value of a class or module that one loop "
        "leaves for the next"
    )
    ELSEWHERE = (
        "a layer or the loss reaches a parameter without holding it, by an attribute, a closure or a global name, "
        "so that in its stage nobody trains it; assign it (self.weight = other.weight), which ties it, or hand on "
        "what is computed with it as an output"
    )
    UNTRAINED = (
        "a layer or the loss reaches a parameter, or another tensor that requires a gradient, which no layer holds, so "
        "that nobody trains it; let a layer hold it as a parameter (a loss's the last layer, which gives it beside its "
        "output), or freeze it (requires_grad_(False))"
    )
    LEFT_BEHIND = (
        "a layer leaves something for a layer of another stage, or for the loss, in an object that both reach; in "
        "stages another microbatch's, or nothing, is there; hand it on as an output, (x, more)"
    )
    CALLS = (
        "a layer or the loss looks at how often, or in which order, it was called; it can ask for microbatch, "
        "num_microbatches and step by name"
    )
    UNDECLARED = (
        "a layer or the loss keeps something from step to step in an attribute, which no checkpoint holds; state is "
        "parameters, buffers (register_buffer) and get_extra_state"
    )
    REPLAYED = (
        "a layer is no function of its input, parameters, buffers and torch's random numbers, so that computing it "
        "again gives something else: it counts its calls, draws from a generator of its own, or changes its input in "
        "place; leave it out of recompute, or make it one"
    )
    JOINT = (
        "the optimizer joins parameters in its step, as a norm over all of them does, or random numbers that it draws "
        "in their order, so that ranks step otherwise; declare it by divides = 'model', which keeps it to one rank"
    )
    OPTIMIZER_STATE = (
        "the optimizer keeps something outside of state_dict(), which alone a checkpoint holds; put it into "
        "self.state[parameter] or the parameter groups"
    )
    NO_SUM = (
        "the loss, or its weight, is no sum over tokens or examples: a mean of each microbatch, or something that "
        "looks at all of it; loss_fn gives a sum and loss_weight_fn counts, and one mean is made of both"
    )
    MIXED = (
        "a layer mixes rows of different sequences of a microbatch, so that an answer depends on what else is in it; "
        "sequences.lengths says where each begins"
    )
    IN_PLACE = (
        "a tensor is changed in place that somebody else reads: a layer's input, a part of the batch, a parameter or "
        "its gradient; change a copy (clone())"
    )
    REFUSED = "the engine says itself what is wrong"

    @property
    def text(self) -> str:
        """The cause and what to do, in a sentence."""
        return self.value


class Way(enum.Enum):
    """A way of computing the steps that is held against the plain loop."""

    AGAIN = "a second plain loop"
    STAGES = "in stages"
    APART = "in a stage for each layer"
    RESUMED = "after a save and load"
    RECOMPUTED = "under activation checkpointing"
    SPLIT = "with another number of microbatches"
    SUMS = "by the sums over microbatches"


@dataclass(frozen=True)
class Difference:
    """The first place where one of the engine's ways parts from the plain loop."""

    #: the way that differs
    way: Way
    #: step, counted from 1, and microbatch, counted from 0, where one is known
    step: int
    microbatch: int | None
    #: what differs, in words such as "the gradient of layers.2.weight differs"
    what: str
    #: both values in a few words, or the engine's own error
    values: str
    #: usual causes, the likeliest first
    causes: tuple[Cause, ...]

    def __str__(self) -> str:
        place = f"step {self.step}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")
        return f"{place}, {self.way.value}: {self.what} ({self.values})"


@dataclass(frozen=True)
class CheckReport:
    """The findings of a check.

    >>> layers = [torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)]
    >>> batch = PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 6, 4)])
    >>> report = check(layers, batch)
    >>> report.is_equal, report.first
    (True, None)
    """

    #: of each way that was held against the plain loop and parted from it, the first place
    differences: tuple[Difference, ...]
    #: what was compared, in words
    compared: str

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    def raise_if_different(self) -> None:
        """For a test of one's own. Raises: AssertionError with the report, if anything differs."""
        if self.differences:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        if self.first is None:
            return f"equal, bit for bit: {self.compared}"
        lines = [str(self.first)]
        causes = () if Cause.REFUSED in self.first.causes else self.first.causes
        for number, cause in enumerate(causes):
            lines.append(f"  {'or' if number else 'usual cause'}: {cause.text}")
        lines += map(str, self.differences[1:])
        return "\n".join(lines)


# ---- The parts, of which each rank and each loop has copies, as processes have


@dataclass(frozen=True, eq=False)
class OwnParts:
    """A user's own layers, loss and optimizer; or the units of a model in the place of layers."""

    layers: Sequence[nn.Module | partial[Any]] | Sequence[UnitSpec]
    loss_fn: LossFn
    loss_weight_fn: LossWeightFn
    options: EngineOptions

    def copied(self) -> OwnParts:
        """Copies of all, in which whatever they have in common is one thing again. Raises: ValueError."""
        optimizer, memo = self.options.optimizer, dict[int, Any]()
        parts = [list(self.layers), self.loss_fn, self.loss_weight_fn, optimizer.factory, optimizer.scheduler]
        for function in _functions(parts):
            _copy_function(function, memo)
        try:
            layers, loss_fn, weight_fn, factory, scheduler = copy.deepcopy(parts, memo)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"a layer, the loss or the optimizer cannot be copied: {words_of(error)}; a check works on copies, by "
                "copy.deepcopy"
            ) from error
        made = replace(optimizer, factory=factory, scheduler=scheduler)
        return OwnParts(layers, loss_fn, weight_fn, replace(self.options, optimizer=made))

    @cached_property
    def device(self) -> torch.device:
        """The device on which all is computed, here and by all ranks."""
        return agree_on_device(self.options.device, lambda view: [view], 0)

    def units(self) -> Sequence[UnitSpec]:
        """The layers as the engine takes them. Raises: ValueError, as `Engine.from_layers`."""
        units = [layer for layer in self.layers if isinstance(layer, UnitSpec)]
        return units or units_of_layers(self.layers)  # pyright: ignore[reportArgumentType]  # all are, or none

    def plain_loop(self) -> PlainLoop:
        """A plain loop over these very layers."""
        return PlainLoop(self.units(), self.loss_fn, self.loss_weight_fn, self.options, self.device)

    def engine(self, ranks: RanksInTurn, rank: int, hidden_size: int, changes: Mapping[str, Any]) -> EngineInTurn:
        """One rank's engine of these very layers."""
        options = replace(self.options, **changes)
        pipeline = PipelineInTurn(ranks, rank, self.units(), hidden_size, options)
        return EngineInTurn(pipeline, self.loss_fn, self.loss_weight_fn)


def _functions(parts: Iterable[Any]) -> Iterator[FunctionType]:
    """The functions among parts, and those that modules have as attributes, hooks among them."""
    for part in parts:
        if isinstance(part, FunctionType):
            yield part
        elif isinstance(part, nn.Module):
            for module in part.modules():
                yield from _functions(value for key, value in vars(module).items() if key != "_modules")
        elif isinstance(part, partial):
            yield from _functions((part.func, *part.args, *part.keywords.values()))
        elif isinstance(part, list | tuple | dict):
            yield from _functions(part.values() if isinstance(part, dict) else part)


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """A function whose variables are copies, as another process has; `deepcopy` gives the function itself."""
    if function.__closure__ is None or id(function) in memo:
        return memo.get(id(function), function)
    cells = tuple(CellType() for _ in function.__closure__)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, memo[id(function)] = function.__kwdefaults__, made
    vars(made).update(vars(function))
    for cell, old_cell in zip(cells, function.__closure__, strict=True):
        try:
            value = old_cell.cell_contents
            cell.cell_contents = (
                _copy_function(value, memo) if isinstance(value, FunctionType) else copy.deepcopy(value, memo)
            )
        except ValueError:
            continue  # a variable without a value
        except (TypeError, RuntimeError):
            cell.cell_contents = old_cell.cell_contents  # what cannot be copied, such as a file, is the same for all
    return made


# ---- What a way computes


class Quantity(enum.Enum):
    """A kind of number that is compared, in the order in which a step computes them."""

    OUTPUT = "the output of"
    LOSS = "the loss"
    GRADIENT = "the gradient of"
    STATE = ""
    RANDOM = "the state of torch's random numbers after the step"


class Point(NamedTuple):
    """The place of a number: in steps and microbatches (-1 for none), and of which layer or tensor it is."""

    step: int
    kind: Quantity
    microbatch: int
    name: str


@dataclass(eq=False)
class Observed:
    """All that one way has computed, in the order of a plain loop."""

    #: a digest of each output, the other numbers themselves
    values: dict[Point, Any] = field(default_factory=dict)
    #: parameters that a rank has reached without holding them, with that rank
    reached: dict[str, int] = field(default_factory=dict)
    #: the width of what the first of the layers gives
    width: int = 0
    _step: int = 0
    #: by layer, how often it was called in this step
    _calls: Counter[str] = field(default_factory=Counter)

    def watch(self, modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
        """Note what the layers of these names give from now on, microbatch after microbatch."""

        def note(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
            self.values[Point(self._step, Quantity.OUTPUT, self._calls[name], name)] = _digest(output)
            self._calls[name] += 1
            if isinstance(output, Tensor) and output.dim():
                self.width = self.width or output.shape[-1]

        for name in modules.keys() & names:
            modules[name].register_forward_hook(partial(note, name))

    def take(self, loop: PlainLoop | EngineInTurn, microbatches: Sequence[PackedBatch], step: int) -> None:
        """Take a step; note what it has computed, and the state that it left, as torch's `state_dict` has it."""
        self._step, self._calls = step, Counter()
        loop.take_step(microbatches)
        for number, loss in enumerate(loop.losses):
            self.values[Point(self._step, Quantity.LOSS, number, "")] = loss.detach().clone()
        for name, gradient in loop.gradients.items():
            self.values[Point(self._step, Quantity.GRADIENT, -1, name)] = gradient
        for layer, module in loop.modules.items():
            for key, state in module.state_dict().items():
                value = state.detach().clone() if isinstance(state, Tensor) else _digest(state)
                self.values[Point(self._step, Quantity.STATE, -1, f"{layer}.{key}")] = value
        state = random_state()
        self.values[Point(self._step, Quantity.RANDOM, -1, "")] = _digest([state["torch"], state.get("cuda")])


def _digest(value: Any) -> int:
    """A number that tells apart values of different bits: tensors, numbers, text, and containers of them."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest = zlib.crc32(str((value.dtype, tuple(value.shape))).encode())
        return zlib.crc32(data.view(torch.uint8).numpy().tobytes(), digest)
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([_digest(part) for part in value]).encode())
    return zlib.crc32(repr(value).encode())


def _is_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one == other
    return one.shape == other.shape and bool(torch.isclose(one, other, 0.0, 0.0, equal_nan=True).all())


def _in_words(one: Any, other: Any) -> str:
    """The difference of two values of one point, in words."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return "other bits"
    if one.shape != other.shape:
        return f"{list(one.shape)} in a plain loop, {list(other.shape)} here"
    if one.numel() == 1:
        return f"{one.item():.9g} in a plain loop, {other.item():.9g} here"
    wide = [tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (one, other)]
    return f"by up to {(wide[0] - wide[1]).abs().max().item():.3g}, of values up to {wide[0].abs().max().item():.3g}"


# ---- The ways, and the comparison


@dataclass(eq=False)
class Check:
    """One check: the parts, the batch, and how many steps and microbatches there are."""

    parts: OwnParts
    batch: PackedBatch
    layout: Layout
    num_steps: int
    #: numbers of microbatches: the usual one, and another
    num_microbatches: int
    other_num: int
    #: what the plain loop computes
    plain: Observed = field(default_factory=Observed)
    #: full names of the parameters
    parameters: frozenset[str] = frozenset()
    #: see `PlainLoop.strangers`
    strangers: Sequence[Tensor] = ()

    def split(self, num: int) -> Split:
        """The batch, whose tensors are a copy, in microbatches."""
        return split(copy.deepcopy(self.batch), MicroBatchSpec(num=num))

    @property
    def watched(self) -> set[str]:
        """The layers whose outputs are compared: not those of which one module stands in several places."""
        num_places = Counter(map(id, self.parts.layers))
        return {
            part.name if isinstance(part, UnitSpec) else f"layers.{i}"
            for i, part in enumerate(self.parts.layers)
            if num_places[id(part)] == 1
        }

    def run_plain(self, parts: OwnParts, num: int, num_steps: int, observed: Observed) -> Observed:
        """Train copies of the layers by a plain loop. Raises: whatever a user's own parts raise there."""
        loop = parts.plain_loop()
        observed.watch(loop.modules, self.watched)
        for step in range(1, num_steps + 1):
            observed.take(loop, self.split(num).microbatches, step)
        self.parameters, self.strangers = frozenset(loop.parameters), loop.strangers
        return observed

    def run_engine(
        self, layout: Layout, num: int, steps: range, observed: Observed, folder: Path | None = None, **changes: Any
    ) -> None:
        """Train in stages, on copies for each rank; with a folder, saved after the first step or loaded before it.

        Raises: the engine's error.
        """
        ranks = RanksInTurn(layout, self.parts.device)

        def work(rank: int) -> None:
            parts, rank_observed = self.parts.copied(), Observed()
            engine = parts.engine(ranks, rank, self.plain.width or 1, changes)
            if not changes.get("recompute"):
                rank_observed.watch(engine.modules, self.watched)
            if folder is not None and steps.start > 1:
                engine.load(folder)
            for step in steps:
                rank_observed.take(engine, self.split(num).microbatches, step)
                observed.values |= rank_observed.values
                if folder is not None and step == 1:
                    engine.save(folder)
            for unit, layer in zip(engine.pipeline.units, parts.layers, strict=True):
                if unit.name not in engine.modules and isinstance(layer, nn.Module):
                    reached = [name for name, parameter in layer.named_parameters() if parameter.grad is not None]
                    observed.reached |= {f"{unit.name}.{name}": rank for name in reached}

        ranks.turns.run(work)

    def compare(self, way: Way, plain: Observed, run: Callable[[Observed], object]) -> Difference | None:
        """The first place where what `run` computes parts from the plain loop; None if there is none."""
        observed, error = Observed(), None
        try:
            run(observed)
        except Exception as caught:
            error = caught
        steps = {place.step for place in observed.values}
        for place, expected in plain.values.items():
            is_there = place in observed.values
            if is_there and _is_equal(expected, observed.values[place]):
                continue
            if not is_there and (error or place.step not in steps or place.kind is Quantity.OUTPUT):
                continue
            values = _in_words(expected, observed.values[place]) if is_there else "it is not there"
            if place.kind is Quantity.GRADIENT and place.name in observed.reached:
                values += f"; rank {observed.reached[place.name]}, which does not hold it, reaches it, too"
            what = f"{place.kind.value} {place.name}".strip() + " differs"
            number = None if place.microbatch < 0 else place.microbatch
            return Difference(way, place.step, number, what, values, self._causes(way, place, observed.reached))
        if error is None:
            return None
        causes = self._causes(way, Point(1, Quantity.OUTPUT, -1, ""), {})
        if isinstance(error, ValueError | PipelineError):
            causes = (Cause.REFUSED, *causes)
        step, values = max(steps, default=int(way is Way.RESUMED)) + 1, f"{type(error).__name__}: {words_of(error)}"
        return Difference(way, step, None, "the engine fails", values, causes)

    def _causes(self, way: Way, place: Point, reached: Mapping[str, int]) -> tuple[Cause, ...]:
        """Usual causes of a difference there, the likeliest first."""
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
        """The first place of each way that parts from the plain loop; after one in stages there is no other."""
        self.run_plain(self.parts.copied(), self.num_microbatches, self.num_steps, self.plain)
        with tempfile.TemporaryDirectory(prefix="penstock-check-") as folder:
            for way, look in self._ways(Path(folder)).items():
                if (difference := look()) is not None:
                    yield difference
                    if way in (Way.AGAIN, Way.STAGES, Way.APART):
                        return

    def _ways(self, folder: Path) -> dict[Way, Callable[[], Difference | None]]:
        """All ways in their order, each as a function that looks for its first difference."""
        num, steps, layout = self.num_microbatches, range(1, self.num_steps + 1), self.layout

        def staged(way: Way, layout: Layout, steps: range, **changes: Any) -> Callable[[], Difference | None]:
            return partial(self.compare, way, self.plain, partial(self.run_engine, layout, num, steps, **changes))

        def with_fewer() -> Difference | None:
            plain = self.run_plain(self.parts.copied(), self.other_num, 1, Observed())
            return self.compare(Way.SPLIT, plain, partial(self.run_engine, layout, self.other_num, steps[:1]))

        ways = {Way.AGAIN: self._again, Way.STAGES: staged(Way.STAGES, layout, steps, folder=folder)}
        apart = Layout(pp=min(len(self.parts.layers), _MOST_STAGES))
        # Stages of one layer share nothing; layers that are tied may lie together.
        if apart.pp > layout.pp and not any(unit.tied for unit in self.parts.copied().units()):
            ways[Way.APART] = staged(Way.APART, apart, steps, schedule=ScheduleConfig())
        return ways | {
            Way.RESUMED: staged(Way.RESUMED, layout, steps[1:], folder=folder),
            Way.RECOMPUTED: staged(Way.RECOMPUTED, layout, steps, recompute="full"),
            Way.SPLIT: with_fewer,
            Way.SUMS: self._sums,
        }

    def _again(self) -> Difference | None:
        """Compare a second plain loop, while the layers that were given have other values: copies do not read them."""
        layers = [layer for layer in self.parts.layers if isinstance(layer, nn.Module)]
        tensors = {id(tensor): tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
        floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        if self.strangers:
            ours = any(tensor is stranger for tensor in floats for stranger in self.strangers)
            values = f"it is of {list(self.strangers[0].shape)}"
            cause = Cause.ELSEWHERE if ours else Cause.UNTRAINED
            return Difference(Way.AGAIN, 1, None, "a tensor gets a gradient that no layer holds", values, (cause,))
        again = partial(self.run_plain, self.parts.copied(), self.num_microbatches, self.num_steps)
        before = [tensor.detach().clone() for tensor in floats]
        for tensor in floats:
            tensor.data.add_(1.0)
        try:
            return self.compare(Way.AGAIN, self.plain, again)
        finally:
            for tensor, values in zip(floats, before, strict=True):
                tensor.data.copy_(values)

    def _sums(self) -> Difference | None:
        """Compare the batch's loss, weight and outputs in evaluation with those of another number of microbatches."""
        (loss, weight, rows), (other_loss, other_weight, others) = map(
            self._evaluated, (self.num_microbatches, self.other_num)
        )
        differs = partial(Difference, Way.SUMS, 1, None)
        if not math.isclose(weight, other_weight, rel_tol=1e-6):
            values = f"{weight:.9g} and {other_weight:.9g}"
            return differs("the sum of loss_weight_fn differs", values, (Cause.NO_SUM,))
        # Layers that draw random numbers in evaluation too give others in other microbatches.
        if self._evaluated(self.num_microbatches, self.parts.options.seed + 1)[0] != loss:
            return None
        if rows is not None and others is not None:
            spread = float((rows - others).abs().max() / rows.abs().max().clamp_min(1e-12))
            if spread > _ROUNDING:
                what, values = "what the last layer gives for a sequence differs", f"by {spread:.3g} of the largest"
                return differs(what, values, (Cause.MIXED, Cause.UNDECLARED))
        if not math.isclose(loss, other_loss, rel_tol=_ROUNDING, abs_tol=1e-6):
            values = f"{loss:.6g} of {self.num_microbatches} microbatches, {other_loss:.6g} of {self.other_num}"
            return differs("the loss differs", values, (Cause.NO_SUM, Cause.MIXED))
        return None

    def _evaluated(self, num: int, seed: int | None = None) -> tuple[float, float, Tensor | None]:
        """A batch's loss and weight in evaluation mode, and the last layer's rows, if they are those of tokens."""
        parts, parted, outputs = self.parts.copied(), self.split(num), list[Any]()
        seed = parts.options.seed if seed is None else seed
        parts = replace(parts, options=replace(parts.options, seed=seed))
        loop, microbatches = parts.plain_loop(), parted.microbatches
        list(loop.modules.values())[-1].register_forward_hook(lambda module, arguments, output: outputs.append(output))
        losses = loop.losses_of(microbatches, 1, training=False)
        weight = math.fsum(float(parts.loss_weight_fn(microbatch)) for microbatch in microbatches)
        shapes = [output.shape[:1] if isinstance(output, Tensor) else None for output in outputs]
        are_rows = shapes == [(microbatch.num_tokens,) for microbatch in microbatches]
        rows = merge([output.detach().double() for output in outputs], parted) if are_rows else None
        return math.fsum(map(float, losses)) * weight, weight, rows


_MOST_STAGES = 8
"""Stages of one layer each; each is a thread."""
_ROUNDING = 1e-3
"""The part of a value by which sums in another order may differ."""


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
    """The check of parts on a batch; see `check`. Raises: ValueError, and whatever the parts raise in a plain loop."""
    if layout.world_size != layout.pp or layout.pp < 2:
        raise ValueError(f"a check runs pipeline stages alone, two or more, not {layout}; give Layout(pp=2)")
    if steps < 2:
        raise ValueError(f"steps = {steps}: one step comes before a save and load and one after; give 2 or more")
    num_items = len(batch.ids)
    if batch.data is None or num_items < 2:
        raise ValueError(f"a check needs a batch with data, of 2 items or more to split; this one has {num_items}")
    num = min(4, num_items)
    other = num - num // 2
    made = replace(parts, options=_comparable(parts.options))
    differences = tuple(Check(made, batch, layout, steps, num, other).differences())
    compared = (
        f"{steps} steps in {layout.pp} stages as in a plain loop, after a save and load, under activation "
        f"checkpointing, and with {num} and {other} microbatches"
    )
    return CheckReport(differences, compared)


def _comparable(options: EngineOptions) -> EngineOptions:
    """The options with which bits are compared: on the CPU where no device is named. Raises: ValueError."""
    usual = EngineOptions()
    if others := [name for name in _CHANGE_BITS if getattr(options, name) != getattr(usual, name)]:
        value = getattr(options, others[0])
        raise ValueError(f"a check compares bits, which {others[0]} = {value!r} changes; leave it out")
    if options.precision in (Precision.FP16, Precision.BF16_AUTOCAST):
        raise ValueError(f"precision = {options.precision} cannot be checked; possible are fp32, fp64 and bf16")
    device = "cpu" if options.device == "auto" else options.device
    return replace(options, device=device, recompute="none", num_kept_microbatches=0)


def compare_run(config: RunConfig, num_stages: int, steps: int, num_layers: int) -> CheckReport:
    """The check of a run's model, cut down to its first layers, with weights of its seed, on made-up tokens.

    Raises: ValueError where the settings cannot go together, or the model cannot be checked.
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
"""Those of the made-up documents; so few of their tokens have no label that the last layer computes all rows."""
_VOCAB_SIZE = 256
"""The tokens of a model that takes the number from its tokenizer."""
