"""The state of a user's objects as it is now: of a layer from call to call, of an optimizer from step to step.

So a layer's activations are computed again as its forward saw it, and a step that fails leaves all as it was.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.runtime.errors import PipelineError

_NO_STATE = {int, float, bool, str, type(None)}
_OF_MODULES = vars(nn.Module()).keys()
_PLAIN = ("torch.nn.modules.", "penstock.")


@dataclass(eq=False, slots=True)
class Moment:
    """A tensor's values between two changes."""

    #: torch's count of the changes before
    version: int
    #: None while the tensor itself still has them
    values: Tensor | None = None


@dataclass(eq=False, slots=True)
class KeptState:
    """The state of values, as deep as it lies: tensors, the items of containers, arrays and generators.

    Each thing stays the one that it is, so that whoever shares it shares what is put back. A layer's parameters, which
    the optimizer's step changes after all backwards, are only watched, and its tensors with a graph are not kept.
    """

    #: each module's attributes, and those among them that torch does not give every module
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    #: each container with its items, each module's buffers among them
    items: list[tuple[Any, Any]] = field(default_factory=list)
    #: tensors, each with its values at that time; those that stay as they are, are kept once
    moments: dict[Tensor, Moment] = field(default_factory=dict)
    #: of each generator and array: the functions that give and take a state, and its state
    others: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = field(default_factory=list)
    #: parameter -> its version; once a forward has run, of those alone that it has changed
    parameters: dict[Tensor, int] = field(default_factory=dict)
    #: the memory that each tensor had when its values were held
    memory: dict[Tensor, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: nn.Module, known: dict[Tensor, Moment]) -> "KeptState":
        """That of a layer now. known: the moments of the state before its last forward."""
        state, values = cls(), list[Any]()
        for part in layer.modules():
            # What torch's own modules keep from call to call are buffers, and what hooks leave there.
            if not type(part).__module__.startswith(_PLAIN) or part._forward_hooks or part._forward_pre_hooks:
                attributes, own = vars(part), _own(vars(part))
                state.attributes.append((attributes, own))
                values += own.values()
            if part._buffers:
                values.append(part._buffers)
            for parameter in part._parameters.values():
                if parameter is not None:
                    state.parameters[parameter] = parameter._version
        state._note(values, known)
        state.moments = {tensor: moment for tensor, moment in state.moments.items() if not tensor.requires_grad}
        return state

    @classmethod
    def of_values(cls, values: Iterable[Any]) -> "KeptState":
        """That of any values.

        Attributes of objects are followed in optimizers alone, and no further than into objects that an optimizer, or a
        list or dictionary of it, has.
        """
        state = cls()
        state._note(values, {})
        return state

    def _note(self, values: Iterable[Any], known: dict[Tensor, Moment]) -> None:
        left, seen = [(value, False) for value in values], dict[int, Any]()
        while left:
            value, follows = left.pop()
            if type(value) in _NO_STATE or id(value) in seen:
                continue
            seen[id(value)], inner = value, ()
            if isinstance(value, Tensor):
                inner = self._note_tensor(value, known)
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

    def _note_tensor(self, tensor: Tensor, known: dict[Tensor, Moment]) -> Iterable[Any]:
        """Note a tensor; returns what is inside of it, and its attributes."""
        beside = (vars(tensor),)
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return (*beside, *(getattr(tensor, name) for name in names))
        if not tensor.is_inference():
            moment = known.get(tensor)
            if moment is None or moment.version != tensor._version:
                moment = Moment(tensor._version)
            self.moments[tensor] = moment
        return beside

    @contextmanager
    def before_forward(self) -> Iterator[None]:
        """Within this context the layer may change what it keeps; of tensors that it changes the old values stay."""
        for tensor, moment in self.moments.items():
            moment.values = tensor.clone()
        try:
            yield
        finally:
            for tensor, moment in self.moments.items():
                if tensor._version == moment.version:
                    moment.values = None
            self.parameters = {own: version for own, version in self.parameters.items() if own._version != version}

    @torch.no_grad()
    def hold(self) -> "KeptState":
        """Hold all values, which may change from now on, until they are restored."""
        for tensor, moment in self.moments.items():
            # Whether they have changed cannot be asked: batch normalisation leaves a tensor's version as it is.
            self.memory[tensor], moment.values = tensor.data, tensor.detach().clone()
        return self

    @torch.no_grad()
    def restore(self) -> None:
        """Put back for good what is held."""
        for tensor, memory in self.memory.items():
            tensor.data, values = memory, self.moments[tensor].values
            # What it shares with another tensor may be put back already, and some memory cannot be written to.
            if values is not None and not tensor.is_meta and not torch.equal(tensor, values):
                tensor.copy_(values)
        self._put()

    def put_back(self, layer: nn.Module, name: str) -> AbstractContextManager[None]:
        """Within this context the layer is as it was; whatever it changes here leaves no trace.

        Raises: PipelineError where something else has changed a tensor that the layer keeps, or where the layer changes
            a parameter once more.
        """
        # A layer of torch's own that has only parameters keeps nothing.
        return self._as_it_was(layer, name) if self.attributes or self.items or self.parameters else nullcontext()

    @contextmanager
    def _as_it_was(self, layer: nn.Module, name: str) -> Iterator[None]:
        for tensor, moment in self.moments.items():
            if moment.values is None and tensor._version != moment.version:
                raise PipelineError(
                    f"{name} keeps a tensor {list(tensor.shape)} that something else has changed since its "
                    "forward, so that its activations cannot be computed again; leave the layer out of recompute"
                )
        parameters = [(own, own.detach().clone()) for own in self.parameters]
        now = KeptState(
            [(attributes, _own(attributes)) for attributes, _ in self.attributes],
            [(own, dict(own) if isinstance(own, dict) else list(own)) for own, _ in self.items],
            others=[(give, take, give()) for give, take, _ in self.others],
        )
        memory = [(tensor, tensor.data) for tensor in self.moments]
        versions = _unsafe_preserve_version_counter(tuple(self.moments))
        try:
            for tensor, moment in self.moments.items():
                # Other memory, since autograd may save the tensor here, and have saved it before.
                tensor.data = (tensor if moment.values is None else moment.values).clone()
            self._put()
            yield
        finally:
            # Activation checkpointing ends this by an exception.
            for tensor, own in memory:
                tensor.data = own
            versions.__exit__()
            now._put()
            _check_parameters(layer, name, parameters)

    def _put(self) -> None:
        """Put back attributes, items, arrays and generators."""
        for attributes, own in self.attributes:
            if len(attributes) != len(own) + len(_OF_MODULES):
                for name in attributes.keys() - own.keys() - _OF_MODULES:
                    del attributes[name]
            attributes.update(own)
        for container, items in self.items:
            if len(container) != len(items) or not all(map(is_, container, items)):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(items)
            elif isinstance(container, dict):
                # A counter's own adds.
                dict.update(container, items)
        for _, take, state in self.others:
            take(state)


def _check_parameters(layer: nn.Module, name: str, parameters: list[tuple[Tensor, Tensor]]) -> None:
    for own, values in parameters:
        if not torch.equal(own, values):
            changed = next(path for path, known in layer.named_parameters() if known is own)
            raise PipelineError(
                f"{name} changes its parameter {changed} at each call, so that its activations cannot be "
                "computed again; let it change a buffer, or leave the layer out of recompute"
            )


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: attributes[name] for name in attributes.keys() - _OF_MODULES}


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
