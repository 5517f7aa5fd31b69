"""The state of a user's own layers beside what they save: attributes, and buffers made late or not persistent."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.checkpoint.manifest import ATTRIBUTE, CheckpointInfo
from penstock.engine.optimizer.form import FORM, NoForm, put_together, taken_apart
from penstock.engine.optimizer.torch_stepper import AsMade
from penstock.engine.own_layers import is_a_users, within
from penstock.parallel.tensor_slice import LocalTensor
from penstock.runtime import Stage
from penstock.settings.declare import type_in_words

_OF_TORCH = vars(nn.Module()).keys()
_PLAIN = torch.Size | torch.dtype | torch.device
_LATE = "_buffers"
"""Stands among the attributes for the buffers that were made on first use."""
_APART = "_non_persistent_buffers_set:"
"""Stands there before the name of a buffer that is not persistent."""
_MOST_APART = 2**20
"""Elements of such a buffer that is kept; larger ones are tables, of which no copy is held."""
_NOT_HELD = "has changed since the engine was made and which no checkpoint can hold"


@dataclass(frozen=True, eq=False)
class _Part:
    """A module of a user's own layer: its full name, and its buffers and attributes when the engine was made.

    `place` names what it saves: empty, or the number of this rank's part of the batch and the mark of a second copy.
    """

    name: str
    place: str
    module: nn.Module
    #: the names of its buffers, of those that were None too; and of those that were not
    buffers: frozenset[str]
    registered: frozenset[str]
    as_made: AsMade
    #: the checksums of its large buffers that are not persistent
    tables: Mapping[str, int]

    @classmethod
    def of(cls, name: str, place: str, module: nn.Module) -> _Part:
        registered = frozenset(key for key, own in module._buffers.items() if own is not None)
        as_made = AsMade.of(_kept(module, registered), {}, {})
        return cls(name, place, module, frozenset(module._buffers), registered, as_made, _tables(module))

    def changed(self) -> dict[str, Any]:
        """The attributes that have changed since the engine was made. Raises: ValueError for one that is gone."""
        gone = self.as_made.noted.keys() - vars(self.module).keys()
        if gone := sorted(key for key in gone if not key.startswith(_APART)):
            raise ValueError(
                f"{self.name} deletes its attribute {gone[0]!r}, which {_NOT_HELD}; set it to None instead"
            )
        now = _tables(self.module)
        if moved := [key for key, own in self.tables.items() if now.get(key, own) != own]:
            raise ValueError(
                f"{self.name} keeps a large buffer that is not persistent, {moved[0]!r}, which {_NOT_HELD}; register "
                "it with persistent=True"
            )
        return self.as_made.changed(_kept(self.module, self.registered), {})

    def take(self, values: Mapping[str, Any]) -> None:
        """Set these, and put back all others that have changed."""
        own, before = vars(self.module), AsMade.of(self.as_made.values, {}, {}).values
        for key in self.changed().keys() | values.keys():
            value = values.get(key, before.get(key))
            if key == _LATE:
                self._take_buffers(value)
            elif key.startswith(_APART):
                name = key.removeprefix(_APART)
                here = self.module._buffers.get(name)
                if key not in values and key not in before:
                    delattr(self.module, name)
                elif here is not None and value is not None and (here.shape, here.dtype) == (value.shape, value.dtype):
                    # Whoever else knows it goes on with the same one.
                    here.detach().copy_(value)
                else:
                    self.module.register_buffer(name, value, persistent=False)
            elif key not in values and key not in before:
                del own[key]
            elif isinstance(value, list) and type(own.get(key)) is list:
                # Whoever else knows a list or dictionary goes on with the same one.
                own[key][:] = value
            elif isinstance(value, dict) and type(own.get(key)) is dict:
                own[key].clear()
                own[key].update(value)
            else:
                own[key] = value

    def _take_buffers(self, late: Mapping[str, Tensor]) -> None:
        own = self.module._buffers
        for key in _late(self.module, self.registered).keys() - late.keys():
            own[key] = None
            if key not in self.buffers:
                del own[key]
        for key, value in late.items():
            if key in own:
                own[key] = value
            else:
                self.module.register_buffer(key, value)


class KeptByLayers:
    """The state of a user's own layers on this rank, beside parameters and the buffers that they had from the start.

    What has changed since the engine was made is saved by layer and name: numbers, texts, tensors, lists and
    dictionaries. Copies of a layer that see other parts of the batch each save their own; a layout with another number
    of them goes on with those of the first.
    """

    #: the modules of the layers
    _parts: list[_Part]
    #: this rank's device
    _device: torch.device
    #: what is loaded, until it is taken; None where nothing is
    _room: dict[str, Tensor] | None

    def __init__(self, stages: Iterable[Stage], own: set[str], number: int, device: torch.device) -> None:
        """`own`: the units that are a user's own layers; `number`: of the part of the batch that this rank sees."""
        self._device, self._room = device, None
        self._parts = [
            _Part.of(f"{name}.{path}" if path else name, f"@{number}{stage.suffix}" * (place > 0), module)
            for stage in stages
            for place in [number + len(stage.suffix)]
            for name, unit in stage.units
            if name in own
            for path, module in unit.named_modules()
        ]

    def state(self) -> dict[str, Tensor]:
        """All of it by name. Raises: ValueError naming what a checkpoint cannot hold."""
        found: dict[str, Tensor] = {}
        users: dict[Any, str] = {}
        for part in self._parts:
            for key in sorted(part.registered - part.module._non_persistent_buffers_set):
                for identity in _identities(part.module._buffers.get(key)):
                    users.setdefault(identity, f"{part.name}.{key}")
        for part in self._parts:
            changed = part.changed()
            for key, value in changed.items():
                user = f"{part.name}.{key.removeprefix(_APART)}"
                if others := [users[own] for own in _identities(value) if users.setdefault(own, user) != user]:
                    raise ValueError(
                        f"{others[0]} and {user} share a tensor, list or dictionary, which {_NOT_HELD} as one; "
                        "clear it before the engine is saved, or keep it in one place"
                    )
            try:
                tensors = taken_apart(changed, {}, self._device)
            except NoForm as error:
                raise ValueError(
                    f"{part.name} keeps {type_in_words(error.value)} in its attribute {error.key!r}, which {_NOT_HELD};"
                    " it can hold numbers, texts, tensors, lists and dictionaries of them, and buffers"
                ) from None
            found |= {f"{ATTRIBUTE}{part.place}.{part.name}.{kind}": own for kind, own in tensors.items()}
        return found

    def registered(self, state: Mapping[str, LocalTensor]) -> dict[str, LocalTensor]:
        """`state` without buffers that were made on first use."""
        late = {f"{part.name}.{key}" for part in self._parts for key in _late(part.module, part.registered)}
        return {name: own for name, own in state.items() if name.partition("@")[0] not in late}

    def expect(self, found: CheckpointInfo) -> dict[str, Tensor]:
        """Room for what the checkpoint has of it; once it is loaded there, it is to be taken."""
        records = {record.of: record for record in found.tensors.values() if record.of.startswith(ATTRIBUTE)}
        begins = tuple(f"{self._place(part, records)}.{part.name}." for part in self._parts)
        self._room = {
            name: torch.zeros(
                record.part.full_shape,
                dtype=getattr(torch, record.dtype),
                device="cpu" if name.endswith(f".{FORM}") else self._device,
            )
            for name, record in records.items()
            if name.startswith(begins)
        }
        return self._room

    def take(self) -> None:
        """Set what has been loaded. Raises: KeyError, TypeError or AttributeError for what was never saved."""
        room, self._room = self._room, None
        if room is None:
            return
        for part in self._parts:
            begin = f"{self._place(part, room)}.{part.name}."
            own = {name.removeprefix(begin): own for name, own in room.items() if name.startswith(begin)}
            part.take(put_together({kind: values.clone() for kind, values in own.items() if "." not in kind}, {}))

    def _place(self, part: _Part, names: Iterable[str]) -> str:
        """The beginning of the names that a checkpoint with these gives this rank's part."""
        own = f"{ATTRIBUTE}{part.place}"
        return own if any(name.startswith(f"{own}.") for name in names) else ATTRIBUTE


def _kept(module: nn.Module, registered: frozenset[str]) -> dict[str, Any]:
    """A module's attributes and late buffers, but for what leads to a graph, a parameter or an object of torch's."""
    found: dict[str, Any] = {_LATE: _late(module, registered)}
    apart = {key: module._buffers.get(key) for key in sorted(module._non_persistent_buffers_set)}
    small = {key: own for key, own in apart.items() if own is None or (own.numel() <= _MOST_APART and not own.is_meta)}
    found |= {f"{_APART}{key}": own for key, own in small.items() if not _is_no_state(own)}
    if is_a_users(module):
        own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        found |= {key: value for key, value in own.items() if not any(map(_is_no_state, _all_within(value)))}
    return found


def _late(module: nn.Module, registered: frozenset[str]) -> dict[str, Tensor]:
    """The persistent buffers that were made on first use."""
    apart = registered | module._non_persistent_buffers_set
    return {key: own for key, own in module._buffers.items() if own is not None and key not in apart}


def _tables(module: nn.Module) -> dict[str, int]:
    """The checksums of the large buffers that are not persistent."""
    apart = {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
    return {
        key: zlib.crc32(own.detach().resolve_conj().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for key, own in apart.items()
        if own is not None and own.numel() > _MOST_APART and own.layout == torch.strided and not own.is_meta
    }


def _is_no_state(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad or isinstance(value, nn.Parameter)
    # Of torch's objects, such as streams and groups, a generator alone draws on what was before.
    return isinstance(value, nn.Module) or not (is_a_users(value) or isinstance(value, torch.Generator | _PLAIN))


def _identities(value: Any) -> list[Any]:
    """The storages of tensors within a value, and the identities of its lists, sets and dictionaries."""
    inner = list(_all_within(value))
    found: list[Any] = [own.untyped_storage().data_ptr() for own in inner if isinstance(own, Tensor) and own.numel()]
    return found + [("of Python", id(own)) for own in inner if isinstance(own, list | dict | set)]


def _all_within(value: Any) -> Iterator[Any]:
    """The value and all those inside of it, each once."""
    left, seen = [value], dict[int, Any]()
    while left:
        own = left.pop()
        if id(own) not in seen:
            seen[id(own)] = own
            yield own
            left += () if isinstance(own, Tensor | nn.Module) else within(own)


def check_no_extra_state(stages: Iterable[Stage]) -> None:
    """Raises: ValueError if a module keeps what belongs to its state dict, but is no tensor."""
    for name, part in (
        (f"{name}{path and f'.{path}'}", part)
        for stage in stages
        for name, module in stage.units
        for path, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ):
        state = part.get_extra_state()
        size = state.numel() if isinstance(state, Tensor) else len(state) if isinstance(state, Sized) else 1
        if state is not None and size:
            raise ValueError(
                f"{name} keeps an extra state (get_extra_state of {type(part).__name__}), which checkpoints do not "
                "hold; let it keep numbers in a buffer (register_buffer), or save it beside the checkpoint and leave "
                "get_extra_state out"
            )
