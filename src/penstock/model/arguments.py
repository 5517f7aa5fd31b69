"""The arguments with which units are called: by position the stream, by name all that their `forward` asks for.

A parameter called `sequences`, or annotated `Sequences`, gets the microbatch's sequences. Any other that bears the name
of a key of the batch gets this microbatch's part of it, and one of `Numbers` says which microbatch it is of which step.
All others keep their defaults. A wrapper with `**kwargs` asks for what the modules inside it ask for. A loss or hook is
given these numbers, too.

A unit also draws its random numbers, such as dropout's, from a seed of its own.
"""

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.model.sequences import Sequences
from penstock.settings.declare import type_in_words


@dataclass(frozen=True, slots=True)
class Randomness:
    """The random numbers of one microbatch of a step; each unit draws from a seed of its own."""

    #: the run's seed
    seed: int
    #: optimizer steps taken before this one
    step: int
    #: the data- and context-parallel place whose microbatch it is
    place: int
    microbatch: int
    device: torch.device

    def begin(self, unit: str) -> None:
        """Set torch's generators to the seed of the unit of that name."""
        text = f"{self.seed}/{self.step}/{self.place}/{self.microbatch}/{unit}"
        value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        for generator in _generators(self.device):
            generator.manual_seed(value)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leave the generators from which a layer on the device may draw, at the end of this context, as they were."""
    put_back = random_numbers(device)
    try:
        yield
    finally:
        put_back()


def random_numbers(device: torch.device) -> Callable[[], None]:
    """Note where the generators are from which a layer on the device may draw; gives what puts them back there."""
    # States are real where tensors have no values.
    with _disable_current_modes():
        states = [(generator, generator.get_state()) for generator in _generators(device)]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back


def _generators(device: torch.device) -> list[torch.Generator]:
    """The generators from which a layer on that device may draw."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Numbers(NamedTuple):
    """The numbers of a microbatch, for which a forward, loss or hook may ask by name beside the batch's keys."""

    #: counted from 0, in the order of the rank's batch
    microbatch: int
    #: of the rank's batch
    num_microbatches: int
    #: that of the training step, counted from 1; elsewhere that of the last step taken
    step: int


LABELS = ("labels", "label", "targets", "target")
"""The names of a loss's second parameter that ask for the labels themselves; any other is given the microbatch."""


def numbers_asked(function: Any) -> frozenset[str]:
    """The names of `Numbers` that a loss or hook asks for by name, after the output and the microbatch itself."""
    form, parameters = _form_of(function)
    bound, others = form.keywords if isinstance(form, functools.partial) else (), parameters[2:]
    return frozenset(p.name for p in others if p.kind in _NAMED and p.name not in bound).intersection(Numbers._fields)


def check_callable(name: str, function: Any, arguments: str, optional: bool = False) -> None:
    """Refuse an argument that cannot be called. Raises: ValueError."""
    if optional and function is None:
        return
    if not callable(function):
        raise ValueError(f"{name}={function!r} is {type_in_words(function)}; give a function of ({arguments})")
    try:
        form = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return
    try:
        form.bind(*(arguments.split(", ") if arguments else ()), **dict.fromkeys(numbers_asked(function)))
    except TypeError:
        raise ValueError(f"{name} is a function of {form}; give one of ({arguments})") from None


@dataclass(frozen=True, eq=False)
class Labels:
    """A loss of (logits, labels), with what it gives: the "mean" over the tokens with a label, or their "sum".

    >>> loss_fn = Labels(lambda x, y: torch.nn.functional.cross_entropy(x, y, label_smoothing=0.1), reduction="mean")
    >>> round(float(loss_fn(torch.zeros(3, 2), torch.tensor([1, 0, -100]))), 4)
    0.6931
    """

    loss_fn: Callable[..., Any]
    reduction: str

    def __call__(self, logits: Any, labels: Tensor, **numbers: int) -> Any:
        return self.loss_fn(logits, labels, **numbers)


def reduction_of_labels(function: Any) -> str | None:
    """The reduction that a loss of (logits, labels) states, "" for one that states none; None of any other loss.

    It is an attribute, as torch's losses have it, or a parameter's default.
    """
    _, parameters = _form_of(function)
    takes_labels = len(parameters) > 1 and parameters[1].kind in _BY_POSITION and parameters[1].name in LABELS
    return argument_of(function, "reduction", "") if takes_labels or isinstance(function, Labels) else None


def argument_of(function: Any, name: str, otherwise: Any) -> Any:
    """A loss's value of an argument such as `reduction`: an attribute, or a parameter's default."""
    default = next((p.default for p in _form_of(function)[1] if p.name == name), otherwise)
    inner = function.loss_fn if isinstance(function, Labels) else None
    return getattr(function, name, getattr(inner, name, default))


def _form_of(function: Any) -> tuple[Any, list[inspect.Parameter]]:
    """A loss or hook as it is called, without what compiled it, and its parameters in order."""
    function = function.loss_fn if isinstance(function, Labels) else function
    form = getattr(function, "_orig_mod", function)
    form = form.forward if isinstance(form, nn.Module) else form
    try:
        return form, list(inspect.signature(form).parameters.values())
    except (TypeError, ValueError):  # of some functions in C nothing is known
        return form, []


@dataclass(frozen=True, slots=True)
class Given:
    """All that a microbatch gives to units beside the stream and its sequences."""

    #: key of the batch -> this microbatch's part of it, on the device; those that some unit of the rank asks for
    keys: Mapping[str, Tensor] = field(default_factory=dict)
    #: None where nothing is asked of a whole microbatch, as in generation
    randomness: Randomness | None = None
    #: name among `Numbers` -> number
    numbers: Mapping[str, int] = field(default_factory=dict)


NOTHING_GIVEN = Given()


@dataclass(frozen=True)
class Parameters:
    """The parameters of a unit's `forward` after the first, by which it is called.

    A wrapper's `**kwargs` stand for what the modules inside it ask for.
    """

    #: names that may be given, in the order of the signature
    names: tuple[str, ...]
    #: those among them without a default, which nobody else can give
    required: frozenset[str]
    #: the names that get the sequences
    sequences: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """Read them from the signature of `forward`, and of the modules to which a wrapper hands on keywords."""
        if isinstance(compiled := getattr(module, "_orig_mod", None), nn.Module):
            return cls.of(compiled)
        every = list(inspect.signature(module.forward).parameters.values())
        bound = module.forward.keywords if isinstance(module.forward, functools.partial) else ()
        named = [p for p in every[1:] if p.kind in _NAMED and p.name not in bound]
        # An annotation may be a text, a class or a union.
        annotated = {p.name: getattr(p.annotation, "__name__", str(p.annotation)) for p in named}
        sequences = frozenset(
            name for name, text in annotated.items() if name == "sequences" or re.search(r"\bSequences\b", text)
        )
        required = frozenset(p.name for p in named if p.default is p.empty) - sequences
        asked = cls(tuple(annotated), required, sequences)
        if all(p.kind is not p.VAR_KEYWORD for p in every):
            return asked
        inner = [found for found in map(Parameters.of, _inside(module)) if found.names]
        # A wrapper with parameters of its own may fill those of the modules inside by itself.
        hands_on_all = len(inner) == 1 and all(p.kind not in _NAMED for p in every)
        return cls(
            tuple(dict.fromkeys(name for found in (asked, *inner) for name in found.names)),
            inner[0].required if hands_on_all else required,
            sequences.union(*(found.sequences for found in inner)),
        )

    @cached_property
    def keys(self) -> frozenset[str]:
        """The names that a batch's keys of the same name fill."""
        return frozenset(self.names) - self.sequences

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Parameters without a default that no key of the batch and no number fills."""
        present = {*keys, *Numbers._fields}
        return [name for name in self.names if name in self.required and name not in present]

    def arguments(self, x: Any, sequences: Sequences, given: Given) -> tuple[Iterable[Any], dict[str, Any]]:
        """The arguments of a call, by position and by name; those of a tuple come first, those of a mapping by name."""
        named: dict[str, Any] = dict.fromkeys(self.sequences, sequences)
        # A key of the batch goes before a number of that name.
        for key, value in (*given.numbers.items(), *given.keys.items()):
            if key in self.keys:
                named[key] = value
        if isinstance(x, Tensor):
            return (x,), named
        if isinstance(x, Mapping):
            return (), {**named, **x}
        for name in self.names[: len(x) - 1]:
            named.pop(name, None)
        return x, named


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module calls by itself: its children, and those in its lists of modules."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _inside(child)
        else:
            yield child
