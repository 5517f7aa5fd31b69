"""Nested values as a JSON structure and tensors: how state and results travel between ranks, and lie in checkpoints."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.settings.declare import type_in_words

# Keys of objects in the structure that stand for what JSON does not have.
_TENSOR, _TUPLE, _MAPPING = "tensor of", "tuple of", "mapping of"
_MARKS = {_TENSOR, _TUPLE, _MAPPING}
_PLAIN = (bool, int, float, str)
_POSSIBLE = "possible are numbers, strings, tensors, None, and lists, tuples and mappings of them"

TensorForm = tuple[str, list[int]]
"""A tensor's dtype and shape."""


def pack(value: Any) -> tuple[Any, list[Tensor]]:
    """Take a nested value apart: numbers, strings, None, dense tensors, and lists, tuples and mappings of them.

    Subclasses of lists, tuples and mappings become plain ones.

    Returns a JSON value in which the dtype and shape of each tensor stand in its place, and the tensors in that order.

    Raises: TypeError naming a type that is none of these.

    >>> pack({"num_calls": 3, "mean": torch.zeros(2)})
    ({'num_calls': 3, 'mean': {'tensor of': ['float32', [2]]}}, [tensor([0., 0.])])
    """
    tensors: list[Tensor] = []
    return _packed(value, tensors), tensors


def unpack(structure: Any, tensors: Iterable[Tensor]) -> Any:
    """Put together the value that `pack` has taken apart.

    >>> unpack(*pack([1, (None, 2.5), {7: "seven"}]))
    [1, (None, 2.5), {7: 'seven'}]
    """
    return _unpacked(structure, iter(tensors))


def tensor_forms(structure: Any) -> list[TensorForm]:
    """The dtypes and shapes of a structure's tensors, in their order."""
    if isinstance(structure, dict):
        if _TENSOR in structure:
            return [structure[_TENSOR]]
        structure = list(structure.values())
    return [form for inner in structure for form in tensor_forms(inner)] if isinstance(structure, list) else []


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(f"a tensor of layout {value.layout} cannot be saved or sent; possible are dense ones")
        tensors.append(value.detach())
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in _MARKS for key in value):
            return {key: _packed(inner, tensors) for key, inner in value.items()}
        if wrong := [key for key in value if not (key is None or isinstance(key, _PLAIN))]:
            raise TypeError(f"a mapping with {type_in_words(wrong[0])} as a key cannot be saved or sent; {_POSSIBLE}")
        return {_MAPPING: [[key, _packed(inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        items = [_packed(inner, tensors) for inner in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, _PLAIN):
        return value
    raise TypeError(f"{type_in_words(value)} cannot be saved or sent; {_POSSIBLE}")


def _unpacked(structure: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(structure, list):
        return [_unpacked(inner, tensors) for inner in structure]
    if not isinstance(structure, dict):
        return structure
    if _TENSOR in structure:
        return next(tensors)
    if _TUPLE in structure:
        return tuple([_unpacked(inner, tensors) for inner in structure[_TUPLE]])
    if _MAPPING in structure:
        return {key: _unpacked(inner, tensors) for key, inner in structure[_MAPPING]}
    return {key: _unpacked(inner, tensors) for key, inner in structure.items()}
