"""Inspection of a causal model of transformers before it is cut, by running it without its layers.

The model runs on two short texts with stubs for layers and dummy values for parameters, none of which takes memory. A
model that cannot be cut is refused with the reason.

Shapes: B sequences, L tokens, D hidden size, V vocabulary.
"""

import enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.model.transformers.skeleton import Skeleton, StubbedForward

_FEW, _LONG = 2, 3
"""Sequences and tokens of the texts."""


class ForwardPart(enum.Enum):
    """The part of a forward in which a parameter is used, relative to the layers."""

    BEFORE = enum.auto()
    BETWEEN = enum.auto()
    AFTER = enum.auto()


class CannotCut(ValueError):
    """A model's layers cannot run separately; the message gives the reason."""


def list_of_layers(model: nn.Module, num_layers: int) -> str:
    """Find the name of the list of layers: the outermost `nn.ModuleList` with one module for each of the layers.

    Raises:
        CannotCut: the model has no such list; names the lists that it has.
    """
    lists = {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    fitting = [name for name, length in lists.items() if length == num_layers]
    if not fitting:
        known = ", ".join(f"{name} of {length}" for name, length in lists.items()) or "none at all"
        raise CannotCut(
            f"{type(model).__name__} has no list of its {num_layers} layers to cut it by; its lists of modules: {known}"
        )
    return min(fitting, key=lambda name: name.count("."))


def uses_outside(skeleton: Skeleton, vocab_size: int, num_outputs: int) -> dict[ForwardPart, frozenset[str]]:
    """Find the slots whose parameters are used before, between and after the layers; set `skeleton.as_tuple`.

    The model gives `num_outputs` numbers for a token.

    The skeleton, whose slots are all hollow, is left without values.

    Raises:
        CannotCut: something besides the hidden states passes from the text to the layers, or from layer to layer, or
            the forward fails without its layers.
    """
    name = type(skeleton.model).__name__
    with torch.no_grad(), _DummyValues(skeleton) as dummies:
        try:
            skeleton.as_tuple = _gives_tuples(skeleton)
            last, as_tuple = skeleton.num_layers - 1, skeleton.as_tuple
            first, second = (StubbedForward(last=last, as_tuple=as_tuple) for _ in range(2))
            for forward, offset in ((first, 0), (second, _LONG)):
                skeleton.run(*_text(offset, vocab_size), forward)
            logits = skeleton.after_layers(first.hidden[0].flatten(0, 1))
        except Exception as error:  # any error of a model that expects its own layers
            reason = " ".join(str(error).split())
            raise CannotCut(f"{name} cannot be cut into its layers: run without them, it says {reason!r}") from error
    if any(hidden is not first.hidden[0] for hidden in first.hidden):
        raise CannotCut(f"{name} changes the hidden states between its layers, so they cannot be cut")
    for layer, arguments in first.arguments.items():
        other = second.arguments[layer]
        pairs = [(f"argument {i + 1}", *pair) for i, pair in enumerate(zip(arguments.args, other.args, strict=True))]
        pairs += [(key, value, other.kwargs.get(key)) for key, value in arguments.kwargs.items()]
        for argument, value, theirs in pairs:
            if not _same(value, theirs):
                raise CannotCut(f"{name} hands its layers {argument}, which depends on the text, so they cannot be cut")
    if logits.shape != (_FEW * _LONG, num_outputs):
        raise CannotCut(f"{name} makes logits of the shape {list(logits.shape)} of {_FEW * _LONG} tokens")
    if between := dummies.uses[ForwardPart.BETWEEN]:
        raise CannotCut(f"{name} uses its {sorted(between)[0]} between its layers, so they cannot be cut")
    return {part: frozenset(slots) for part, slots in dummies.uses.items()}


def _gives_tuples(skeleton: Skeleton) -> bool:
    """True if the model takes hidden states out of tuples that its layers return."""
    last = skeleton.num_layers - 1 or None
    forward = StubbedForward(last=last, as_tuple=True)
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
    """Within this context a skeleton's slots hold dummy values, and each use of one is recorded with its part."""

    #: part of a forward -> the slots whose values it has used
    uses: dict[ForwardPart, set[str]]
    #: the model, and by slot what its parameters hold meanwhile
    _skeleton: Skeleton
    _values: dict[str, Any]
    #: identity of a value -> its slot
    _slot_of: dict[int, str]

    def __init__(self, skeleton: Skeleton) -> None:
        super().__init__()
        self._skeleton = skeleton
        self.uses = {part: set() for part in ForwardPart}
        self._values = {slot: _dummy(shape) for slot, shape in skeleton.hollow.items()}
        self._slot_of = {id(values): name for name, values in self._values.items()}

    def __enter__(self) -> Any:
        self._skeleton.pretend(self._values)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._skeleton.drop_parameters()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [value for value in (*args, *kwargs.values()) if id(value) in self._slot_of]
        for value in used:
            self.uses[self._part()].add(self._slot_of[id(value)])
        if used and func is F.linear:
            # A product would write the expanded values out, which takes gigabytes for a large vocabulary.
            x, weight = args[0], args[1]
            return x.mean(-1, keepdim=True).expand(*x.shape[:-1], weight.shape[0]).contiguous()
        return func(*args, **kwargs)

    def _part(self) -> ForwardPart:
        num_reached = len(self._skeleton.current.arguments)
        if num_reached == 0:
            return ForwardPart.BEFORE
        return ForwardPart.AFTER if num_reached == self._skeleton.num_layers else ForwardPart.BETWEEN


def _dummy(shape: tuple[int, ...]) -> Tensor:
    """Values that differ from row to row, in the memory of one column."""
    if not shape:
        return torch.ones(())
    return torch.linspace(0.5, 1.0, shape[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape)
