"""Messages: the tensors that a layer of a user's own gives the next, and the form in which it gives them.

Nothing is known of it before the layer has run on real data, so a message says itself what it holds, and its receiver
reads that before it takes the tensors. The package's own layers give the plain stream instead, whose shape both ends
know beforehand: that of `Boundary` in `stage.py`.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.settings.declare import type_in_words

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and dtype of each of several tensors."""

HEADER_END = b"\n"

GIVEN = "a tensor, or a tuple or mapping of tensors"
"""What a layer may give the next."""


class Form(enum.Enum):
    """The form in which a layer gives its tensors."""

    ONE = "a tensor"
    TUPLE = "a tuple"
    MAPPING = "a mapping"


@dataclass(frozen=True, eq=False)
class Message:
    """The tensors that a layer gives the next one: a tuple by position, a mapping by the names of its parameters."""

    tensors: tuple[Tensor, ...]
    form: Form = Form.TUPLE
    #: the names of a mapping's tensors
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: Any) -> "Message":
        """The message that a layer's output is. Raises: ValueError if it is none, in words that follow "gave"."""
        if isinstance(value, Tensor):
            found = cls((value,), Form.ONE)
        elif isinstance(value, tuple):
            found = cls(value)
        elif isinstance(value, Mapping):
            found = cls(tuple(value.values()), Form.MAPPING, tuple(value))
        else:
            raise ValueError("None" if value is None else type_in_words(value))
        if not found.tensors:
            raise ValueError(f"an empty {type(value).__name__}")
        for place, tensor in zip(found.names or range(len(found.tensors)), found.tensors, strict=True):
            if not isinstance(tensor, Tensor):
                wrong = "None" if tensor is None else type_in_words(tensor)
                raise ValueError(f"{found.form.value} with {wrong} at {place!r}")
            if tensor.layout is not torch.strided or tensor.is_nested:
                raise ValueError(f"a tensor that is not dense, of layout {tensor.layout}")
            if tensor.is_meta or hasattr(tensor, "fake_mode"):
                raise ValueError("a tensor without data")
            if not isinstance(place, int | str):
                raise ValueError(f"a mapping with {place!r} as a name")
        return found

    @property
    def value(self) -> Any:
        """The output of which `of` makes this message."""
        if self.form is Form.MAPPING:
            return dict(zip(self.names, self.tensors, strict=True))
        return self.tensors[0] if self.form is Form.ONE else self.tensors

    def of_tensors(self, tensors: tuple[Tensor, ...]) -> "Message":
        """Other tensors in this form."""
        return replace(self, tensors=tensors)

    def header(self) -> bytes:
        """The form, and shape and dtype of each tensor, as `read_header` reads them."""
        parts = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in self.tensors]
        return json.dumps([self.form.name, self.names, parts]).encode() + HEADER_END


def read_header(header: bytearray) -> tuple[Message, Shapes]:
    """The message that has this header, without its tensors, and their shapes and dtypes; more may follow its end."""
    form, names, parts = json.loads(header[: header.index(HEADER_END)])
    shapes = tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in parts)
    return Message((), Form[form], tuple(names)), shapes
