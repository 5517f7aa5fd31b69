"""A model's own forward, run with stubs in place of its layers.

The model's own code computes everything before its layers, the arguments of each layer beside the hidden states, and
everything after the layers, whatever its family: scales, norms, masks, rotary tables, biases by distance.

Shapes: B sequences, L tokens of each, T tokens, D hidden size, V vocabulary.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_HIDDEN = "hidden_states"


LayerArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The arguments of a layer beside the hidden states: by place, and by name."""


class _LeaveForward(Exception):
    """Leaves a model's forward early."""


@dataclass(eq=False)
class StubbedForward:
    """One forward of a model whose layers are stubs: what the stubs return, and what they received."""

    #: the number of the stub at which the forward is left; None runs it to its end
    last: int | None = None
    #: the stubs' return value; None for their hidden states
    output: Tensor | None = None
    #: number of a stub -> its arguments beside the hidden states
    arguments: dict[int, LayerArguments] = field(default_factory=dict)
    #: the dtype of what is computed; None for that of the skeleton's parameters
    dtype: torch.dtype | None = None
    #: each stub's hidden states, in a tuple where the model left them in one
    hidden: list[Any] = field(default_factory=list)


def cache_argument(model: nn.Module) -> str | None:
    """The name by which a model's forward takes a cache, another from transformers 5.24 on; None if it takes none."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


class LayerStub(nn.Module):
    """Replaces a layer: has its attributes but none of its parameters, and acts as the running forward says."""

    def __init__(self, layer: nn.Module, index: int, skeleton: "Skeleton") -> None:
        super().__init__()
        self.index = index
        # Not submodules: a stub has none.
        self.__dict__.update(layer=layer, skeleton=skeleton)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now: StubbedForward = self.__dict__["skeleton"].current
        now.hidden.append(args[0] if args else kwargs[_HIDDEN])
        now.arguments[self.index] = args[1:], {name: value for name, value in kwargs.items() if name != _HIDDEN}
        if self.index == now.last:
            raise _LeaveForward
        output = now.hidden[-1] if now.output is None else now.output
        return (output,) if self.__dict__["skeleton"].as_tuple else output


class Skeleton(nn.Module):
    """A causal model without its layers.

    A slot is a place for a parameter, by its name in the model; a tied parameter has several. Hollow slots, of whose
    parameters this skeleton has none, hold zeros that take no memory, because results computed from them are never
    used.

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
        #: True if a layer's arguments depend on the longest sequence, so that sequences of unequal length must not be
        #: padded together
        self.by_length = False
        #: the forward that runs now
        self.current = StubbedForward()
        #: hollow slot -> the parameter's shape
        self.hollow: dict[str, tuple[int, ...]] = {}
        #: what the hollow slots hold values of now
        self.filled_for: tuple[torch.dtype, torch.device] | None = None
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        self.num_layers = len(layers)
        parent, _, name = path.rpartition(".")
        stubs = nn.ModuleList(LayerStub(layer, i, self) for i, layer in enumerate(layers))
        setattr(model.get_submodule(parent), name, stubs)

    def drop_parameters(self) -> None:
        """Make every slot hollow."""
        # A slot that holds a plain tensor already has no parameter to be found by.
        self.hollow |= {name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)}
        self.filled_for = None
        for slot, shape in self.hollow.items():
            self.put(slot, torch.empty(shape, device="meta"))

    def put(self, slot: str, values: Tensor) -> None:
        """Put a plain tensor there, not a parameter, so that nothing moves or saves it."""
        path, _, own = slot.rpartition(".")
        owner = self.model.get_submodule(path)
        owner._parameters.pop(own, None)
        owner.__dict__[own] = values

    def run(self, tokens_BL: Tensor, positions_BL: Tensor, forward: StubbedForward, past: Any = None) -> Tensor | None:
        """Run the model's forward; return the logits [B, L, V], or None if it is left early.

        `past` is transformers' cache of the tokens before these; None if these are the first.
        """
        self.current = forward
        self._fill(forward.dtype or next((p.dtype for p in self.parameters()), torch.float32), tokens_BL.device)
        given: dict[str, Any] = {"position_ids": positions_BL} if self.takes_positions else {}
        if bool((positions_BL.diff() != 1).any()):
            # Without a mask, transformers takes positions that do not count up for several texts in a row.
            given["attention_mask"] = torch.ones_like(positions_BL)
        if past is not None:
            given[cache_argument(self.model) or ""] = past
        try:
            return self.model(input_ids=tokens_BL, use_cache=past is not None, return_dict=True, **given).logits
        except _LeaveForward:
            return None
        finally:
            self.current = StubbedForward()

    def before_layers(self, tokens_BL: Tensor, positions_BL: Tensor, past: Any = None) -> Tensor:
        """The hidden states [B, L, D] that the first layer receives."""
        forward = StubbedForward(last=0)
        self.run(tokens_BL, positions_BL, forward, past)
        return forward.hidden[0]

    @torch.no_grad()
    def layer_arguments(
        self, positions_BL: Tensor, dtype: torch.dtype, past: Any = None
    ) -> Mapping[int, LayerArguments]:
        """Each layer's arguments beside hidden states of that dtype, by its number."""
        forward = StubbedForward(last=self.num_layers - 1, dtype=dtype)
        self.run(torch.zeros_like(positions_BL), positions_BL, forward, past)
        return forward.arguments

    def after_layers(self, hidden_TD: Tensor) -> Tensor:
        """The logits [T, V] of the last layer's hidden states, each token by itself."""
        none_T1 = torch.zeros(len(hidden_TD), 1, dtype=torch.int64, device=hidden_TD.device)
        logits = self.run(none_T1, none_T1, StubbedForward(output=hidden_TD.unsqueeze(1)))
        assert logits is not None
        # A classifier of sequences gives one row for each already.
        return logits if logits.dim() == 2 else logits.squeeze(1)

    @torch.inference_mode(False)
    def _fill(self, dtype: torch.dtype, device: torch.device) -> None:
        # Tensors made while generating are used in training too.
        if self.filled_for != (dtype, device):
            for slot, shape in self.hollow.items():
                self.put(slot, torch.zeros((), dtype=dtype, device=device).expand(shape))
            for part in self.modules():
                for name in part._non_persistent_buffers_set:
                    buffer = part._buffers[name]
                    part._buffers[name] = None if buffer is None else buffer.to(device)
            self.filled_for = (dtype, device)


# ---- Inspection of a model before it is cut, by running it without its layers


_FEW, _LONG = 2, 3
"""Sequences and tokens of the texts."""


def list_of_layers(model: nn.Module, num_layers: int) -> str:
    """Find the name of the list of layers: the outermost `nn.ModuleList` with one module for each of the layers.

    Raises:
        ValueError: the model has no such list.
    """
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    fitting = [name for name, part in lists.items() if len(part) == num_layers]
    if not fitting:
        raise ValueError(f"{type(model).__name__} has no list of its {num_layers} layers to cut it by")
    return min(fitting, key=lambda name: name.count("."))


def uses_outside(skeleton: Skeleton, vocab_size: int) -> tuple[frozenset[str], frozenset[str]]:
    """Find the slots whose parameters are used before the layers, and those after them; set `skeleton.as_tuple`.

    The skeleton, whose slots are all hollow, is left without values.

    Raises:
        ValueError: something besides the hidden states passes from the text to the layers, or from layer to layer, or
            the forward fails without its layers.
    """
    name = type(skeleton.model).__name__
    with torch.no_grad(), _DummyValues(skeleton) as dummies:
        try:
            skeleton.as_tuple = _gives_tuples(skeleton)
            first, second = (StubbedForward(last=skeleton.num_layers - 1) for _ in range(2))
            for forward, offset in ((first, 0), (second, _LONG)):
                skeleton.run(*_text(offset, vocab_size), forward)
            skeleton.after_layers(first.hidden[0].flatten(0, 1))
        except Exception as error:  # any error of a model that expects its own layers
            raise ValueError(
                f"{name} cannot be cut into its layers: run without them, it says {' '.join(str(error).split())!r}; "
                "possible are its layers as your own (Engine.from_layers)"
            ) from error
    if any(hidden is not first.hidden[0] for hidden in first.hidden):
        raise ValueError(f"{name} changes the hidden states between its layers, so they cannot be cut")
    if not _same(first.arguments, second.arguments):
        raise ValueError(f"{name} hands its layers an argument that depends on the text, so they cannot be cut")
    if dummies.between:
        raise ValueError(f"{name} uses its {sorted(dummies.between)[0]} between its layers, so they cannot be cut")
    return frozenset(dummies.before), frozenset(dummies.after)


def _gives_tuples(skeleton: Skeleton) -> bool:
    """True if the model takes hidden states out of tuples that its layers return."""
    skeleton.as_tuple, forward = True, StubbedForward(last=skeleton.num_layers - 1 or None)
    try:
        skeleton.run(*_text(0, 2), forward)
    except (TypeError, AttributeError):
        return False
    return not any(isinstance(hidden, tuple) for hidden in forward.hidden)


def _text(offset: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions [B, L]."""
    tokens = (torch.arange(_FEW * _LONG) + offset) % vocab_size
    return tokens.view(_FEW, _LONG), torch.arange(_LONG).expand(_FEW, _LONG)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value, other)
    if isinstance(value, tuple | list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_same(part, other[key]) for key, part in value.items())
    # Settings, functions and the like.
    return True


class _DummyValues(TorchFunctionMode):
    """Within this context a skeleton's slots hold dummy values, and each use of one is recorded."""

    #: the slots whose values were used before, between and after the layers
    before: set[str]
    between: set[str]
    after: set[str]
    #: the model, and by slot what its parameters hold meanwhile
    _skeleton: Skeleton
    _values: dict[str, Any]
    #: identity of a value -> its slot
    _slot_of: dict[int, str]

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self._skeleton = skeleton
        self.before, self.between, self.after = set(), set(), set()
        self._values = {slot: _dummy(shape) for slot, shape in skeleton.hollow.items()}
        self._slot_of = {id(values): name for name, values in self._values.items()}

    def __enter__(self) -> Any:
        for slot, values in self._values.items():
            self._skeleton.put(slot, values)
        self._skeleton.filled_for = (torch.float32, torch.device("cpu"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._skeleton.drop_parameters()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [value for value in (*args, *kwargs.values()) if id(value) in self._slot_of]
        num_reached = len(self._skeleton.current.arguments)
        past_all = num_reached == self._skeleton.num_layers
        part = self.before if num_reached == 0 else self.after if past_all else self.between
        part.update(self._slot_of[id(value)] for value in used)
        if used and func is F.linear:
            # A product would write the expanded values out, which takes gigabytes for a large vocabulary.
            x, weight = args[0], args[1]
            return x.mean(-1, keepdim=True).expand(*x.shape[:-1], weight.shape[0]).contiguous()
        return func(*args, **kwargs)


def _dummy(shape: tuple[int, ...]) -> Tensor:
    """Values that differ from row to row, in the memory of one column."""
    if not shape:
        return torch.ones(())
    return torch.linspace(0.5, 1.0, shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
