"""A stage: a contiguous run of the model's units, whose forward and backward are lanes, and the tape between them.

Shapes: T tokens of the microbatch, D hidden size.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from penstock.model import (
    NOTHING_GIVEN,
    CachedRows,
    CachedUnit,
    CacheSize,
    Driven,
    Given,
    Lane,
    Parameters,
    PendingGradient,
    RecomputedEntry,
    RecomputedLane,
    SegmentedUnit,
    Sequences,
    SlotRows,
    Turn,
    WeightCasts,
    WeightGradients,
    enter_graph,
    leaf_of,
    recomputed,
)
from penstock.runtime.errors import PipelineError, name_changing, note_layer, shape_given
from penstock.runtime.layer_state import BufferHistory, BufferValues
from penstock.runtime.message import GIVEN, Boundary, Form, Message
from penstock.runtime.offload import Saved
from penstock.runtime.trace import named_context, profiler_is_active
from penstock.schedule import Direction
from penstock.settings.declare import type_in_words, words_of

# ---- The call of a unit without collectives: with what its `forward` asks for, from its own random numbers


# How Python says that a function was called with other arguments than it takes.
_ARGUMENTS = re.compile(
    r"missing \d+ required|unexpected keyword argument|multiple values for|positional arguments? but"
)
# Errors of Python and torch that are no more than their message.
_PLAIN = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


@dataclass(eq=False)
class UnitCall:
    """A unit as a stage calls it."""

    #: name over the whole model
    name: str
    #: the unit itself
    module: nn.Module
    #: True under activation checkpointing
    recompute: bool
    #: the reason why a stream alone is not enough, as far as the batch goes; empty if it is
    lacks: str = field(default="", init=False)
    #: by which `forward` is called
    parameters: Parameters = field(init=False)
    #: False for units that never draw a random number
    draws: bool = field(init=False)
    #: True once it has changed its input in place, where a backward follows
    changes_input: bool = field(default=False, init=False)
    #: what its buffers were before each forward that may be computed again
    buffers: BufferHistory = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = Parameters.of(self.module)
        self.draws = bool(getattr(self.module, "has_randomness", True))
        self.buffers = BufferHistory(self.module)

    def lacking(self, keys: Iterable[str]) -> str:
        """A sentence, if the unit needs more than a stream alone and these keys of the batch."""
        if not (missing := self.parameters.missing(keys)):
            return ""
        return (
            f"{self.name} takes {missing[0]!r}, which has no default and is no key of the batch; its keys are "
            f"{sorted(keys)}"
        )

    def message(self, output: Any, boundary: "Boundary", num_tokens: int) -> Message:
        """The unit's output as it goes on to the next. Raises: PipelineError naming the unit."""
        if boundary.is_open:
            try:
                message = Message.of(output)
            except ValueError as error:
                raise PipelineError(f"{self.name} gave {error}; possible for the next layer are {GIVEN}") from None
            if message.form is Form.ONE and output.shape[-1:] != (boundary.hidden_size,):
                raise PipelineError(
                    f"{self.name} gave {message.header}; from layer to layer go rows of [{boundary.hidden_size}], the "
                    "hidden size, or several tensors as a tuple or mapping"
                )
            return message
        if isinstance(output, Tensor) and output.shape == boundary.shape(num_tokens):
            return Message((output,))
        got = Message((output,)).header if isinstance(output, Tensor) else type_in_words(output)
        raise PipelineError(
            f"{self.name} gave {got} for {num_tokens} tokens; from layer to layer goes {boundary.header(num_tokens)}, "
            f"the hidden size being {boundary.hidden_size}"
        )

    def __call__(self, x: Any, sequences: Sequences, given: Given, tape: "Tape | None" = None) -> Any:
        """The unit's output for what the unit before gave, one or several tensors."""
        if not torch.is_grad_enabled():
            return self.run(x, sequences, given)
        versions, keeps = _versions(x), not self.recompute or (tape is not None and tape.keeps)
        replays = None if tape is None else tape.replays
        if self.recompute or replays is not None:
            call = RepeatedCall(self, sequences, given)
            output = call(x) if keeps else recomputed(call, x)
            if replays is not None:
                replays.append(call)
        else:
            output = self.run(x, sequences, given)
        if _versions(x) != versions:
            self.changes_input = True
            if not keeps:
                raise PipelineError(
                    f"{self.name} changes its input in place, so that its activations cannot be computed again from "
                    "it; let it work on a copy, or leave the layer out of recompute"
                )
        return output

    def run(self, x: Any, sequences: Sequences, given: Given, call: Callable[..., Any] | None = None) -> Any:
        """Call the module, or what `call` is in its place: a function of its arguments and keywords."""
        if self.lacks and isinstance(x, Tensor):
            raise ValueError(self.lacks)
        if self.draws and given.randomness is not None:
            given.randomness.begin(self.name)
        try:
            args, kwargs = self.parameters.arguments(x, sequences, given)
            with record_function(self.name) if profiler_is_active() else _NO_PROFILER:
                return self.module(*args, **kwargs) if call is None else call(args, kwargs)
        except TypeError as error:
            if not isinstance(x, Tensor):
                given_here = f"the {len(x)} tensors of the layer before"
            elif _ARGUMENTS.search(words_of(error)):
                given_here = f"the stream and {sorted(given.keys)}"
            else:
                self._name(error, x)
                raise
            raise PipelineError(f"{self.name}, given {given_here}: {error}") from error
        except Exception as error:
            # No other variable may hold it: with its traceback it would keep this frame's tensors, and activation
            # checkpointing ends each unit's second run by an exception.
            self._name(error, x)
            raise

    def _name(self, error: Exception, x: Any) -> None:
        """Raise the error anew with the layer's name in its message, or where it has more than that, add a note."""
        place, shape = f"{self.name} ({type(self.module).__name__})", shape_given(error, x)
        if type(error) in _PLAIN:
            raise type(error)(f"{place}: {error}{shape}") from error
        note_layer(error, place + shape)


@dataclass(eq=False)
class RepeatedCall:
    """A unit's call which may be made again, from the same input and with the buffers as the first one saw them."""

    #: what is called, and with what beside its input
    unit: UnitCall
    sequences: Sequences
    given: Given
    #: None before the first call
    _buffers: Mapping[str, BufferValues] | None = None

    @property
    def has_randomness(self) -> bool:
        """True if torch must replay the random state: a unit with a seed of its own begins there each time."""
        return self.unit.draws and self.given.randomness is None

    def __call__(self, x: Any) -> Any:
        unit, buffers = self.unit, self._buffers
        if buffers is not None:
            return unit.run(x, self.sequences, self.given, partial(unit.buffers.call_again, buffers))
        with unit.buffers.forward() as self._buffers:
            return unit.run(x, self.sequences, self.given)


def _versions(x: Any) -> list[int]:
    """Numbers that change where a tensor of a layer's input is changed in place; those of inference mode have none."""
    if isinstance(x, Tensor):
        return [0 if x.is_inference() else x._version]
    return [version for tensor in (x if isinstance(x, tuple) else x.values()) for version in _versions(tensor)]


_NO_PROFILER = nullcontext()
Grads = tuple[Tensor, ...]
ResultFn = Callable[[Tensor], Tensor]


# ---- The tape: what a stage keeps of a microbatch from its F to its last backward action


@dataclass(slots=True)
class GraphSegment:
    """The piece of a lane between two cuts: its detached inputs and the places where their gradients enter.

    An output is kept as its *edge* in the autograd graph, not as a tensor: so its data is free as soon as nothing else
    needs it.
    """

    #: the inputs, whose `.grad` becomes the gradient to hand on; None for those that take none, such as token ids
    leaves: Sequence[Tensor | None]
    #: the edges of the outputs that can have a gradient; None for one that has no graph
    roots: Sequence[GradientEdge | None]
    #: records the segment anew on a tape, with all activations; None where that is not asked for
    replay: "Callable[[Tape], None] | None" = None

    def backward(self, grads: Grads | None) -> Grads:
        """Backward from the outputs' gradients (None: the output is the loss); returns those of the inputs.

        An input that the outputs do not depend on has the gradient zero.
        """
        if grads is None:
            roots = [root for root in self.roots if root is not None]
            torch.autograd.backward(roots)  # type: ignore[arg-type]  # the stubs lag behind GradientEdge
        elif edges := [pair for pair in zip(self.roots, grads, strict=True) if pair[0] is not None]:
            enter_graph(*zip(*edges, strict=True))  # pyright: ignore[reportArgumentType]
        return tuple(
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves if leaf is not None]
        )


def _can_have_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(slots=True, weakref_slot=True)
class Tape:
    """A microbatch's segments in forward order, each with a `backward`, and the gradients that I left for W."""

    segments: list[Any] = field(default_factory=list)
    weight_gradients: list[PendingGradient] = field(default_factory=list)
    #: True for all activations, also of units under activation checkpointing
    keeps: bool = False
    #: False where no backward will leave the gradients of weights for later
    splits: bool = True
    #: the calls of the segment under way, to be made again; None where no `R` will ask for it
    replays: list[RepeatedCall] | None = None
    #: what autograd saves, where it moves to host memory; else None
    saved: Saved | None = None

    def record(self, leaves: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
        """Note the segment that led from `leaves` to `outputs`, of which only the gradient edges stay."""
        roots = []
        for output in outputs:
            if _can_have_gradient(output):
                roots.append(get_gradient_edge(output) if output.requires_grad else None)
        self.segments.append(GraphSegment(leaves, roots))

    @property
    def roots(self) -> list[GradientEdge]:
        """The edges by which gradients enter the graphs of all segments."""
        graphs = [segment for segment in self.segments if isinstance(segment, GraphSegment)]
        return [root for graph in graphs for root in graph.roots if root is not None]


class Tapes(dict[tuple[int, int], Tape]):
    """A rank's tapes by stage and microbatch: F makes one, backward actions read it, the last of them takes it away."""

    #: the largest number of tapes that were live at once
    peak: int = 0

    def make(self, stage: int, microbatch: int, keeps: bool = False, splits: bool = True) -> Tape:
        """Add a new tape."""
        assert (stage, microbatch) not in self, f"stage {stage} already has a tape of microbatch {microbatch}"
        tape = self[stage, microbatch] = Tape(keeps=keeps, splits=splits)
        self.peak = max(self.peak, len(self))
        return tape

    def __missing__(self, key: tuple[int, int]) -> Tape:
        live = ", ".join(f"{m} of stage {s}" for s, m in sorted(self)) or "none"
        raise KeyError(f"no tape of microbatch {key[1]} of stage {key[0]}; live are those of microbatch {live}")


# ---- A stage: a contiguous run of the model's units, whose forward and backward are lanes


@dataclass(frozen=True)
class Pairs:
    """The turns that the two actions of a fused pair take on a rank.

    The program and the bits are the same either way.
    """

    #: one half computes while the other's collectives are under way; otherwise the forward runs, then the backward
    overlap: bool = True
    #: a layer's backward ends before the forward's experts compute: its activations are freed by then, but the exchange
    #: of its tokens' gradients is not hidden
    early_release: bool = False


ALONE = Pairs(overlap=False)
"""For a forward or backward outside of pairs, beside which nothing else computes."""


@dataclass(frozen=True, eq=False)
class LaneCall:
    """A unit with collectives as a stage calls it: its forward and its backward are lanes."""

    #: name over the whole model
    name: str
    #: the unit itself
    module: SegmentedUnit
    #: True under activation checkpointing
    recompute: bool

    def unit(self, tape: Tape | None) -> SegmentedUnit | RecomputedLane:
        """The unit, or with a tape that does not keep all activations what computes them again."""
        is_whole = not self.recompute or tape is None or tape.keeps
        return self.module if is_whole else RecomputedLane(self.module)


class Stage:
    """The units of one local stage with their parameters; owns no microbatch's data (tapes do).

    A module maps the residual stream, and what else its `forward` asks for by name (see `Parameters`), to the residual
    stream. `recompute` are the names of the units under activation checkpointing, whose activations backward computes
    again.
    """

    #: called before weights are read; may wait for those that other ranks step
    wait_for_weights: Callable[[], None]
    #: ends the full names of the parameters; marks the second copy of a bidirectional model
    suffix: str = ""
    #: True if a unit launches collectives, so that lanes of the stage are suspended
    exchanges: bool
    #: True if a unit is under activation checkpointing
    recomputes: bool
    #: number over the whole model
    index: int
    #: (full name, module) in order
    units: tuple[tuple[str, nn.Module], ...]
    #: shape and dtype of the tensors between stages
    boundary: Boundary
    #: defers the weight gradients of the linear layers, for split backwards and to fill the time in which a collective
    #: is under way; None where neither is ever done
    weight_gradients: WeightGradients | None
    #: makes the context in which forwards run
    autocast: Callable[[], AbstractContextManager[Any]]
    #: the units as they are called: one with collectives alone, the others in runs as long as possible
    _runs: list[LaneCall | list[UnitCall]]
    #: training or evaluation mode as it was last set
    _is_training: bool | None = None

    def __init__(
        self,
        index: int,
        units: Sequence[tuple[str, nn.Module]],
        boundary: Boundary,
        weight_gradients: WeightGradients | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        recompute: Container[str] = (),
    ) -> None:
        self.index, self.boundary, self.weight_gradients, self.autocast = index, boundary, weight_gradients, autocast
        self.units, self._runs = tuple(units), []
        self.recomputes = any(name in recompute for name, _ in units)
        for is_lane, run in groupby(units, lambda unit: isinstance(unit[1], SegmentedUnit)):
            if is_lane:
                self._runs += [LaneCall(name, module, name in recompute) for name, module in run]  # pyright: ignore
            else:
                self._runs.append([UnitCall(name, module, name in recompute) for name, module in run])
        self.wait_for_weights = lambda: None
        self.exchanges = not all(isinstance(run, list) for run in self._runs)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(full name, parameter) in model order."""
        return [
            (f"{name}.{key}{self.suffix}", parameter)
            for name, module in self.units
            for key, parameter in module.named_parameters()
        ]

    @property
    def calls(self) -> list[UnitCall]:
        """The units that are called by the names of their parameters: all without collectives."""
        return [call for run in self._runs if isinstance(run, list) for call in run]

    def set_training(self, training: bool) -> None:
        """Put the units into training or evaluation mode, whatever was done to them before."""
        for _, module in self.units:
            # A layer may keep to a mode of its own, as a frozen normalisation does: it hears of the first one too.
            if training is not self._is_training or any(part.training is not training for part in module.modules()):
                module.train(training)
        self._is_training = training

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """(full name, buffer) in model order; those that belong to the modules' state dict."""
        return [
            (f"{name}.{f'{path}.' if path else ''}{key}{self.suffix}", buffer)
            for name, module in self.units
            for path, part in module.named_modules()
            for key, buffer in part._buffers.items()
            if buffer is not None and key not in part._non_persistent_buffers_set
        ]

    def forward(
        self,
        tape: Tape | None,
        x: Message,
        sequences: Sequences,
        result_fn: ResultFn | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> Lane[Message]:
        """Forward of one microbatch; `tape` is None where no backward follows.

        Returns the output, [T, D] unless the boundary is open, without its graph; on the last stage what `result_fn`
        makes of it (the scaled loss, a scalar).
        """
        self.wait_for_weights()
        if self.weight_gradients is not None:
            self.weight_gradients.may_defer = tape is not None and (tape.splits or self.exchanges)
        # A stage of no units hands on its input, as a segment whose gradients pass it likewise.
        for run in self._runs or [[]]:
            if isinstance(run, list):
                x = self._segment(run, x, tape, sequences, result_fn, given)
                continue
            context = partial(named_context, run.name, partial(self._context, tape))
            lane = run.unit(tape).forward_lane(tape, x.tensors[0], sequences)
            x = Message(((yield from Driven(lane, context)),))  # pyright: ignore[reportArgumentType]
            if result_fn is not None and run is self._runs[-1]:
                x = self._segment([], x, tape, sequences, result_fn, given)
        return x

    def _segment(
        self,
        calls: list[UnitCall],
        x: Message,
        tape: Tape | None,
        sequences: Sequences,
        result_fn: ResultFn | None,
        given: Given,
    ) -> Message:
        """One segment: units that launch no collective, and on the last stage what follows them."""
        is_last = not calls or calls is self._runs[-1]
        output, leaves = self._entered(x, tape)
        h = output.value
        with self._context(tape):
            for call in calls:
                h = call(h, sequences, given, tape)
                # The loss may take any output of the last layer.
                if result_fn is None or not (is_last and call is calls[-1]):
                    output = call.message(h, self.boundary, sequences.num_tokens)
            if is_last and result_fn is not None:
                if given.randomness is not None:
                    given.randomness.begin("loss")
                output = Message((result_fn(h),))
        if tape is not None:
            tape.record(leaves, output.tensors)
            if tape.replays is not None:
                replays, tape.replays = tape.replays, []
                tape.segments[-1].replay = partial(self._replay, replays, x)
        return output.of_tensors(tuple(tensor.detach() for tensor in output.tensors))

    def _context(self, tape: Tape | None) -> AbstractContextManager[Any]:
        """The context in which the units of a tape compute."""
        return self.autocast() if tape is None or tape.saved is None else tape.saved.noted(self.autocast())

    def _replay(self, replays: Sequence[RepeatedCall], x: Message, tape: Tape) -> None:
        """Run the units of a segment again, from the same input, and record it with all activations."""
        output, leaves = self._entered(x, tape)
        h = output.value
        with self._context(tape):
            for call in replays:
                h = call(h)
                output = call.unit.message(h, self.boundary, call.sequences.num_tokens)
        tape.record(leaves, output.tensors)

    def recompute(self, tape: Tape) -> Lane[None]:
        """Compute again, ahead of the backward, what the tape of one microbatch lacks."""
        segments, tape.segments, tape.replays = tape.segments, [], None
        if self.weight_gradients is not None:
            self.weight_gradients.may_defer = tape.splits or self.exchanges
        for entry in segments:
            if isinstance(entry, RecomputedEntry):
                yield from entry.forward_again(tape)
            elif isinstance(entry, GraphSegment) and entry.replay is not None:
                entry.replay(tape)
            else:
                tape.segments.append(entry)

    def _entered(self, x: Message, tape: Tape | None) -> tuple[Message, list[Tensor | None]]:
        """A segment's input as its first unit is given it, and the leaves where its gradients end."""
        if tape is None:
            return x, []
        leaves, entered = [], []
        for tensor in x.tensors:
            leaf = leaf_of(tensor) if _can_have_gradient(tensor) else None
            leaves.append(leaf)
            if leaf is not None and self.boundary.is_open:
                # Autograd allows no work in place on a leaf; inside a stage the unit would be given none.
                entered.append(torch.ops.aten._unsafe_view(leaf, leaf.shape))
            else:
                entered.append(tensor if leaf is None else leaf)
        return x.of_tensors(tuple(entered)), leaves

    def check_leaving(self, result: Message, direction: Direction, num_tokens: int) -> None:
        """Refuse a microbatch's result that is not what its neighbour awaits.

        Raises:
            ValueError: saying what the stage gives, and what its neighbour awaits.
        """
        awaited = self.boundary.header(num_tokens)
        if awaited is not None and result.header != awaited:
            end, (name, _) = ("last", self.units[-1]) if direction is Direction.FORWARD else ("first", self.units[0])
            raise ValueError(
                f"stage {self.index}, whose {end} layer is {name}, gives {result.header}; its neighbour "
                f"awaits {awaited}"
            )

    def check_cached(self) -> None:
        """Refuse units that cannot read chunk by chunk.

        Raises:
            ValueError: naming the unit.
        """
        for name, module in self.units:
            if not isinstance(module, CachedUnit):
                raise ValueError(f"{name} cannot generate: {type(module).__name__} has no `new_cache` and `decode`")

    def new_caches(self, size: CacheSize) -> list[Any]:
        """Each unit's memory of the tokens that it has read, such as a KV cache, to be given to `decode`."""
        return [module.new_cache(size) for _, module in self.units]  # pyright: ignore[reportCallIssue]

    def pack_weights(self, casts: WeightCasts) -> None:
        """Pack the weights that `decode` reads, but where autocast makes others of them."""
        self.wait_for_weights()
        if self.autocast is nullcontext:
            for _, module in self.units:
                casts.pack(module, self.boundary.dtype)

    def copy_prompts(self, caches: Sequence[Any], rows: CachedRows) -> None:
        """Clean rows, and give them the beginning of their prompt from others that have read it, before any write."""
        if rows.has_copies:
            for cache in caches:
                if cache is not None:
                    cache.copy(rows)

    def decode(self, x: Tensor, caches: Sequence[Any], rows: CachedRows | SlotRows) -> Tensor:
        """Compute a batch of generation: [T, D] to [T, D]; the first takes token ids [T], the last gives logits [S, V].

        For `SlotRows`, prompts have been copied already.
        """
        self.wait_for_weights()
        if isinstance(rows, CachedRows):
            self.copy_prompts(caches, rows)
        with self.autocast():
            for (_, module), cache in zip(self.units, caches, strict=True):
                x = module.decode(x, cache, rows)  # pyright: ignore[reportCallIssue]
        return x

    def decode_nothing(self, rows: CachedRows) -> None:
        """Take part without tokens where ranks of several pipelines compute together; `rows` has none."""
        self.wait_for_weights()
        x_TD = torch.zeros((0, self.boundary.hidden_size), dtype=self.boundary.dtype, device=rows.positions.device)
        with self.autocast():
            for _, module in self.units:
                if getattr(module, "needs_all_pipelines", False):
                    module.decode(x_TD, None, rows)  # pyright: ignore[reportCallIssue]

    def backward(self, tape: Tape, grad: Message | None, split: bool = False, pairs: Pairs = ALONE) -> Lane[Message]:
        """Backward of one microbatch from the gradients of its output (None: the output is the loss).

        What it leaves of the weights' gradients on the tape is for `weight_backward`, which comes next: with `split`
        all, without it those behind the last collective. A stage computes the others while a collective is under way,
        or, where it launches none, in one go with the gradient of the input.

        Args:
            split: leave all weight gradients on the tape.
            pairs: how this lane takes turns with the other one of a fused pair, if that runs meanwhile.

        Returns the gradients of those tensors of the stage's input that can have one.
        """
        fill = self.exchanges and not split
        deferred: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.weight_gradients is not None and (split or fill):
            if self.weight_gradients.read_elsewhere is None:
                self.weight_gradients.learn_uses(tape.roots)
            deferred = partial(self.weight_gradients.deferred_to, tape.weight_gradients)
        grads = None if grad is None else grad.tensors
        del grad
        owes_turn = False
        try:
            while tape.segments:
                entry = tape.segments.pop()
                if isinstance(entry, GraphSegment):
                    # It launches nothing, so that it is no lane.
                    with deferred():
                        grads = entry.backward(grads)
                    continue
                if owes_turn:
                    owes_turn = False
                    if fill:
                        self.weight_backward(tape)
                    yield
                if isinstance(entry, RecomputedEntry):
                    for _ in entry.forward_again(tape):
                        if fill:
                            self.weight_backward(tape)
                        yield
                    continue
                lane = Driven(entry.backward(grads), deferred)
                for turn in lane:
                    if turn is Turn.RELEASE_WAITS and pairs.early_release:
                        owes_turn = True
                    elif not fill:
                        yield turn
                    elif turn is not Turn.WEIGHTS_WAIT:
                        self.weight_backward(tape)
                        yield
                    elif pairs.overlap:
                        # The other lane launches something first, and the weight gradients hide it.
                        yield
                        self.weight_backward(tape)
                grads = lane.result
        except RuntimeError as error:
            changing = [call.name for call in self.calls if call.changes_input]
            name_changing(error, [name for name, _ in self.units], changing)
            raise
        return Message(grads or ())

    def weight_backward(self, tape: Tape) -> None:
        """Compute the weight gradients that `backward` left on the tape, in its order."""
        if tape.weight_gradients:
            WeightGradients.drain(tape.weight_gradients)
