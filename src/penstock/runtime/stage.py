"""A stage: a contiguous run of the model's units, whose forward and backward are lanes.

Shapes: T tokens of the microbatch, D hidden size.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
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
    RecomputedEntry,
    RecomputedLane,
    Sequences,
    SlotRows,
    Turn,
    WeightGradients,
    leaf_of,
    pack_joint,
    recomputed,
)
from penstock.runtime.errors import PipelineError, note_layer
from penstock.runtime.message import Form, Message
from penstock.runtime.tape import GraphSegment, Tape
from penstock.runtime.trace import named_context, profiler_is_active
from penstock.schedule import Direction
from penstock.settings import ScheduleConfig
from penstock.settings.types import type_in_words

# ---- The call of a unit without collectives: with what its `forward` asks for, from its own random numbers


# How Python says that a function was called with other arguments than it takes.
_ARGUMENTS = re.compile(
    r"missing \d+ required|unexpected keyword argument|multiple values for|positional arguments? but"
)
# Errors of Python and torch that are no more than their message.
_PLAIN = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


class UnitCall:
    """A unit as a stage calls it.

    Args:
        name: the unit's full name.
        module: the unit.
        recompute: True under activation checkpointing.
    """

    #: name over the whole model
    name: str
    #: the unit itself
    module: nn.Module
    #: True under activation checkpointing
    recompute: bool
    #: the unit's input and output; None for the plain stream
    takes: Message | None
    gives: Message | None
    #: the reason why it could not be found; empty if it could
    not_found: str
    #: by which `forward` is called
    parameters: Parameters
    #: False for units that never draw a random number
    draws: bool

    def __init__(self, name: str, module: nn.Module, recompute: bool) -> None:
        self.name, self.module, self.recompute = name, module, recompute
        self.takes = None
        self.gives = None
        self.not_found = ""
        self.parameters = Parameters.of(module)
        self.draws = bool(getattr(module, "has_randomness", True))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Parameters without a default that neither the unit before nor a key of the batch fills."""
        filled = set(() if self.takes is None else self.takes.names)
        if self.takes is not None and self.takes.form is Form.TUPLE:
            filled = set(self.parameters.names[: len(self.takes.parts) - 1])
        return [name for name in self.parameters.missing(keys) if name not in filled]

    def flat(self, output: Any) -> tuple[Tensor, ...]:
        """The tensors of an output that is more than the plain stream. Raises: PipelineError if it has another form."""
        assert self.gives is not None
        try:
            return self.gives.flat(output)
        except ValueError as error:
            raise PipelineError(f"{self.name} gave {error}") from None

    def check(self, output: Any, num_rows: Mapping[str, int]) -> None:
        """Refuse an output of another form or shape. Raises: PipelineError."""
        assert self.gives is not None
        try:
            self.gives.check(self.gives.flat(output), num_rows)
        except ValueError as error:
            raise PipelineError(f"{self.name} gave {error}") from None

    def unknown(self, output: Any) -> PipelineError:
        """The error of a unit that gives what nothing is known of."""
        reason = f" ({self.not_found})" if self.not_found else ""
        return PipelineError(
            f"{self.name} gave {type_in_words(output)}; layers give a tensor, or a tuple or mapping of tensors whose "
            f"shapes are found without data{reason} or declared as the layer's `gives`"
        )

    def __call__(self, x: Any, sequences: Sequences, given: Given) -> Any:
        """The unit's output for the stream, or the several tensors, that the unit before gave."""
        if self.recompute:
            return recomputed(_Recomputed(self, sequences, given), x)
        return self.run(x, sequences, given)

    def run(self, x: Any, sequences: Sequences, given: Given) -> Any:
        """Call the module."""
        if self.draws and given.randomness is not None:
            given.randomness.begin(self.name)
        try:
            args, kwargs = self.parameters.arguments(x, sequences, given.keys)
            with record_function(self.name) if profiler_is_active() else _NO_PROFILER:
                return self.module(*args, **kwargs)
        except TypeError as error:
            if self.takes is not None:
                given_here = f"the {len(self.takes.parts)} tensors of the layer before"
            elif _ARGUMENTS.search(str(error)):
                given_here = f"the stream and {sorted(given.keys)}"
            else:
                self._name(error)
                raise
            raise PipelineError(f"{self.name}, given {given_here}: {error}") from error
        except Exception as error:
            # No other variable may hold it: with its traceback it would keep this frame's tensors, and activation
            # checkpointing ends each unit's second run by an exception.
            self._name(error)
            raise

    def _name(self, error: Exception) -> None:
        """Raise the error anew with the layer's name in its message, or where it has more than that, add a note."""
        place = f"{self.name} ({type(self.module).__name__})"
        if type(error) in _PLAIN:
            raise type(error)(f"{place}: {error}") from error
        note_layer(error, place)


_NO_PROFILER = nullcontext()


@dataclass(eq=False)
class _Recomputed:
    """A unit's run in forward, and its second in backward, which must leave the module's buffers alone."""

    #: the unit, and what it is called with beside the stream
    call: UnitCall
    sequences: Sequences
    given: Given
    #: True once it has run in forward
    is_done: bool = False

    @property
    def has_randomness(self) -> bool:
        """True if torch must replay the random state: a unit with a seed of its own begins there each time."""
        return self.call.draws and self.given.randomness is None

    def __call__(self, x: Any) -> Any:
        if not self.is_done:
            self.is_done = True
            return self.call.run(x, self.sequences, self.given)
        with _kept_buffers(self.call.module):
            return self.call.run(x, self.sequences, self.given)


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Leave the buffers (BatchNorm's statistics), at the end of this context, as they were at its beginning."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            # Not counted as a change: what autograd has saved is not the buffer's value.
            buffer.data.copy_(value)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in the module, buffer) of those buffers that belong to the module's state dict."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


# ---- A stage: a contiguous run of the model's units, whose forward and backward are lanes


Finish = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Boundary:
    """The tensor between two stages: the residual stream [T, D] in one dtype."""

    hidden_size: int
    dtype: torch.dtype
    #: under sequence parallelism, the ranks among which the rows of a microbatch are divided
    num_sharing: int = 1

    def shape(self, num_tokens: int) -> tuple[int, int]:
        """The shape that a rank sends: ceil(T / num_sharing) rows."""
        return (-(-num_tokens // self.num_sharing), self.hidden_size)

    def whole_shape(self, num_tokens: int) -> tuple[int, int]:
        """The shape in generation, where the tokens are few and every rank has all of them."""
        return (num_tokens, self.hidden_size)


@dataclass(frozen=True)
class Pairs:
    """The turns that the two actions of a fused pair take on a rank.

    The program and the bits are the same either way.

    Raises:
        ValueError: `early_release` without `overlap`.
    """

    #: one half computes while the other's collectives are under way; otherwise the forward runs, then the backward
    overlap: bool = True
    #: a layer's backward ends before the forward's experts compute: its activations are freed by then, but the exchange
    #: of its tokens' gradients is not hidden
    early_release: bool = False

    def __post_init__(self) -> None:
        # These settings refuse what excludes each other.
        ScheduleConfig(overlap=self.overlap, early_release=self.early_release)


ALONE = Pairs(overlap=False)
"""For a forward or backward outside of pairs, beside which nothing else computes."""


@runtime_checkable
class LaneUnit(Protocol):
    """A unit with collectives inside: its forward is a lane that records its own segments.

    `forward_lane(tape, x, sequences)` takes and returns detached data and appends entries to `tape` whose `backward`
    lanes undo it; where `tape` is None it records nothing.
    """

    def forward_lane(self, tape: Tape | None, x: Tensor, sequences: Sequences) -> Lane[Tensor]: ...


class Stage:
    """The units of one local stage with their parameters; owns no microbatch's data (tapes do).

    Args:
        index: the stage's number over the whole model.
        units: (name, module) in order; a module maps the residual stream, and what else its `forward` asks for by
            name (see `Parameters`), to the residual stream.
        boundary: shape and dtype of the tensors between stages.
        weight_gradients: the owner that defers the weight gradients of the stage's linear layers, for split backwards
            and to fill the time in which a collective is under way; None where neither is ever done.
        autocast: makes the context in which forwards run.
        recompute: names of the units under activation checkpointing, whose activations backward computes again.
    """

    #: called before weights are read; may wait for those that other ranks step
    weights_ready: Callable[[], None]
    #: ends the full names of the parameters; marks the second copy of a bidirectional model
    suffix: str = ""
    #: True if a unit launches collectives, so that lanes of the stage are suspended
    exchanges: bool
    #: the input and the output, where they are not the plain stream
    takes: Message | None = None
    gives: Message | None = None
    #: number over the whole model
    index: int
    #: (name, module) in order
    units: tuple[tuple[str, nn.Module], ...]
    #: shape and dtype of the tensors between stages
    boundary: Boundary
    #: defers weight gradients; None where that is never done
    weight_gradients: WeightGradients | None
    #: makes the context in which forwards run
    autocast: Callable[[], AbstractContextManager[Any]]
    #: the units as they are called, in segments
    _runs: list["_Run"]

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
        self.units = tuple(units)
        self._runs = _runs([_call(name, module, name in recompute) for name, module in units])
        self.weights_ready = _at_once
        self.exchanges = any(isinstance(run, _LaneCall) for run in self._runs)

    def read_weights_after(self, ready: Callable[[], None]) -> None:
        """Call `ready`, which may wait, before weights are read from now on."""
        self.weights_ready = ready

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(full name, parameter) in model order."""
        return [
            (f"{name}.{own}{self.suffix}", parameter)
            for name, module in self.units
            for own, parameter in module.named_parameters()
        ]

    @property
    def calls(self) -> list[UnitCall]:
        """The units that are called by the names of their parameters: all without collectives."""
        return [call for run in self._runs if isinstance(run, list) for call in run]

    def set_training(self, training: bool) -> None:
        """Put the units into training or evaluation mode, whatever was done to them before."""
        for _, module in self.units:
            if any(part.training is not training for part in module.modules()):
                module.train(training)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """(full name, buffer) in model order; those that belong to the modules' state dict."""
        return [
            (f"{name}.{own}{self.suffix}", buffer)
            for name, module in self.units
            for own, buffer in persistent_buffers(module)
        ]

    def forward(
        self,
        tape: Tape | None,
        x: Tensor,
        sequences: Sequences,
        finish: Finish | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> Lane[Tensor]:
        """Forward of one microbatch; `tape` is None where no backward follows.

        Returns the output [T, D] without its graph; on the last stage what `finish` makes of the output
        (the scaled loss, a scalar).
        """
        self.weights_ready()
        last, way = len(self._runs) - 1, _Forward(tape, sequences, given, finish)
        for i, run in enumerate(self._runs):
            if isinstance(run, list):
                x = self._dense(run, x, way, i == last)
                continue
            context = partial(named_context, run.name, self.autocast)
            x = yield from Driven(run.unit.forward_lane(tape, x, sequences), context)
            if i == last and finish is not None:
                x = self._dense([], x, way, is_last=True)
        return x

    def _dense(self, calls: list[UnitCall], x: Any, way: "_Forward", is_last: bool) -> Any:
        """One segment: units that launch no collective, and on the last stage what follows them."""
        if not isinstance(x, Tensor) or (is_last and way.finish is None and self.gives is not None):
            return self._several(calls, x, way)
        leaf = leaf_of(x) if way.tape is not None and x.is_floating_point() else None
        h = self._called(calls, x if leaf is None else leaf, way, is_last)
        if not isinstance(h, Tensor):
            raise calls[-1].unknown(h)
        if way.tape is not None:
            way.tape.record(leaf, h)
        return h.detach()

    def _several(self, calls: list[UnitCall], x: Any, way: "_Forward") -> Any:
        """A segment that takes or gives several tensors, or one that is not the plain stream."""
        inputs, takes_one = ((x,), True) if isinstance(x, Tensor) else (x, False)
        leaves = tuple(leaf_of(t) if way.tape is not None and t.is_floating_point() else None for t in inputs)
        cut_inputs = tuple(t if leaf is None else leaf for t, leaf in zip(inputs, leaves, strict=True))
        value = cut_inputs[0] if takes_one or self.takes is None else self.takes.formed(cut_inputs)
        h = self._called(calls, value, way, is_last=True)
        gives = None if way.finish is not None else self.gives
        if gives is None and not isinstance(h, Tensor):
            raise calls[-1].unknown(h)
        outputs = (h,) if gives is None else calls[-1].flat(h)
        if way.tape is not None:
            way.tape.record_several(leaves, outputs, takes_one)
        return h.detach() if gives is None else tuple(output.detach() for output in outputs)

    def _called(self, calls: list[UnitCall], h: Any, way: "_Forward", is_last: bool) -> Any:
        """The output of the last of these units, or what is made of it on the last stage."""
        with self.autocast():
            for call in calls:
                h = call(h, way.sequences, way.given)
                # The loss may take any output of the last layer.
                if not is_last or call is not calls[-1]:
                    self._check(call, h, way)
            if not is_last or way.finish is None:
                return h
            if way.given.randomness is not None:
                way.given.randomness.begin("loss")
            return way.finish(h)

    def _check(self, call: UnitCall, h: Any, way: "_Forward") -> None:
        """Refuse what cannot go on to the next layer. Raises: PipelineError naming the layer."""
        if call.gives is not None:
            call.check(h, way.given.num_rows)
            return
        if not isinstance(h, Tensor):
            raise call.unknown(h)
        shape, dtype = self.boundary.shape(way.sequences.num_tokens), self.boundary.dtype
        # Where nothing is known of the layers' outputs, any may be the last of a stage.
        if h.shape != shape or (call.not_found and h.dtype != dtype):
            raise PipelineError(
                f"{call.name} gave {list(h.shape)} of {h.dtype} for {way.sequences.num_tokens} tokens; from layer to "
                f"layer goes {list(shape)} of {dtype}, the hidden size being {self.boundary.hidden_size}"
            )

    def leaving(self, direction: Direction) -> Message | None:
        """The stage's result in that direction; None for the plain stream or its gradient."""
        return self.gives if direction is Direction.FORWARD else self._gradients(self.takes)

    def arriving(self, direction: Direction) -> Message | None:
        """The stage's input in that direction; None for the plain stream or its gradient."""
        return self.takes if direction is Direction.FORWARD else self._gradients(self.gives)

    @staticmethod
    def _gradients(message: Message | None) -> Message | None:
        return None if message is None else message.gradients()

    def checked_leaving(self, result: Any, direction: Direction, num_tokens: int, num_rows: Mapping[str, int]) -> Any:
        """A microbatch's result in that direction, if it has the shapes with which the neighbour posted its receives.

        Raises:
            ValueError: saying what the stage gives, and what its neighbour awaits.
        """
        message = self.leaving(direction)
        if message is None:
            shape, dtype = self.boundary.shape(num_tokens), self.boundary.dtype
            if result is not None and result.shape == shape and result.dtype == dtype:
                return result
            got = "nothing" if result is None else f"{list(result.shape)} of {result.dtype}"
            problem = f"{got}; its neighbour awaits {list(shape)} of {dtype}"
        else:
            assert isinstance(result, tuple), f"stage {self.index} gives a message in parts"
            try:
                message.check(result, num_rows)
                return result
            except ValueError as error:
                problem = str(error)
        end, (name, _) = ("last", self.units[-1]) if direction is Direction.FORWARD else ("first", self.units[0])
        raise ValueError(f"stage {self.index}, whose {end} layer is {name}, gives {problem}")

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

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(weight.nbytes for _, module in self.units for weight in module.parameters())

    def pack_weights(self) -> None:
        """Pack now the weights that `decode` reads, instead of at their first use, where an engine packs them."""
        self.weights_ready()
        for _, module in self.units:
            pack_joint(module, self.boundary.dtype)

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
        self.weights_ready()
        if isinstance(rows, CachedRows):
            self.copy_prompts(caches, rows)
        with self.autocast():
            for (_, module), cache in zip(self.units, caches, strict=True):
                x = module.decode(x, cache, rows)  # pyright: ignore[reportCallIssue]
        return x

    def keep_step(self, rows: CachedRows) -> None:
        """Take part without tokens where ranks of several pipelines compute together; `rows` has none."""
        self.weights_ready()
        x_TD = torch.zeros(self.boundary.whole_shape(0), dtype=self.boundary.dtype, device=rows.positions.device)
        with self.autocast():
            for _, module in self.units:
                if getattr(module, "needs_all_pipelines", False):
                    module.decode(x_TD, None, rows)  # pyright: ignore[reportCallIssue]

    def backward(
        self, tape: Tape, grad: Tensor | None, split: bool = False, pairs: Pairs = ALONE
    ) -> Lane[Tensor | None]:
        """Backward of one microbatch from the gradient of its output [T, D] (None: of the loss).

        What it leaves of the weights' gradients on the tape is for `weight_backward`, which comes next: with `split`
        all, without it those behind the last collective. A stage computes the others while a collective is under way,
        or, where it launches none, in one go with the gradient of the input.

        Args:
            split: leave all weight gradients on the tape.
            pairs: how this lane takes turns with the other one of a fused pair, if that runs meanwhile.

        Returns the gradient of the stage's input [T, D], None where the stage takes token ids.
        """
        fill = self.exchanges and not split
        deferred = None
        if self.weight_gradients is not None and (split or fill):
            deferred = partial(self.weight_gradients.deferred_to, tape.weight_gradients)
        owes_turn = False
        while tape.segments:
            entry = tape.segments.pop()
            if owes_turn and not isinstance(entry, GraphSegment):
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
            lane = Driven(entry.backward(grad), deferred)
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
            grad = lane.result
        return grad

    def weight_backward(self, tape: Tape) -> None:
        """Compute the weight gradients that `backward` left on the tape, in its order."""
        if tape.weight_gradients:
            WeightGradients.drain(tape.weight_gradients)


def _at_once() -> None:
    """Return at once: weights that no other rank steps are always ready."""


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward of a stage."""

    tape: Tape | None
    sequences: Sequences
    given: Given
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class _LaneCall:
    """A unit with collectives, by name."""

    name: str
    unit: LaneUnit


_Run = _LaneCall | list[UnitCall]


def _call(name: str, module: nn.Module, recompute: bool) -> _LaneCall | UnitCall:
    if isinstance(module, LaneUnit):
        return _LaneCall(name, RecomputedLane(module) if recompute else module)
    return UnitCall(name, module, recompute)


def _runs(calls: Sequence[_LaneCall | UnitCall]) -> list[_Run]:
    """Units grouped: each unit with collectives alone, the others in runs as long as possible, each one segment."""
    runs: list[_Run] = []
    for call in calls:
        if isinstance(call, _LaneCall):
            runs.append(call)
        elif runs and isinstance(runs[-1], list):
            runs[-1].append(call)
        else:
            runs.append([call])
    return runs
