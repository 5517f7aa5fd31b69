"""The arguments with which units are called: by position the stream, by name all that their `forward` asks for.

A parameter called `sequences`, or annotated `Sequences`, gets the microbatch's sequences. Any other that bears the name
of a key of the batch gets this microbatch's part of it. All others keep their defaults.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock.model.randomness import Randomness
from penstock.model.sequences import Sequences

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Given:
    """All that a microbatch gives to units beside the stream and its sequences."""

    #: key of the batch -> this microbatch's part of it, on the device; those that some unit of the rank asks for
    keys: Mapping[str, Tensor] = field(default_factory=dict)
    #: None outside of training
    randomness: Randomness | None = None
    #: key of the batch, or "sequences" -> the microbatch's number of them; empty where all layers give the plain stream
    num_rows: Mapping[str, int] = field(default_factory=dict)


NOTHING_GIVEN = Given()


@dataclass(frozen=True)
class Parameters:
    """The parameters of a unit's `forward` after the first, by which it is called."""

    #: names that may be given, in the order of the signature
    names: tuple[str, ...]
    #: those among them without a default
    required: frozenset[str]
    #: the name that gets the sequences; None if none does
    sequences: str | None
    #: False where a wrapper passes on positional arguments alone
    by_keyword: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """Read them from the signature of `forward`, or of the module that a wrapper calls."""
        signature, bound, by_keyword = _signature(module)
        named = [p for p in signature.parameters.values() if p.kind in _NAMED]
        rest = [p for p in list(signature.parameters.values())[1:] if p in named and p.name not in bound]
        sequences = next((p.name for p in rest if p.name == "sequences" or _takes_sequences(p.annotation)), None)
        required = frozenset(p.name for p in rest if p.default is p.empty and p.name != sequences)
        return cls(tuple(p.name for p in rest), required, sequences, by_keyword)

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Those of the batch's keys that the unit asks for."""
        return [key for key in keys if key in self.names and key != self.sequences]

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Parameters without a default that no key of the batch fills."""
        present = set(keys)
        return [name for name in self.names if name in self.required and name not in present]

    def call(self, module: nn.Module, x: Any, sequences: Sequences, keys: Mapping[str, Tensor]) -> Any:
        """Call the unit with what it asks for."""
        args, kwargs = self.arguments(x, sequences, keys)
        return module(*args, **kwargs)

    def arguments(
        self, x: Any, sequences: Sequences, keys: Mapping[str, Tensor]
    ) -> tuple[Iterable[Any], dict[str, Any]]:
        """What the unit asks for, by position and by name; several tensors as a tuple come first, a mapping by name."""
        named: dict[str, Any] = {} if self.sequences is None else {self.sequences: sequences}
        if keys:
            named.update((key, keys[key]) for key in self.wanted(keys))
        if not isinstance(x, Tensor):
            if isinstance(x, Mapping):
                return (), {**named, **x}
            for name in self.names[: len(x) - 1]:
                named.pop(name, None)
            return (x, named) if self.by_keyword else ((*x, *self._in_order(named, len(x) - 1)), {})
        return ((x,), named) if self.by_keyword else ((x, *self._in_order(named)), {})

    def _in_order(self, named: Mapping[str, Any], num_taken: int = 0) -> list[Any]:
        """The arguments by position, as far as each is given."""
        found = []
        for name in self.names[num_taken:]:
            if name not in named:
                break
            found.append(named[name])
        return found


class BoundLayer(nn.Module):
    """A layer of a `functools.partial`: the layer with some of its arguments fixed."""

    def __init__(self, bound: "functools.partial[Any]") -> None:
        super().__init__()
        self.layer: nn.Module = bound.func  # pyright: ignore[reportAttributeAccessIssue]
        self.arguments, self.keywords = bound.args, dict(bound.keywords)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*self.arguments, *args, **{**self.keywords, **kwargs})


def _signature(module: nn.Module) -> tuple[inspect.Signature, frozenset[str], bool]:
    """The signature that determines how a module is called, names that are bound, and whether it takes keywords."""
    bound: frozenset[str] = frozenset()
    by_keyword = True
    while True:
        if isinstance(module, BoundLayer):
            bound, module = bound | module.keywords.keys(), module.layer
            continue
        if isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            module = compiled
            continue
        if isinstance(module.forward, functools.partial):
            bound |= module.forward.keywords.keys()
        signature = inspect.signature(module.forward)
        kinds = {p.kind for p in signature.parameters.values()}
        inner = list(module.children())
        if not kinds or kinds & set(_NAMED) or inspect.Parameter.POSITIONAL_ONLY in kinds or len(inner) != 1:
            return signature, bound, by_keyword
        # A wrapper of one module, which hands on what it is given.
        by_keyword = by_keyword and inspect.Parameter.VAR_KEYWORD in kinds
        module = inner[0]


def _takes_sequences(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.search(r"\bSequences\b", text) is not None
