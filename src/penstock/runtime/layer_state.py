"""The state that a layer keeps from call to call, so that its activations are computed again as its forward saw it."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from penstock.runtime.errors import PipelineError

_CONTAINERS = {dict, list, set, deque, OrderedDict, defaultdict, Counter}
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
class LayerState:
    """A layer's buffers and attributes, the items of containers among them, and its generators, before a forward.

    Of objects of other classes among the attributes, what they hold is not kept. Parameters, which the optimizer's step
    changes after all backwards, are only watched.
    """

    #: the layer, and its name over the whole model
    layer: nn.Module
    name: str

    #: each module's attributes, and those among them that torch does not give every module
    attributes: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    #: each container among the attributes with its items, and each module's buffers
    items: list[tuple[Any, Any]] = field(default_factory=list)
    #: tensors without a graph, each with its values at that time; those that stay as they are, are kept once
    moments: dict[Tensor, Moment] = field(default_factory=dict)
    #: of each generator: the functions that give and take a state, and its state
    generators: list[tuple[Callable[[], Any], Callable[[Any], object], Any]] = field(default_factory=list)
    #: parameter -> its version; once the forward has run, of those alone that it has changed
    parameters: dict[Tensor, int] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: nn.Module, name: str, known: dict[Tensor, Moment]) -> "LayerState":
        """The state now. known: the moments of the state before the last forward."""
        state = cls(layer, name)
        for part in layer.modules():
            # What torch's own modules keep from call to call are buffers, and what hooks leave there.
            if not type(part).__module__.startswith(_PLAIN) or part._forward_hooks or part._forward_pre_hooks:
                attributes, own = vars(part), _own(vars(part))
                state.attributes.append((attributes, own))
                state._note(own.values(), known)
            if part._buffers:
                state.items.append((part._buffers, part._buffers.copy()))
                state._note(part._buffers.values(), known)
            for parameter in part._parameters.values():
                if parameter is not None:
                    state.parameters[parameter] = parameter._version
        return state

    def _note(self, values: Iterable[Any], known: dict[Tensor, Moment]) -> None:
        for value in values:
            kind = type(value)
            if kind in _NO_STATE:
                continue
            if isinstance(value, Tensor):
                if not value.requires_grad and not value.is_inference():
                    moment = known.get(value)
                    if moment is None or moment.version != value._version:
                        moment = Moment(value._version)
                    self.moments[value] = moment
            elif kind in _CONTAINERS:
                if all(value is not container for container, _ in self.items):
                    items = value.copy()
                    self.items.append((value, items))
                    self._note(items.values() if isinstance(items, dict) else items, known)
            elif isinstance(value, tuple):
                self._note(value, known)
            elif (functions := _functions_of(value)) is not None:
                self.generators.append((*functions, functions[0]()))

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

    def hold(self) -> "LayerState":
        """Hold all values, which may change from now on, until they are restored."""
        for tensor, moment in self.moments.items():
            if moment.values is None:
                moment.values = tensor.clone()
        return self

    def restore(self) -> None:
        """Put back for good what is held."""
        for tensor, moment in self.moments.items():
            if moment.values is not None and tensor._version != moment.version:
                tensor.copy_(moment.values)
        self._put()

    def put_back(self) -> AbstractContextManager[None]:
        """Within this context the layer is as it was; whatever it changes here leaves no trace.

        Raises: PipelineError where something else has changed a tensor that the layer keeps, or where the layer changes
            a parameter once more.
        """
        # A layer of torch's own that has only parameters keeps nothing.
        return self._as_it_was() if self.attributes or self.items or self.parameters else nullcontext()

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        for tensor, moment in self.moments.items():
            if moment.values is None and tensor._version != moment.version:
                raise PipelineError(
                    f"{self.name} keeps a tensor {list(tensor.shape)} that something else has changed since its "
                    "forward, so that its activations cannot be computed again; leave the layer out of recompute"
                )
        parameters = [(own, own.detach().clone()) for own in self.parameters]
        now = LayerState(
            self.layer,
            self.name,
            [(attributes, _own(attributes)) for attributes, _ in self.attributes],
            [(container, container.copy()) for container, _ in self.items],
            generators=[(give, take, give()) for give, take, _ in self.generators],
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
            self._check_parameters(parameters)

    def _put(self) -> None:
        """Put back attributes, items and generators."""
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
                container.update(items)
        for _, take, state in self.generators:
            take(state)

    def _check_parameters(self, parameters: list[tuple[Tensor, Tensor]]) -> None:
        for own, values in parameters:
            if not torch.equal(own, values):
                name = next(name for name, known in self.layer.named_parameters() if known is own)
                raise PipelineError(
                    f"{self.name} changes its parameter {name} at each call, so that its activations cannot be "
                    "computed again; let it change a buffer, or leave the layer out of recompute"
                )


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: attributes[name] for name in attributes.keys() - _OF_MODULES}


def _functions_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """The functions that give and take the state of a generator of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if type(value).__module__.startswith("numpy.random"):
        # As numpy's generators have it, and those of its older kind by themselves.
        generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
        if generator is not None:
            return lambda: generator.state, partial(setattr, generator, "state")
    return None
