"""A layer's state beside its parameters, before a step that may fail and before a forward that is computed again.

It is what torch calls state: buffers, and what `get_extra_state` gives. Attributes are the layer's own affair.
"""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NO_STATE = {int, float, bool, str, type(None)}


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


class BufferHistory:
    """A layer's buffers as each of its forwards saw them, under activation checkpointing; copies only what changes."""

    #: the layer
    module: nn.Module
    #: buffer -> its values as of the last forward
    _last: dict[Tensor, BufferValues]

    def __init__(self, module: nn.Module) -> None:
        self.module, self._last = module, {}

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


# ---- The state of an optimizer's values


@dataclass(eq=False, slots=True)
class KeptState:
    """The state of values, as deep as it lies: tensors, the items of containers, arrays and generators.

    Each thing stays the one that it is, so that whoever shares it shares what is put back.
    """

    #: each container with its items
    items: list[tuple[Any, Any]] = field(default_factory=list)
    #: tensors, each with its values once they are held
    tensors: dict[Tensor, Tensor | None] = field(default_factory=dict)
    #: of each generator and array: the functions that give and take a state, and its state
    others: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = field(default_factory=list)
    #: the memory that each tensor had when its values were held
    memory: dict[Tensor, Tensor] = field(default_factory=dict)

    @classmethod
    def of_values(cls, values: Iterable[Any]) -> "KeptState":
        """That of any values.

        Attributes of objects are followed in optimizers alone, and no further than into objects that an optimizer, or a
        list or dictionary of it, has.
        """
        state = cls()
        state._note(values)
        return state

    def _note(self, values: Iterable[Any]) -> None:
        left, seen = [(value, False) for value in values], dict[int, Any]()
        while left:
            value, follows = left.pop()
            if type(value) in _NO_STATE or id(value) in seen:
                continue
            seen[id(value)], inner = value, ()
            if isinstance(value, Tensor):
                inner = self._note_tensor(value)
            elif isinstance(value, dict | list | deque | set):
                items = dict(value) if isinstance(value, dict) else list(value)
                self.items.append((value, items))
                inner = items.values() if isinstance(items, dict) else items
            elif isinstance(value, tuple):
                inner = value
            elif (functions := _functions_of(value)) is not None:
                self.others.append((*functions, functions[0]()))
            elif isinstance(value, torch.optim.Optimizer) or (follows and has_state(value)):
                inner, follows = (vars(value),), isinstance(value, torch.optim.Optimizer)
            left += [(own, follows) for own in inner]

    def _note_tensor(self, tensor: Tensor) -> Iterable[Any]:
        """Note a tensor; returns what is inside of it, and its attributes."""
        beside = (vars(tensor),)
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return (*beside, *(getattr(tensor, name) for name in names))
        if not tensor.is_inference():
            self.tensors[tensor] = None
        return beside

    @torch.no_grad()
    def hold(self) -> "KeptState":
        """Hold all values, which may change from now on, until they are restored."""
        for tensor in self.tensors:
            self.memory[tensor], self.tensors[tensor] = tensor.data, tensor.detach().clone()
        return self

    @torch.no_grad()
    def restore(self) -> None:
        """Put back for good what is held."""
        for tensor, memory in self.memory.items():
            tensor.data, values = memory, self.tensors[tensor]
            # What it shares with another tensor may be put back already, and some memory cannot be written to.
            if values is not None and not tensor.is_meta and not torch.equal(tensor, values):
                tensor.copy_(values)
        self._put()

    def _put(self) -> None:
        """Put back items, arrays and generators."""
        for container, items in self.items:
            if len(container) != len(items) or not all(map(is_, container, items)):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(items)
            elif isinstance(container, dict):
                # A counter's own adds.
                dict.update(container, items)
        for _, take, state in self.others:
            take(state)


def _functions_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """The functions that give and take the state of a generator of random numbers or an array; else None."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        # As numpy's generators have it, and those of its older kind by themselves.
        generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        if generator is not None:
            return lambda: generator.state, partial(setattr, generator, "state")
    if type(value).__name__ == "ndarray" and value.flags.writeable:
        return value.copy, partial(value.__setitem__, ...)
    return None


def has_state(value: Any) -> bool:
    """True for an object with attributes, of a class that neither torch nor Python has; modules keep what is theirs."""
    room = type(value).__module__.partition(".")[0]
    is_theirs = room == "torch" or room in sys.stdlib_module_names or isinstance(value, nn.Module)
    return not is_theirs and bool(getattr(value, "__dict__", None))
