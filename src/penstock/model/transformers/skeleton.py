"""A model's own forward, run with stubs in place of its layers.

The model's own code computes everything before its layers, the arguments of each layer beside the hidden states, and
everything after the layers, whatever its family: scales, norms, masks, rotary tables, biases by distance.

Shapes: B sequences, L tokens of each, T tokens, D hidden size, V vocabulary.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_HIDDEN = "hidden_states"


@dataclass(frozen=True, eq=False)
class LayerArguments:
    """The arguments of a layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def instead(self, one: object, other: object) -> "LayerArguments":
        """The same arguments with one object replaced by another."""
        args = tuple(other if value is one else value for value in self.args)
        return LayerArguments(args, {name: other if value is one else value for name, value in self.kwargs.items()})


class _LeaveForward(Exception):
    """Leaves a model's forward early."""


@dataclass(eq=False)
class StubbedForward:
    """One forward of a model whose layers are stubs: what the stubs return, and what they received."""

    #: the number of the stub at which the forward is left; None runs it to its end
    last: int | None = None
    #: the stubs' return value; None for their hidden states
    output: Tensor | None = None
    #: True if the stubs return it in a tuple, as the model's layers do
    as_tuple: bool = False
    #: number of a stub -> its arguments beside the hidden states
    arguments: dict[int, LayerArguments] = field(default_factory=dict)
    #: each stub's hidden states, in a tuple where the model left them in one
    hidden: list[Any] = field(default_factory=list)

    def receive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden.append(args[0] if args else kwargs[_HIDDEN])
        self.arguments[index] = LayerArguments(
            args[1:], {name: value for name, value in kwargs.items() if name != _HIDDEN}
        )
        if index == self.last:
            raise _LeaveForward
        output = self.hidden[-1] if self.output is None else self.output
        return (output,) if self.as_tuple else output


class LayerStub(nn.Module):
    """Replaces a layer: has its attributes but none of its parameters, and acts as the running forward says."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.index, self.current = index, StubbedForward()
        # Not a submodule: a stub has none.
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.current.receive(self.index, args, kwargs)


@dataclass(frozen=True)
class ParameterSlot:
    """A place for a parameter outside the layers: the parameter's name in the model and its shape."""

    name: str
    shape: tuple[int, ...]

    def fill(self, model: nn.Module, values: Tensor) -> None:
        """Put a plain tensor there, not a parameter, so that nothing moves or saves it."""
        path, _, own = self.name.rpartition(".")
        owner = model.get_submodule(path)
        owner._parameters.pop(own, None)
        owner.__dict__[own] = values


class Skeleton(nn.Module):
    """A causal model without its layers.

    It has only the parameters that `keep` names. The other slots hold zeros that take no memory, because results
    computed from them are never used.

    Args:
        model: a causal model of transformers; its list of layers is replaced.
        path: the name of that list in the model.
    """

    has_randomness = False

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        #: True if the model expects its layers to return tuples
        self.as_tuple = False
        self.current = StubbedForward()
        #: slots whose parameters this skeleton does not have
        self.hollow: tuple[ParameterSlot, ...] = ()
        self._filled_for: tuple[torch.dtype, torch.device] | None = None
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        parent, _, name = path.rpartition(".")
        stubs = nn.ModuleList(LayerStub(layer, i) for i, layer in enumerate(layers))
        setattr(model.get_submodule(parent), name, stubs)

    @property
    def num_layers(self) -> int:
        return sum(1 for _ in self._stubs())

    def slots(self) -> tuple[ParameterSlot, ...]:
        """All slots for parameters outside the layers; a tied parameter has several."""
        return tuple(
            ParameterSlot(name, tuple(p.shape)) for name, p in self.model.named_parameters(remove_duplicate=False)
        )

    def keep(self, names: Iterable[str]) -> None:
        """Drop all parameters but those in the slots of these names."""
        kept = set(names)
        # A slot that holds a plain tensor already has no parameter to be found by.
        self.hollow = tuple(slot for slot in (*self.hollow, *self.slots()) if slot.name not in kept)
        self._filled_for = None
        for slot in self.hollow:
            slot.fill(self.model, torch.empty(slot.shape, device="meta"))

    def pretend(self, values: Mapping[str, Tensor]) -> None:
        """Put these values into the slots of these names, on the CPU, until `keep` is called."""
        for slot in self.hollow:
            slot.fill(self.model, values[slot.name])
        self._filled_for = (torch.float32, torch.device("cpu"))

    def run(self, tokens_BL: Tensor, positions_BL: Tensor, forward: StubbedForward, past: Any = None) -> Tensor | None:
        """Run the model's forward; return the logits [B, L, V], or None if it is left early.

        `past` is transformers' cache of the tokens before these; None if these are the first.
        """
        self._set_current(forward)
        given: dict[str, Any] = {"position_ids": positions_BL} if self.takes_positions else {}
        if bool((positions_BL.diff() != 1).any()):
            # Without a mask, transformers takes positions that do not count up for several texts in a row.
            given["attention_mask"] = torch.ones_like(positions_BL)
        if past is not None:
            given["past_key_values"] = past
        try:
            return self.model(input_ids=tokens_BL, use_cache=past is not None, return_dict=True, **given).logits
        except _LeaveForward:
            return None
        finally:
            self._set_current(StubbedForward())

    def before_layers(self, tokens_BL: Tensor, positions_BL: Tensor, past: Any = None) -> Tensor:
        """The hidden states [B, L, D] that the first layer receives."""
        forward = StubbedForward(last=0)
        self._fill(self._own_dtype(), tokens_BL.device)
        self.run(tokens_BL, positions_BL, forward, past)
        return forward.hidden[0]

    @torch.no_grad()
    def layer_arguments(
        self, positions_BL: Tensor, dtype: torch.dtype, past: Any = None
    ) -> Mapping[int, LayerArguments]:
        """Each layer's arguments beside hidden states of that dtype, by its number."""
        forward = StubbedForward(last=self.num_layers - 1, as_tuple=self.as_tuple)
        self._fill(dtype, positions_BL.device)
        self.run(torch.zeros_like(positions_BL), positions_BL, forward, past)
        return forward.arguments

    def after_layers(self, hidden_TD: Tensor) -> Tensor:
        """The logits [T, V] of the last layer's hidden states, each token by itself."""
        none_T1 = torch.zeros(len(hidden_TD), 1, dtype=torch.int64, device=hidden_TD.device)
        self._fill(self._own_dtype(), hidden_TD.device)
        logits = self.run(none_T1, none_T1, StubbedForward(output=hidden_TD.unsqueeze(1), as_tuple=self.as_tuple))
        assert logits is not None
        # A classifier of sequences gives one row for each already.
        return logits if logits.dim() == 2 else logits.squeeze(1)

    def _set_current(self, forward: StubbedForward) -> None:
        self.current = forward
        for stub in self._stubs():
            stub.current = forward

    def _own_dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.float32)

    def _stubs(self) -> Iterator[LayerStub]:
        return (module for module in self.model.modules() if isinstance(module, LayerStub))

    @torch.inference_mode(False)
    def _fill(self, dtype: torch.dtype, device: torch.device) -> None:
        # Tensors made while generating are used in training too.
        if self._filled_for != (dtype, device):
            for slot in self.hollow:
                slot.fill(self.model, torch.zeros((), dtype=dtype, device=device).expand(slot.shape))
            for part in self.modules():
                for name in part._non_persistent_buffers_set:
                    buffer = part._buffers[name]
                    part._buffers[name] = None if buffer is None else buffer.to(device)
            self._filled_for = (dtype, device)
