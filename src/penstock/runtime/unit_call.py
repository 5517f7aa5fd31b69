"""The call of a unit without collectives: with what its `forward` asks for, from its own random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from penstock.model import Given, Parameters, Sequences, recomputed
from penstock.runtime.profiling import profiler_is_active


class UnitCall:
    """A unit as a stage calls it.

    Args:
        name: the unit's full name.
        module: the unit.
        recompute: True under activation checkpointing.
    """

    def __init__(self, name: str, module: nn.Module, recompute: bool) -> None:
        self.name, self.module, self.recompute = name, module, recompute
        #: by which `forward` is called
        self.parameters = Parameters.of(module)
        #: False for units that never draw a random number
        self.draws = bool(getattr(module, "has_randomness", True))

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
                return self.parameters.call(self.module, x, sequences, given.keys)
        return self.parameters.call(self.module, x, sequences, given.keys)


@dataclass(eq=False)
class _Recomputed:
    """A unit's run in forward, and its second in backward, which must leave the module's buffers alone."""

    call: UnitCall
    sequences: Sequences
    given: Given
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
