"""Any optimizer of torch's kind, over the parameters that a rank steps, with all the state that it keeps anywhere."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from penstock.engine.optimizer.form import (
    FORM,
    GROUP,
    OPTIMIZER,
    NoForm,
    deep_copy,
    described,
    put_together,
    taken_apart,
)
from penstock.engine.optimizer.steppers import (
    BY_ELEMENTS,
    BY_PARAMETERS,
    Block,
    FlatStepper,
    GroupRule,
    OptimizerKind,
    OwnedState,
    StateName,
    Stored,
    Values,
    copied,
    with_rates_of_its_own,
)
from penstock.model import kept_random_state
from penstock.parallel import Place
from penstock.parallel.gradients import in_place_of
from penstock.settings import ConfigError
from penstock.settings.declare import type_in_words

# Larger values are no running values, which all ranks have alike.
_MOST_COMPARED = 64
_WIDE = (torch.float32, torch.float64)
# Functions and modules are no state.
_NO_STATE = (type, ModuleType)


class TorchStepper:
    """An optimizer of torch's kind, over the parameters in their shapes, or over flat parts of them.

    It is never stepped but for a step of the engine. What it keeps is learned from it after that: for each parameter,
    in its groups (running values), and in attributes (what has changed since it was made). What a checkpoint holds of
    it is made anew from there and given to it by `continue_from`.
    """

    #: the optimizer's groups by number
    _rules: Mapping[int, GroupRule]
    #: stands for a parameter in the names of its attributes
    _owner: str
    #: True where several ranks step the parameters, each its own
    _is_split: bool
    #: what is stepped, by name
    _stepped: Mapping[str, _Stepped]
    #: the names, by identity
    _names: Mapping[int, str]
    _optimizer: torch.optim.Optimizer
    #: the groups, by owner, and the attributes, as they were made
    _as_made: Mapping[str, AsMade]
    #: the keys of the groups that rates set
    _set: set[str]
    #: True once a step has shown that parameters are stepped independently, or where it does not matter
    _is_known: bool
    #: what `state` or `expect` gave last, which may have been written to
    _listed: dict[StateName, OwnedState] | None

    def __init__(
        self, kind: OptimizerKind, rules: Mapping[int, GroupRule], number: int, blocks: Sequence[Block], is_split: bool
    ) -> None:
        self._rules, self._owner, self._is_split = rules, f"{OPTIMIZER}{number}", is_split
        self._stepped = {place.name: _Stepped.of(block, place) for block in blocks for place in block.places}
        self._names = {id(one.parameter): name for name, one in self._stepped.items()}
        self._optimizer, self._set, self._listed = self._made(kind), set(), None
        self._as_made = {
            owner: AsMade.of(values, self._names, self._known()) for owner, values in self._beside().items()
        }
        self._is_known = not is_split or type(self._optimizer) in BY_ELEMENTS | BY_PARAMETERS

    def step(self, values: Sequence[Values]) -> None:
        for number, group in self._groups().items():
            self._set |= values[number].keys()
            for key, value in values[number].items():
                # As torch's schedulers do.
                group[key].fill_(value) if isinstance(group.get(key), Tensor) else group.update({key: value})
        self._listed = None
        own = [value for value in self._attributes().values() if isinstance(value, torch.Generator)]
        device = next(iter(self._stepped.values())).parameter.device
        with kept_random_state(device, own if self._is_split else ()) as were_drawn_from:
            if self._is_known:
                self._optimizer.step()
            else:
                self._watched_step()
            if were_drawn_from():
                raise ConfigError(
                    f"the optimizer {self._label} draws random numbers in its step from torch's generator, or from one "
                    "that it keeps, so that they depend on the layout; it can draw them from a torch.Generator that it "
                    "makes for each parameter and step"
                )

    def _watched_step(self) -> None:
        """Step, and see that parameters do not meet in it. Raises: ConfigError if they do."""
        with _Origins(self._stepped, self._optimizer.state) as origins:
            self._optimizer.step()
        if origins.joined is not None:
            first, second = origins.joined
            raise needs_one_rank(self._label, f"steps parameters jointly ({first} and {second} meet in it)")
        self._is_known = True

    # ---- what it keeps

    def state(self) -> dict[StateName, OwnedState]:
        """All that it keeps. Raises: ConfigError naming what a checkpoint cannot hold."""
        self._listed = self._kept()
        return self._listed

    def _kept(self) -> dict[StateName, OwnedState]:
        found = dict[StateName, OwnedState]()
        for name, one in self._stepped.items():
            written = sorted(vars(one.parameter).keys() - vars(one.place.parameter).keys())
            # Torch's own begin with a line.
            if written := [key for key in written if not key.startswith("_")]:
                raise ConfigError(
                    f"the optimizer {self._label} keeps {written[0]!r} as an attribute of {name}, which no checkpoint "
                    "holds; it holds what is in self.state[parameter]"
                )
            own = self._optimizer.state.get(one.parameter, {})
            for kind, value in self._apart(own, one.parameter.device, f"of {name}").items():
                is_like = value.shape == one.parameter.shape and kind != FORM
                found[kind, name] = OwnedState(one.place, value.reshape(-1)) if is_like else OwnedState(None, value)
        for owner, values in self._shared().items():
            for kind, value in self._apart(values, torch.device("cpu"), "of all parameters").items():
                if self._is_split and kind != FORM and value.numel() > _MOST_COMPARED:
                    raise needs_one_rank(self._label, f"keeps {kind.partition('/')[0]!r} of all parameters together")
                found[kind, owner] = OwnedState(None, value)
        return found

    def expect(self, stored: Mapping[StateName, Stored]) -> dict[StateName, OwnedState]:
        """Make room for what a checkpoint has of its parameters, to be loaded there and then `continue_from`."""
        self._listed = {}
        for (kind, name), (dtype, shape) in stored.items():
            one = self._stepped.get(name)
            if one is None and name not in self._as_made:
                continue
            device = torch.device("cpu") if one is None or kind == FORM else one.parameter.device
            if shape is not None:
                self._listed[kind, name] = OwnedState(None, torch.zeros(shape, dtype=dtype, device=device))
                continue
            own = self._stepped[name].parameter
            # The precision may be another one than that of the run that was saved.
            kept = own.dtype if dtype in _WIDE else dtype
            values = torch.zeros(own.numel(), dtype=kept, device=device)
            self._listed[kind, name] = OwnedState(self._stepped[name].place, values)
        return self._listed

    def continue_from(self, num_updates: int, since: Mapping[str, int]) -> None:
        listed, self._listed = self._listed, None
        if listed is None:
            return
        by_owner: dict[str, dict[str, Tensor]] = {}
        for (kind, name), own in listed.items():
            values = own.values if own.place is None else own.values.view(self._stepped[name].parameter.shape)
            by_owner.setdefault(name, {})[kind] = values
        parameters = {name: one.parameter for name, one in self._stepped.items()}
        found = {name: put_together(tensors, parameters) for name, tensors in by_owner.items()}
        states = {parameter: found[name] for name, parameter in parameters.items() if name in found}
        beside = {
            owner: deep_copy(dict(made.values), self._known()) | found.get(owner, {})
            for owner, made in self._as_made.items()
        }
        attributes = self._attributes()
        changed = self._as_made[self._owner].changed(attributes, self._names)
        states |= beside[self._owner].pop("state", {})
        beside[self._owner] = {k: v for k, v in attributes.items() if k not in changed} | beside[self._owner]
        self._take(states, beside)

    def _take(self, states: Mapping[Any, Any], beside: Mapping[str, Mapping[str, Any]]) -> None:
        """Take states and what `_beside` gives for all that it keeps."""
        optimizer = self._optimizer
        _replace(optimizer.state, states)
        for number, group in self._groups().items():
            _replace(group, {"params": group["params"], **beside[f"{GROUP}{number}"]})
        for key in self._attributes().keys() - beside[self._owner].keys():
            delattr(optimizer, key)
        vars(optimizer).update(beside[self._owner])

    def snapshot(self) -> Callable[[], None]:
        put_back = copied([one.parameter for one in self._stepped.values()])
        attributes = self._attributes()
        inner = [own.state for own in _flat(attributes.values()) if isinstance(own, torch.optim.Optimizer)]
        beside = {**self._beside(), self._owner: _with_form(attributes, self._names)}
        # Parameters are put back where they are; all else is replaced.
        kept = dict(self._optimizer.state), beside, [dict(state) for state in inner]
        states, beside, of_inner = deep_copy(kept, self._known())
        beside[self._owner] = attributes | beside[self._owner]

        def restore() -> None:
            put_back()
            self._take(states, beside)
            for state, values in zip(inner, of_inner, strict=True):
                _replace(state, values)

        return restore

    @property
    def state_bytes(self) -> int:
        try:
            return sum(state.values.nbytes for state in self._kept().values())
        except ConfigError:
            own = self._optimizer.state.values()
            return sum(value.nbytes for values in own for value in values.values() if isinstance(value, Tensor))

    def compared(self) -> dict[str, tuple[str, str]]:
        """The values that ranks which step its parameters must agree on, as text, and what they are in a sentence."""
        found = {}
        for owner, values in self._shared().items() if self._is_split else ():
            for key, value in values.items():
                noted = _Noted.of(value, self._names)
                if noted.tensors is not None:
                    shown = str(value) if isinstance(value, int | float) else type_in_words(value)
                    text = " ".join([noted.form or "", *map(_text, noted.tensors.values())])
                    found[f"{self._label} keeps {key!r} of {owner}"] = text, shown
        return found

    @property
    def _label(self) -> str:
        """The name of the optimizer's class, whatever function makes it."""
        return next(iter(self._rules.values())).made_as

    # ---- what it keeps of no parameter: running values of groups, and attributes

    def _known(self) -> dict[int, Any]:
        """Parameters, which `deep_copy` is to take for copied already."""
        return {id(one.parameter): one.parameter for one in self._stepped.values()}

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The optimizer's groups by number."""
        return dict(zip(self._group_numbers(), self._optimizer.param_groups, strict=True))

    def _attributes(self) -> dict[str, Any]:
        """The attributes that it has beside those of torch's base class."""
        if type(self._optimizer) in BY_ELEMENTS | BY_PARAMETERS:
            return {}
        plain = vars(torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {})).keys()
        return {key: value for key, value in vars(self._optimizer).items() if key not in plain}

    def _beside(self) -> dict[str, dict[str, Any]]:
        """By owner: the values of each group but for its parameters, and the attributes."""
        groups = {
            f"{GROUP}{number}": {key: value for key, value in group.items() if key != "params"}
            for number, group in self._groups().items()
        }
        return {**groups, self._owner: self._attributes()}

    def _shared(self) -> dict[str, dict[Any, Any]]:
        """All that it has written since it was made, by owner, without what rates set."""
        found: dict[str, dict[Any, Any]] = {}
        for owner, values in self._beside().items():
            own = {k: v for k, v in values.items() if owner == self._owner or k not in self._set}
            found[owner] = self._as_made[owner].changed(own, self._names)
        others = {k: v for k, v in self._optimizer.state.items() if id(k) not in self._names}
        if others:
            found[self._owner]["state"] = others
        return {owner: values for owner, values in found.items() if values}

    def _apart(self, values: Mapping[Any, Any], device: torch.device, whose: str) -> dict[str, Tensor]:
        try:
            return taken_apart(values, self._names, device)
        except NoForm as error:
            raise ConfigError(
                f"the optimizer {self._label} keeps {error.key!r} {whose} as {type_in_words(error.value)}, which a "
                "checkpoint cannot hold; it holds numbers, texts, tensors, and lists and dictionaries of them"
            ) from None

    def _group_numbers(self) -> list[int]:
        """The numbers of the groups of the parameters that this rank steps."""
        return sorted({one.group for one in self._stepped.values()})

    def _made(self, kind: OptimizerKind) -> torch.optim.Optimizer:
        stepped = self._stepped.values()
        groups = [
            {"params": [one.parameter for one in stepped if one.group == number], **self._rules[number].options}
            for number in self._group_numbers()
        ]
        try:
            return with_rates_of_its_own(kind.make(groups))
        except ConfigError:
            raise
        except ValueError as error:
            shapes = {name: tuple(one.place.parameter.shape) for name, one in self._stepped.items()}
            vector = next((f"{name} of shape {shape}" for name, shape in shapes.items() if len(shape) != 2), "")
            raise ConfigError(
                f"the optimizer {self._label} refuses the parameters it is given"
                f"{f', such as {vector}' if vector else ''}: {error}; optimizer.groups can give some another optimizer"
            ) from None


@dataclass(frozen=True, eq=False)
class _Stepped:
    """A parameter that an optimizer of torch steps: a view of a master, in the model's shape where it is whole."""

    group: int
    place: Place
    parameter: nn.Parameter

    @classmethod
    def of(cls, block: Block, place: Place) -> _Stepped:
        shape = place.parameter.shape if place.is_whole else (place.last - place.first,)
        parameter = in_place_of(place.parameter, place.view(block.master).view(shape))
        parameter.grad = place.view(block.gradient).view(shape)
        return cls(block.group, place, parameter)


@dataclass(frozen=True, eq=False)
class _Noted:
    """A value as it is now, to see later if it has changed."""

    #: its text, or what pickles to it where it has no form
    form: Any
    #: its tensors; None where it has no form
    tensors: Mapping[str, Tensor] | None

    @classmethod
    def of(cls, value: Any, parameters: Mapping[int, str]) -> _Noted:
        try:
            tensors, text = described({"": value}, parameters, torch.device("cpu"))
            return cls(text, tensors)
        except NoForm:
            try:
                return cls(pickle.dumps(value), None)
            except Exception:  # whatever a class of the user's own says
                return cls(object(), None)

    def is_same(self, other: _Noted) -> bool:
        if self.form != other.form or (self.tensors is None) != (other.tensors is None):
            return False
        own, theirs = self.tensors or {}, other.tensors or {}
        return own.keys() == theirs.keys() and all(torch.equal(own[path], theirs[path]) for path in own)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and those in lists and dictionaries of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(value.values())
        else:
            yield value


def _replace(values: MutableMapping[Any, Any], others: Mapping[Any, Any]) -> None:
    values.clear()
    values.update(others)


def _with_form(values: Mapping[str, Any], parameters: Mapping[int, str]) -> dict[str, Any]:
    """The values that have a form."""
    found = {}
    for key, value in values.items():
        with suppress(NoForm):
            described({key: value}, parameters, torch.device("cpu"))
            found[key] = value
    return found


def _text(tensor: Tensor) -> str:
    """A tensor's values, or of a large one its shape and their sum."""
    if tensor.numel() <= _MOST_COMPARED:
        return str(tensor.tolist())
    return f"a tensor of shape {list(tensor.shape)} and sum {tensor.to(torch.complex128).sum().item()}"


@dataclass(frozen=True, eq=False)
class AsMade:
    """Values as they were made: copies of those that have a form, and notes of all."""

    values: Mapping[str, Any]
    noted: Mapping[str, _Noted]

    @classmethod
    def of(cls, values: Mapping[str, Any], parameters: Mapping[int, str], known: dict[int, Any]) -> AsMade:
        copies = deep_copy(_with_form(values, parameters), known)
        return cls(copies, {key: _Noted.of(copies.get(key, value), parameters) for key, value in values.items()})

    def changed(self, now: Mapping[str, Any], parameters: Mapping[int, str]) -> dict[str, Any]:
        """The values that are others now than then."""
        found = {}
        for key, value in now.items():
            if callable(value) or isinstance(value, _NO_STATE):
                continue
            before = self.noted.get(key)
            if before is None or not before.is_same(_Noted.of(value, parameters)):
                found[key] = value
        return found


def needs_one_rank(label: str, what: str) -> ConfigError:
    """The error of an optimizer that does what cannot be divided among ranks."""
    return ConfigError(
        f"the optimizer {label} {what}, but several ranks step parameters here, each its own; it can train with "
        "pp = 1, tp = 1, ep = 1 and optimizer.zero = false"
    )


def steppers_for(
    rules: Sequence[GroupRule], blocks: Sequence[Block], is_split: bool
) -> list[FlatStepper | TorchStepper]:
    """The update rules of these blocks, one for each optimizer among the groups; `is_split` as in `TorchStepper`."""
    found: list[FlatStepper | TorchStepper] = []
    for index, kind in enumerate(dict.fromkeys(rule.kind for rule in rules)):
        own = {number: rule for number, rule in enumerate(rules) if rule.kind is kind}
        theirs = [block for block in blocks if block.group in own]
        if kind.stepper is not None:
            found.append(kind.stepper(theirs))
        elif any(block.places for block in theirs):
            found.append(TorchStepper(kind, own, index, theirs, is_split))
    return found


# ---- Whether parameters are stepped independently, seen in a step


_Row = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Tensors that an operation computes with, those of them that it writes, and those that it gives."""
_OF_NO_VALUE = ("_like", "new_", "lift_fresh", "empty", "zeros", "ones", "full", "scalar_tensor")
_SETS = ("copy_", "zero_", "fill_")
_READS = ("_local_scalar_dense", "is_nonzero", "equal")


class _Origins(TorchDispatchMode):
    """Follows, in a step that is taken within its context, from which parameters each tensor is computed.

    Two parameters meet where an operation has values of both, or where a value of one was read by the host and another
    is written before the one that it was read of. What compiled functions do inside is not seen.
    """

    #: the names of two parameters that meet; None if none do
    joined: tuple[str, str] | None
    #: the first byte of a parameter or a gradient, and its end -> the parameter's name, and True of the parameter
    _spans: list[tuple[int, int, str, bool]]
    #: first byte of a storage -> that storage, and the parameters from which its values were computed
    _of: dict[int, tuple[StorageWeakRef, frozenset[str]]]
    #: parameters of which the host has read a value, and that were not written since
    _read: set[str]
    #: the first bytes of the spans
    _starts: list[int]

    def __init__(self, stepped: Mapping[str, _Stepped], state: Mapping[Any, Any]) -> None:
        super().__init__()
        self.joined, self._of, self._read, self._spans = None, {}, set(), []
        for name, one in stepped.items():
            for tensor, is_value in ((one.parameter, True), (one.parameter.grad, False)):
                if tensor is not None and tensor.numel():
                    start = tensor.data_ptr()
                    self._spans.append((start, start + tensor.nbytes, name, is_value))
        self._spans.sort()
        self._starts = [span[0] for span in self._spans]
        for name, one in stepped.items():
            for tensor in _dense(state.get(one.parameter, {})):
                self._note(tensor, frozenset({name}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled functions run as they do without this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.joined is None and hasattr(func, "_schema"):
            name = func._schema.name.split("::")[-1]
            for row in _rows(func, name, args, kwargs or {}, result):
                self._follow(name, *row)
        return result

    def _follow(self, name: str, used: list[Tensor], written: list[Tensor], given: list[Tensor]) -> None:
        origins = frozenset[str]() if any(part in name for part in _OF_NO_VALUE) else self._origins(used)
        if name in _READS:
            self._read |= origins
        if name in _SETS:
            origins = self._origins(used[1:])
        for tensor in written:
            if (span := self._span(tensor)) is not None:
                origins |= {span[2]}
                if span[3]:
                    self._read.discard(span[2])
                    origins |= self._read
        for tensor in (*written, *given):
            self._note(tensor, origins)
        if len(origins) > 1:
            first, second, *_ = sorted(origins)
            self.joined = first, second

    def _origins(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        found: set[str] = set()
        for tensor in tensors:
            if (span := self._span(tensor)) is not None:
                found.add(span[2])
            elif (noted := self._of.get(tensor.untyped_storage().data_ptr())) is not None and not noted[0].expired():
                found |= noted[1]
        return frozenset(found)

    def _note(self, tensor: Tensor, origins: frozenset[str]) -> None:
        """Note from which parameters a tensor was computed; one that lies in a parameter is that parameter's."""
        if self._span(tensor) is None:
            storage = tensor.untyped_storage()
            self._of[storage.data_ptr()] = StorageWeakRef(storage), origins

    def _span(self, tensor: Tensor) -> tuple[int, int, str, bool] | None:
        """The parameter or gradient in which a tensor lies."""
        start = tensor.data_ptr()
        index = bisect_right(self._starts, start) - 1
        return self._spans[index] if index >= 0 and start < self._spans[index][1] else None


def _dense(values: Any) -> Iterator[Tensor]:
    """The plain tensors in a value, as deep as they lie."""
    if isinstance(values, Tensor) and is_traceable_wrapper_subclass(values):
        yield from _dense([getattr(values, name) for name in values.__tensor_flatten__()[0]])  # type: ignore[attr-defined]
    elif isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _dense(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str):
        for value in values:
            yield from _dense(value)


def _rows(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Iterator[_Row]:
    """Tensors of an operation; of one over lists of tensors, a row for each place in them."""
    schema = func._schema.arguments
    given = [*zip(schema, args), *((own, kwargs[own.name]) for own in schema if own.name in kwargs)]
    written = [value for own, value in given if own.alias_info is not None and own.alias_info.is_write]
    values = [value for _, value in given]
    if not name.startswith(("_foreach_", "_fused_")):
        yield list(_dense(values)), list(_dense(written)), list(_dense(result))
        return
    for place in range(len(values[0])):
        used = [value[place : place + 1] if _is_row(value, values[0]) else value for value in values]
        made = [[value[place] for value in lists if _is_row(value, values[0])] for lists in (written, [result])]
        yield list(_dense(used)), list(_dense(made[0])), list(_dense(made[1]))


def _is_row(value: Any, first: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == len(first)
