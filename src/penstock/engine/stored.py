"""How tensors that ranks hold in parts lie in a checkpoint, and how any rank reads from it what it holds itself.

What a rank holds of a tensor is stored as it is: a whole tensor under its name, a part under the name and its place,
``layers.0.attention.q.weight[0:64,0:128]``. Whoever reads takes from every stored part what it has in common with its
own, straight from the file: so any layout reads what any other has saved, and in memory there is never more than what
is held and one stored part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from penstock.engine.manifest import TENSOR_SUFFIX, CheckpointInfo, TensorRecord, Whole
from penstock.parallel.parts import Box, Held, Part, parts_of


def to_store(tensors: Mapping[str, Held]) -> dict[str, tuple[Tensor, TensorRecord]]:
    """What a rank stores, by the name it is stored under."""
    found: dict[str, tuple[Tensor, TensorRecord]] = {}
    for name, held in tensors.items():
        for part in parts_of(held):
            tensor, dtype = part.tensor, str(part.tensor.dtype).removeprefix("torch.")
            if part.box == Box.whole(part.full_shape):
                found[name] = tensor, TensorRecord(part.full_shape, dtype)
            else:
                whole = Whole(name, part.box.start, part.full_shape)
                found[f"{name}{part.box}"] = tensor, TensorRecord(part.box.shape, dtype, whole)
    return found


def check_cover(records: Mapping[str, TensorRecord]) -> None:
    """Refuse parts that do not make up their wholes. Raises: ValueError naming one."""
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, record in records.items():
        whole = record.whole or Whole(name, (), record.shape)
        key = whole.name, whole.shape
        counts[key] = counts.get(key, 0) + math.prod(record.shape)
    for (name, shape), count in counts.items():
        if count != math.prod(shape):
            raise ValueError(f"the ranks hold {count} elements of {name}, which has {math.prod(shape)}, {list(shape)}")


@dataclass(frozen=True, eq=False)
class Copying:
    """A stretch of a stored tensor and where it goes."""

    stored: str
    source: tuple[slice, ...]
    target: Tensor


class Stored:
    """The tensors of one checkpoint, whole or in parts."""

    def __init__(self, info: CheckpointInfo) -> None:
        self._info = info
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[tuple[str, Box]]] = {}
        for name, record in info.tensors.items():
            whole = record.whole or Whole(name, (0,) * len(record.shape), record.shape)
            self._shapes[whole.name] = whole.shape
            self._parts.setdefault(whole.name, []).append((name, Box(whole.start, record.shape)))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._shapes[name]

    def copies(self, name: str, held: Held) -> Iterator[Copying]:
        """What must be copied so that `held` has the stored values.

        Raises: ValueError when some of them are not stored.
        """
        for part in parts_of(held):
            found = list(self._copies_to(name, part))
            count = sum(copying.target.numel() for copying in found)
            if count != part.tensor.numel():
                wanted = f"{part.tensor.numel()} elements of {name}{part.box}"
                raise ValueError(f"checkpoint {self._info.path} holds {count} of the {wanted}")
            yield from found

    def _copies_to(self, name: str, part: Part) -> Iterator[Copying]:
        for stored, box in self._parts[name]:
            common = box.common(part.box)
            if common is not None:
                yield Copying(stored, common.within(box), part.tensor[common.within(part.box)])

    def read(self, copies: Sequence[Copying]) -> None:
        """Copy, file by file and one stretch at a time."""
        by_name: dict[str, list[Copying]] = {}
        for copying in copies:
            by_name.setdefault(copying.stored, []).append(copying)
        for path in sorted(self._info.path.glob(f"*{TENSOR_SUFFIX}")):
            _read_file(path, by_name)


def _read_file(path: Path, by_name: Mapping[str, Sequence[Copying]]) -> None:
    with safe_open(path, framework="pt") as file:
        for name in sorted(by_name.keys() & file.keys()):
            for copying in by_name[name]:
                copying.target.copy_(take(file, name, copying.source))


def take(file: Any, name: str, indices: tuple[slice, ...]) -> Tensor:
    """A stretch of a tensor of an open file; only it is read."""
    return file.get_slice(name)[indices] if indices else file.get_tensor(name)
