"""A layer's output for the next, where it is not the plain stream: several tensors, or one with other rows.

The plain stream's shape is that of `Boundary` in `stage.py`.

The shapes follow from the microbatch's metadata, so that receives are posted early: each tensor has as many rows as the
microbatch has tokens, sequences, or rows of one of its keys. A message's tensors travel over one channel, in order.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.schedule import Direction
from penstock.settings.declare import type_in_words

SEQUENCES = "sequences"
"""The name by which a microbatch's sequences are counted, beside the keys of the batch."""


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each of several tensors."""


class Form(enum.Enum):
    """The form in which a layer gives its tensors."""

    ONE = "a tensor"
    TUPLE = "a tuple"
    MAPPING = "a mapping"


@dataclass(frozen=True)
class MessagePart:
    """One tensor of a message."""

    #: the key of the batch that has as many rows, or "sequences"
    rows: str
    #: the shape after the first dimension
    trailing_shape: tuple[int, ...]
    dtype: torch.dtype

    def shape(self, num_rows: Mapping[str, int]) -> tuple[int, ...]:
        return (num_rows[self.rows], *self.trailing_shape)


@dataclass(frozen=True)
class Message:
    """The tensors that a layer gives the next one: a tuple by position, a mapping by the names of its parameters."""

    form: Form
    parts: tuple[MessagePart, ...]
    #: the names of a mapping's tensors
    names: tuple[str, ...] = ()

    def flat(self, value: Any) -> tuple[Tensor, ...]:
        """The tensors in order. Raises: ValueError if `value` does not have this form."""
        if self.form is Form.ONE and isinstance(value, Tensor):
            return (value,)
        if self.form is Form.TUPLE and isinstance(value, tuple | list) and len(value) == len(self.parts):
            return tuple(value)
        if self.form is Form.MAPPING and isinstance(value, Mapping) and set(value) == set(self.names):
            return tuple(value[name] for name in self.names)
        raise ValueError(f"{type_in_words(value)} instead of {self}")

    def formed(self, tensors: tuple[Tensor, ...]) -> Any:
        """The value of which `flat` gives these tensors."""
        if self.form is Form.MAPPING:
            return dict(zip(self.names, tensors, strict=True))
        return tensors[0] if self.form is Form.ONE else tensors

    def shapes(self, num_rows: Mapping[str, int], direction: Direction = Direction.FORWARD) -> Shapes:
        """Shape and dtype of each tensor, or, the other way, of the gradients of those that can have one."""
        return tuple(
            (part.shape(num_rows), part.dtype)
            for part in self.parts
            if direction is Direction.FORWARD or part.dtype.is_floating_point or part.dtype.is_complex
        )

    def check(self, tensors: tuple[Tensor, ...], num_rows: Mapping[str, int]) -> None:
        """Refuse tensors of other shapes. Raises: ValueError."""
        for tensor, (shape, dtype) in zip(tensors, self.shapes(num_rows), strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{list(tensor.shape)} of {tensor.dtype} instead of {list(shape)} of {dtype}")

    def __str__(self) -> str:
        named = zip(self.names, self.parts, strict=True) if self.names else enumerate(self.parts)
        each = ", ".join(f"{name}: a row per {part.rows}, {list(part.trailing_shape)}" for name, part in named)
        return f"{self.form.value} ({each})"
