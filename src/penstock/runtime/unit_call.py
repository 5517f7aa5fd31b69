"""The call of a unit without collectives: with what its `forward` asks for, from its own random numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from penstock.model import Given, Parameters, Sequences, recomputed
from penstock.runtime.errors import PipelineError, note_layer
from penstock.runtime.message import Form, Message
from penstock.runtime.profiling import profiler_is_active
from penstock.settings.arguments import type_in_words

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
        if profiler_is_active():
            with record_function(self.name):
                return self._call(x, sequences, given)
        return self._call(x, sequences, given)

    def _call(self, x: Any, sequences: Sequences, given: Given) -> Any:
        try:
            return self.parameters.call(self.module, x, sequences, given.keys)
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
