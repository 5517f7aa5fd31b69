"""A user's own layers: as units, what they ask for of a microbatch by name, and what they give each other."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from penstock.data import PackedBatch
from penstock.engine.build import autocast_of, dtype_under, keep_linears_eager
from penstock.model import (
    BoundLayer,
    Given,
    Limits,
    Parameters,
    Randomness,
    Sequences,
    UnitSpec,
    switch_linears,
    switch_sequentials,
)
from penstock.runtime import Boundary, Message, Stage, UnitCall
from penstock.runtime.message import SEQUENCES, Form, MessagePart
from penstock.settings import Precision, checked
from penstock.settings.declare import type_in_words

# ---- The layers as units


_COPY_OF = "_penstock_copy_of"


@checked
def units_of_layers(layers: Sequence[nn.Module | partial[Any]]) -> tuple[UnitSpec, ...]:
    """A user's own layers as units (see `Engine.from_layers`); their linear layers can defer weight gradients.

    Raises: ValueError, as there.
    """
    if not len(layers):
        raise ValueError("a model needs at least one layer")
    modules: list[nn.Module] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, partial) and isinstance(layer.func, nn.Module):
            layer = BoundLayer(layer)
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layer {number} is {type_in_words(layer)}; layers are torch.nn.Modules")
        switch_linears(layer)
        switch_sequentials(layer)
        # A user has compiled it, or a part of it.
        if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in layer.modules()):
            keep_linears_eager(layer)
        modules.append(layer)
    units, tied = [], _tied(modules)
    for number, layer in enumerate(modules):
        num_parameters = sum(p.numel() for p in layer.parameters())
        # A lookup costs next to nothing; anything else multiplies by each of its weights once.
        num_looked_up = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Embedding))
        flops_per_token = 2.0 * (num_parameters - num_looked_up) + 1.0
        limits = None
        if isinstance(layer, nn.Embedding):
            limits = Limits(layer.num_embeddings, sys.maxsize, bounds_labels=False, reads_positions=False)
        units.append(
            UnitSpec(
                f"layers.{number}",
                lambda made=layer: made,
                lambda module, seed: None,
                num_parameters,
                flops_per_token,
                is_own=True,
                limits=limits,
                tied=tied[number],
            )
        )
    return tuple(units)


def _tied(modules: list[nn.Module]) -> list[dict[str, str]]:
    """For each layer, the parameters that earlier layers hold too -> their full names there; it gets copies of them.

    On another rank such a copy begins with the owner's values, and the gradients of both are summed; beside its owner
    it uses the owner's storage.
    """
    owners: dict[nn.Parameter, str] = {}
    found: list[dict[str, str]] = []
    for i, module in enumerate(modules):
        # A copy that an engine made before knows what it is a copy of.
        named = {name: getattr(own, _COPY_OF, own) for name, own in module.named_parameters()}
        shared = {name: owners[own] for name, own in named.items() if own in owners}
        if shared and any(module is earlier for earlier in modules[:i]):
            if next(module.buffers(), None) is not None:
                raise ValueError(f"layer {i} is layer {modules.index(module)} again, with buffers; give two modules")
            modules[i] = module = copy.deepcopy(module)
        for name in shared:
            if not hasattr(module.get_parameter(name), _COPY_OF):
                copied = nn.Parameter(named[name].detach().clone(), named[name].requires_grad)
                setattr(copied, _COPY_OF, named[name])
                place, _, own = name.rpartition(".")
                setattr(module.get_submodule(place), own, copied)
        owners |= {own: f"layers.{i}.{name}" for name, own in named.items() if name not in shared}
        found.append(shared)
    return found


# ---- What they ask for by name


@dataclass(eq=False)
class OwnLayers:
    """This rank's layers that are called by the names of their parameters: what they ask for, and what they give."""

    #: all units of the model, in order
    _units: Sequence[UnitSpec]
    #: stage -> its units, as positions in `_units`; those of a second copy are not listed
    _cut: Sequence[range]
    #: the stages of this rank by number
    _stages: Mapping[int, Stage]
    #: precision of the layers' forwards
    _precision: Precision
    #: the device of the batch's keys
    _device: torch.device
    #: the keys of the last batch
    _keys: _KeyShapes | None = None
    #: the keys for which no layer lacked anything, and true if this rank had metadata alone
    _checked: tuple[frozenset[str], bool] | None = None
    #: True if some layer of the model gives more than the plain stream
    _has_messages: bool = False
    #: the number of classes of the last layer's logits; None if that is not known without data
    num_classes: int | None = None

    @cached_property
    def calls(self) -> list[UnitCall]:
        """The layers as their stages call them."""
        return [call for stage in self._stages.values() for call in stage.calls]

    @cached_property
    def _wanted(self) -> frozenset[str]:
        return frozenset[str]().union(*(call.parameters.keys for call in self.calls))

    @property
    def are_plain(self) -> bool:
        """True if all take and give the plain stream with its sequences, and ask for no more."""
        ask = self._wanted or any(call.parameters.required for call in self.calls)
        return not ask and not all(unit.is_own for unit in self._units)

    def given(self, own: PackedBatch, randomness: Randomness | None) -> Given:
        """All that this rank's units ask for of their microbatch by name, of which `own` is this rank's part."""
        num_rows: dict[str, int] = {}
        if self._has_messages:
            num_rows = {SEQUENCES: len(own.sequence_lengths("tokens"))}
            num_rows |= {key: sum(own.item_lengths(key)) for key in own.keys}
        wanted = sorted(self._wanted.intersection(own.keys))
        return Given({key: own[key].to(self._device) for key in wanted}, randomness, num_rows)

    def prepare_for(self, batch: PackedBatch) -> None:
        """Find out what the layers give each other for batches with these keys.

        Raises:
            ValueError: a layer of this rank needs more, or gives what cannot go on; names the layer.
        """
        alike = {batch.lengths["tokens"]: "tokens"}
        shapes = tuple(
            (key, batch.dtypes[key], batch.trailing_shapes[key], alike.setdefault(batch.lengths[key], key))
            for key in batch.keys
        )
        if all(unit.is_own for unit in self._units) and shapes != self._keys:
            layers = [(unit.name, unit.build()) for unit in self._units]
            boundary = next(iter(self._stages.values())).boundary
            autocast = autocast_of(self._precision, torch.device("cpu"))
            found, self.num_classes = find_messages(layers, shapes, boundary, autocast(), self._precision)
            self._keys, self._has_messages = shapes, any(message is not None for message, _ in found)
            for number, stage in self._stages.items():
                members = self._cut[number % len(self._cut)]
                for call, member in zip(stage.calls, members, strict=True):
                    call.takes = found[member - 1][0] if member else None
                    if member < len(found):
                        call.gives, call.not_found = found[member]
                stage.takes, stage.gives = stage.calls[0].takes, stage.calls[-1].gives
            self._checked = None
        if (given := (frozenset(batch.keys), batch.data is None)) == self._checked:
            return
        for call in self.calls:
            if missing := call.missing(batch.keys):
                raise ValueError(
                    f"{call.name} takes {missing[0]!r}, which has no default and is no key of the batch; its keys are "
                    f"{sorted(batch.keys)}"
                )
            if (beyond := call.parameters.unreachable(batch.keys)) is not None:
                raise ValueError(
                    f"{call.name} hands on arguments by position alone, so {beyond[0]!r} needs {beyond[1]!r} before "
                    "it, which is no key of the batch; let its forward take **kwargs, too"
                )
            if batch.data is None and (keys := sorted(call.parameters.keys.intersection(batch.keys))):
                raise ValueError(f"{call.name} takes the key {keys[0]!r}, but this rank was given metadata alone")
        self._checked = given


# ---- The tensors that a user's own layers give each other, found by running the layers once without data


_PRIMES = ((19, 23, 29, 31, 37, 41, 43, 47, 53, 59), (61, 67, 71, 73, 79, 83, 89, 97, 101, 103))
_LENGTHS = ((5, 2, 4, 6), (3, 7, 2, 4, 11))
"""Tokens of each sequence of the two microbatches."""


_KeyShapes = tuple[tuple[str, torch.dtype, tuple[int, ...], str], ...]
"""A batch's keys with dtype, shape after the first dimension, and the first key that has as many rows in each item."""


_Found = tuple[Message | None, str]
"""A layer's output, None for the plain stream; and why nothing could be found: the plain stream is expected then."""


def find_messages(
    layers: Sequence[tuple[str, nn.Module]],
    keys: _KeyShapes,
    boundary: Boundary,
    autocast: AbstractContextManager[Any],
    precision: Precision,
) -> tuple[list[_Found], int | None]:
    """Find what each layer but the last gives, and the width of the rows that the last one gives.

    That is None unless it has a row for each token, as logits have.

    Raises:
        ValueError: a layer gives what cannot go on, such as a tensor of another width; names the layer.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        _quiet("torch._subclasses.fake_tensor"),
    ):
        runs = [_FakeRun(keys, number, boundary.hidden_size, boundary.dtype, precision) for number in range(2)]
        with autocast:
            found, run = [_found(name, module, runs) for name, module in layers[:-1]], runs[0]
            try:
                run.call(layers[-1][1])
            except Exception:  # as in `_found`
                return found, None
    value = run.value
    is_table = isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == run.num_rows["tokens"]
    return found, value.shape[1] if is_table else None


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Log nothing there: a layer that cannot run without data is no error, and one that cannot run at all raises."""
    log = logging.getLogger(logger)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _FakeRun:
    """One made-up microbatch on its way through the layers."""

    #: the number of rows of each key, and of sequences
    num_rows: dict[str, int]
    #: the batch's keys, without data
    keys: dict[str, Tensor]
    #: the boundaries of the texts
    sequences: Sequences
    #: width and dtype of the plain stream
    hidden_size: int
    dtype: torch.dtype
    #: to which parameters and buffers in fp32 are cast
    precision: Precision
    #: what the last layer gave
    value: Any

    def __init__(
        self, keys: _KeyShapes, number: int, hidden_size: int, dtype: torch.dtype, precision: Precision
    ) -> None:
        lengths = _LENGTHS[number]
        groups = sorted({group for *_, group in keys} - {"tokens"})
        others = dict(zip(groups, _PRIMES[number], strict=False))
        self.num_rows = {"tokens": sum(lengths), SEQUENCES: len(lengths), **others}
        self.keys = {
            key: torch.zeros((self.num_rows[group], *trailing), dtype=dtype) for key, dtype, trailing, group in keys
        }
        self.sequences = Sequences.from_lengths(lengths)
        self.hidden_size, self.dtype, self.precision = hidden_size, dtype, precision
        self.value = self.keys["tokens"]

    def call(self, module: nn.Module) -> None:
        parameters = Parameters.of(module)
        args, kwargs = parameters.arguments(self.value, self.sequences, self.keys)
        every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        own = {
            name: torch.empty(tensor.shape, dtype=dtype_under(self.precision, tensor.dtype)) for name, tensor in every
        }
        self.value = functional_call(module, own, tuple(args), kwargs, tie_weights=False)


def _found(name: str, module: nn.Module, runs: Sequence[_FakeRun]) -> _Found:
    declared = getattr(module, "gives", None)
    try:
        for run in runs:
            run.call(module)
    except Exception as error:  # a layer may need data, or do anything that fake tensors do not allow
        message = declared if isinstance(declared, Message) else None
        for run in runs:
            # Go on as if the layer had given this.
            run.value = torch.zeros(run.num_rows["tokens"], run.hidden_size, dtype=run.dtype)
            if message is not None:
                parts = (torch.zeros(part.shape(run.num_rows), dtype=part.dtype) for part in message.parts)
                run.value = message.formed(tuple(parts))
        return message, " ".join(str(error).split())[:200]
    message = declared if isinstance(declared, Message) else _message(name, runs)
    plain = Message(Form.ONE, (MessagePart("tokens", (runs[0].hidden_size,), runs[0].dtype),))
    return None if message == plain else message, ""


def _message(name: str, runs: Sequence[_FakeRun]) -> Message:
    values = [run.value for run in runs]
    first = values[0]
    if isinstance(first, Tensor):
        form, names, tensors = Form.ONE, (), [(value,) for value in values]
    elif isinstance(first, tuple) and all(isinstance(tensor, Tensor) for tensor in first):
        form, names, tensors = Form.TUPLE, (), values
    elif isinstance(first, Mapping) and all(isinstance(tensor, Tensor) for tensor in first.values()):
        form, names, tensors = Form.MAPPING, tuple(first), [tuple(value.values()) for value in values]
    else:
        raise ValueError(f"{name} gives {type_in_words(first)}; layers give a tensor, or a tuple or mapping of tensors")
    parts = tuple(_part(name, pair, runs) for pair in zip(*tensors, strict=True))
    width = runs[0].hidden_size
    if form is Form.ONE and parts[0].trailing_shape != (width,):
        raise ValueError(
            f"{name} gives rows of {list(parts[0].trailing_shape)}; from layer to layer go rows of [{width}], the "
            "hidden size"
        )
    return Message(form, parts, names)


def _part(name: str, tensors: tuple[Tensor, ...], runs: Sequence[_FakeRun]) -> MessagePart:
    """The tensor's rows, by the counts that both microbatches share."""
    small, large = tensors
    if small.dim() and small.shape[1:] == large.shape[1:] and small.dtype == large.dtype:
        for rows, count in runs[0].num_rows.items():
            if (small.shape[0], large.shape[0]) == (count, runs[1].num_rows[rows]):
                return MessagePart(rows, tuple(small.shape[1:]), small.dtype)
    counts = ", ".join(f"{count} {rows}" for rows, count in runs[0].num_rows.items())
    raise ValueError(
        f"{name} gives {list(small.shape)} for a microbatch of {counts}; a tensor that goes on has a row for each of "
        "these, and otherwise the same shape for any microbatch"
    )
