"""A layer's state beside its parameters, before a step that may fail and before a forward that is computed again.

It is what torch calls state: buffers, and what `get_extra_state` gives. Attributes are the layer's own affair.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def has_extra_state(module: nn.Module) -> bool:
    """True if the module's class declares state that is neither a parameter nor a buffer."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


@dataclass(eq=False, slots=True)
class ModuleState:
    """A module's buffers and extra state, held until they are put back."""

    module: nn.Module
    #: name -> the buffer itself; None for one without a value
    buffers: Mapping[str, Tensor | None] = field(init=False)
    #: each buffer, its memory and a copy of its values
    values: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    #: a copy of what `get_extra_state` gave
    extra: Any = field(init=False)

    @torch.no_grad()
    def __post_init__(self) -> None:
        self.buffers = dict(self.module._buffers)
        present = (buffer for buffer in self.buffers.values() if buffer is not None)
        # Whether values have changed cannot be asked: batch normalisation leaves a tensor's version as it is.
        self.values = [(buffer, buffer.data, buffer.detach().clone()) for buffer in present]
        self.extra = copy.deepcopy(self.module.get_extra_state()) if has_extra_state(self.module) else None

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back."""
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for buffer, memory, values in self.values:
            buffer.data = memory
            # A tensor that is expanded cannot be written to.
            if not buffer.is_meta and not torch.equal(buffer, values):
                buffer.copy_(values)
        if has_extra_state(self.module):
            self.module.set_extra_state(self.extra)


@dataclass(eq=False, slots=True)
class BufferValues:
    """A buffer's values between two changes of it."""

    buffer: Tensor
    #: torch's count of the changes before
    version: int
    #: None while the buffer itself still has them
    values: Tensor | None = None


@dataclass(eq=False, slots=True)
class BufferHistory:
    """A layer's buffers as each of its forwards saw them, under activation checkpointing; copies only what changes."""

    #: the layer
    module: nn.Module
    #: buffer -> its values as of the last forward
    _last: dict[Tensor, BufferValues] = field(default_factory=dict, init=False)

    @contextmanager
    def forward(self) -> Iterator[Mapping[str, BufferValues]]:
        """Run a forward within this context, which gives the buffers as they were at its beginning, by name."""
        seen: dict[str, BufferValues] = {}
        for name, buffer in self.module.named_buffers():
            if buffer.is_inference():
                continue
            last = self._last.get(buffer)
            seen[name] = last if last and last.version == buffer._version else BufferValues(buffer, buffer._version)
            seen[name].values = buffer.detach().clone()
        self._last = {one.buffer: one for one in seen.values()}
        try:
            yield seen
        finally:
            for one in seen.values():
                if one.buffer._version == one.version:
                    one.values = None

    def call_again(self, seen: Mapping[str, BufferValues], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the layer with its buffers as a forward saw them; what it changes of them leaves no trace."""
        if not seen:
            return self.module(*arguments, **keywords)
        values = {name: (one.buffer if one.values is None else one.values).clone() for name, one in seen.items()}
        return functional_call(self.module, values, arguments, keywords)
