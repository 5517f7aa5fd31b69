"""A model's own forward, run with stand-ins in the place of its layers.

What the model does before its layers, what it hands each of them beside the hidden states, and what it does after
them is its own code, whatever its family: scales, norms, masks, rotary tables, biases by distance.

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
class Handed:
    """What a layer is given beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def instead(self, one: object, other: object) -> "Handed":
        """The same with another object in the place of one."""
        args = tuple(other if value is one else value for value in self.args)
        return Handed(args, {name: other if value is one else value for name, value in self.kwargs.items()})


class _Enough(Exception):
    """Leaves a model's forward where no more of it is wanted."""


@dataclass(eq=False)
class Visit:
    """One forward: what stand-ins do in it, and what they were given.

    Args:
        last: the number of the stand-in at which the forward is left; None goes on to its end.
        output: what the layers give back; None for what they are given.
        as_tuple: whether it is given back in a tuple, as the model's layers do.
    """

    last: int | None = None
    output: Tensor | None = None
    as_tuple: bool = False
    handed: dict[int, Handed] = field(default_factory=dict)
    hidden: list[Any] = field(default_factory=list)
    """What each stand-in was given as hidden states, the tuple where the model left them in one."""

    def receive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden.append(args[0] if args else kwargs[_HIDDEN])
        self.handed[index] = Handed(args[1:], {name: value for name, value in kwargs.items() if name != _HIDDEN})
        if index == self.last:
            raise _Enough
        output = self.hidden[-1] if self.output is None else self.output
        return (output,) if self.as_tuple else output


class StandIn(nn.Module):
    """In the place of a layer: has its attributes and none of its parameters, and does what the `Visit` says."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.index, self.visit = index, Visit()
        # Beside the submodules, which a stand-in has not.
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.visit.receive(self.index, args, kwargs)


@dataclass(frozen=True)
class Slot:
    """A place for a parameter outside the layers: its name in the model, and the parameter's shape."""

    name: str
    shape: tuple[int, ...]

    def fill(self, model: nn.Module, values: Tensor) -> None:
        """Put a plain tensor there; it is no parameter, and nothing moves or saves it."""
        path, _, own = self.name.rpartition(".")
        owner = model.get_submodule(path)
        owner._parameters.pop(own, None)
        owner.__dict__[own] = values


class Skeleton(nn.Module):
    """A causal model without its layers.

    Only the parameters that it is told to keep are its own. In the other slots lie zeros that take no memory, for what
    comes of them is never used.

    Args:
        model: a causal model of transformers; its list of layers is replaced.
        path: the name of that list in the model.
    """

    has_randomness = False

    def __init__(self, model: nn.Module, path: str) -> None:
        super().__init__()
        self.model = model
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.as_tuple, self.visit = False, Visit()
        self.hollow: tuple[Slot, ...] = ()
        self._filled_for: tuple[torch.dtype, torch.device] | None = None
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        parent, _, name = path.rpartition(".")
        stand_ins = nn.ModuleList(StandIn(layer, i) for i, layer in enumerate(layers))
        setattr(model.get_submodule(parent), name, stand_ins)

    @property
    def num_layers(self) -> int:
        return sum(1 for _ in self._stand_ins())

    def slots(self) -> tuple[Slot, ...]:
        """All places for parameters outside the layers; a shared parameter has several."""
        return tuple(Slot(name, tuple(p.shape)) for name, p in self.model.named_parameters(remove_duplicate=False))

    def keep(self, names: Iterable[str]) -> None:
        """Let go of all parameters but those in the slots of these names."""
        kept = set(names)
        self.hollow = tuple(slot for slot in self.slots() if slot.name not in kept)
        self._filled_for = None
        for slot in self.hollow:
            slot.fill(self.model, torch.empty(slot.shape, device="meta"))

    def pretend(self, values: Mapping[str, Tensor]) -> None:
        """Put these values into the slots of these names, on the CPU and for now: no other are put there."""
        for slot in self.hollow:
            slot.fill(self.model, values[slot.name])
        self._filled_for = (torch.float32, torch.device("cpu"))

    def run(self, tokens_BL: Tensor, positions_BL: Tensor, visit: Visit, past: Any = None) -> Tensor | None:
        """Run the model's forward; the logits [B, L, V] where it comes to its end, None where it is left before.

        `past` is transformers' cache of the tokens before these; None where there are none.
        """
        self._receive(visit)
        given: dict[str, Any] = {"position_ids": positions_BL} if self.takes_positions else {}
        if past is not None:
            given["past_key_values"] = past
        try:
            return self.model(input_ids=tokens_BL, use_cache=past is not None, return_dict=True, **given).logits
        except _Enough:
            return None
        finally:
            self._receive(Visit())

    def before_layers(self, tokens_BL: Tensor, positions_BL: Tensor, past: Any = None) -> Tensor:
        """The hidden states [B, L, D] that the first layer is given."""
        visit = Visit(last=0)
        self._fill(self._own_dtype(), tokens_BL.device)
        self.run(tokens_BL, positions_BL, visit, past)
        return visit.hidden[0]

    @torch.no_grad()
    def beside_hidden(self, positions_BL: Tensor, dtype: torch.dtype, past: Any = None) -> Mapping[int, Handed]:
        """What each layer is given beside hidden states of that dtype, by its number."""
        visit = Visit(last=self.num_layers - 1, as_tuple=self.as_tuple)
        self._fill(dtype, positions_BL.device)
        self.run(torch.zeros_like(positions_BL), positions_BL, visit, past)
        return visit.handed

    def after_layers(self, hidden_TD: Tensor) -> Tensor:
        """The logits [T, V] of the last layer's hidden states, each token by itself."""
        none_T1 = torch.zeros(len(hidden_TD), 1, dtype=torch.int64, device=hidden_TD.device)
        self._fill(self._own_dtype(), hidden_TD.device)
        logits = self.run(none_T1, none_T1, Visit(output=hidden_TD.unsqueeze(1), as_tuple=self.as_tuple))
        assert logits is not None
        return logits.squeeze(1)

    def _receive(self, visit: Visit) -> None:
        self.visit = visit
        for stand_in in self._stand_ins():
            stand_in.visit = visit

    def _own_dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.parameters()), torch.float32)

    def _stand_ins(self) -> Iterator[StandIn]:
        return (module for module in self.model.modules() if isinstance(module, StandIn))

    @torch.inference_mode(False)
    def _fill(self, dtype: torch.dtype, device: torch.device) -> None:
        # What is made while generating serves training too.
        if self._filled_for != (dtype, device):
            for slot in self.hollow:
                slot.fill(self.model, torch.zeros((), dtype=dtype, device=device).expand(slot.shape))
            for part in self.modules():
                for name in part._non_persistent_buffers_set:
                    buffer = part._buffers[name]
                    part._buffers[name] = None if buffer is None else buffer.to(device)
            self._filled_for = (dtype, device)
