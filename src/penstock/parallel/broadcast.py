"""A value of one rank for all: numbers, texts, tensors, and lists and mappings of them; nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TENSOR = "\0tensor"


def check_portable(value: Any) -> None:
    """Refuse what can not travel to other ranks.

    Raises: `TypeError` naming the type, and what would be possible.
    """
    _packed(value, [])


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """Give every rank of the group what rank `source` of the group has; elsewhere `value` is not looked at.

    Tensors travel as they are, through host memory, and arrive there; tuples arrive as lists. `group` carries host
    memory (gloo); None stands for a rank that is alone.

    Raises: `TypeError` on the source, before anything is sent, for what can not travel: call `check_portable` first.
    """
    if group is None:
        return value
    tensors: list[Tensor] = []
    is_source = group.rank() == source
    text = json.dumps(_packed(value, tensors)).encode() if is_source else b""
    length = torch.tensor([len(text)])
    dist.broadcast(length, group=group, group_src=source)
    told = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if is_source
        else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(told, group=group, group_src=source)
    structure = json.loads(told.numpy().tobytes())
    if not is_source:
        tensors.extend(_empty(*described) for described in _described(structure))
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=source)
    return value if is_source else _unpacked(structure, iter(tensors))


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON can hold it, with a description in place of each tensor, which is appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) and name != _TENSOR for name in value):
            raise TypeError(f"the names of a mapping that goes to other ranks are texts, not {list(value)}")
        return {name: _packed(inner, tensors) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_packed(inner, tensors) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__} can not go to other ranks; possible are numbers, texts, tensors, None, "
        "and lists and mappings of them"
    )


def _described(structure: Any) -> list[tuple[str, list[int]]]:
    """The description of each tensor, in the order in which they were packed."""
    if isinstance(structure, dict):
        if _TENSOR in structure:
            return [structure[_TENSOR]]
        return [described for inner in structure.values() for described in _described(inner)]
    return [d for inner in structure for d in _described(inner)] if isinstance(structure, list) else []


def _empty(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _unpacked(structure: Any, tensors: Any) -> Any:
    if isinstance(structure, dict):
        if _TENSOR in structure:
            return next(tensors)
        return {name: _unpacked(inner, tensors) for name, inner in structure.items()}
    return [_unpacked(inner, tensors) for inner in structure] if isinstance(structure, list) else structure
