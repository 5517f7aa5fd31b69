"""Messages: the tensors that one stage gives another, and their header, which says what they are.

The package's own layers give the residual stream, one tensor whose header both ends know beforehand. A user's own
layers give what they like, known only once they have run on real data: there the header goes ahead of the tensors.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.settings.declare import type_in_words

HEADER_END = b"\n"

GIVEN = "a tensor, or a tuple or mapping of tensors"
"""What a layer may give the next."""


class Form(enum.Enum):
    """The form in which a layer gives its tensors."""

    ONE = "a tensor"
    TUPLE = "a tuple"
    MAPPING = "a mapping"


@dataclass(frozen=True)
class Header:
    """The contents of a message, as its receiver has to know them."""

    #: shape and dtype of each tensor
    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    form: Form = Form.ONE
    #: the names of a mapping's tensors
    names: tuple[str, ...] = ()

    @classmethod
    def of_tensor(cls, shape: Sequence[int], dtype: torch.dtype) -> "Header":
        """The header of a message of one tensor."""
        return cls(((tuple(shape), dtype),))

    def packed(self) -> bytes:
        """The header as `unpacked` reads it."""
        parts = [(shape, str(dtype).removeprefix("torch.")) for shape, dtype in self.parts]
        return json.dumps([parts, self.form.name, self.names]).encode() + HEADER_END

    @classmethod
    def unpacked(cls, memory: bytearray) -> "Header":
        """The header at the beginning of this memory."""
        parts, form, names = json.loads(memory[: memory.index(HEADER_END)])
        return cls(tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in parts), Form[form], tuple(names))

    def __str__(self) -> str:
        return ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in self.parts) or "nothing"


@dataclass(frozen=True, eq=False)
class Message:
    """The tensors that a layer gives the next one: a tuple by position, a mapping by the names of its parameters."""

    tensors: tuple[Tensor, ...]
    form: Form = Form.ONE
    #: the names of a mapping's tensors
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Any) -> "Message":
        """The message that a layer's output is. Raises: ValueError if it is none, in words that follow "gave"."""
        if isinstance(value, Tensor):
            message = cls((value,))
        elif isinstance(value, tuple):
            message = cls(value, Form.TUPLE)
        elif isinstance(value, Mapping):
            message = cls(tuple(value.values()), Form.MAPPING, tuple(value))
        else:
            raise ValueError("None" if value is None else type_in_words(value))
        if not message.tensors:
            raise ValueError(f"an empty {type(value).__name__}")
        for place, tensor in zip(message.names or range(len(message.tensors)), message.tensors, strict=True):
            if not isinstance(tensor, Tensor):
                wrong = "None" if tensor is None else type_in_words(tensor)
                raise ValueError(f"{message.form.value} with {wrong} at {place!r}")
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise ValueError(f"a tensor that is not dense, of layout {tensor.layout}")
            if tensor.is_meta or hasattr(tensor, "fake_mode"):
                raise ValueError("a tensor without data")
            if not isinstance(place, int | str):
                raise ValueError(f"a mapping with {place!r} as a name")
        return message

    @property
    def value(self) -> Any:
        """The output of which `of` makes this message."""
        if self.form is Form.MAPPING:
            return dict(zip(self.names, self.tensors, strict=True))
        return self.tensors[0] if self.form is Form.ONE else self.tensors

    @property
    def header(self) -> Header:
        """Form, shapes and dtypes."""
        return Header(tuple((tuple(x.shape), x.dtype) for x in self.tensors), self.form, self.names)

    def of_tensors(self, tensors: tuple[Tensor, ...]) -> "Message":
        """Other tensors in this form."""
        return Message(tensors, self.form, self.names)


@dataclass(frozen=True)
class Boundary:
    """The way between two stages: of the residual stream [T, D] in one dtype, or where it is open of any `Message`."""

    hidden_size: int
    dtype: torch.dtype
    #: under sequence parallelism, the ranks among which the rows of a microbatch are divided
    num_sharing: int = 1
    #: True where a user's own layers give anything that a `Message` can hold, and only the rows of a single tensor have
    #: this width
    is_open: bool = False

    def shape(self, num_tokens: int) -> tuple[int, int]:
        """The shape that a rank sends: ceil(T / num_sharing) rows."""
        return (-(-num_tokens // self.num_sharing), self.hidden_size)

    def header(self, num_tokens: int) -> Header | None:
        """The header of a microbatch's message, either way; None where the boundary is open, and it goes ahead."""
        return None if self.is_open else Header.of_tensor(self.shape(num_tokens), self.dtype)
