"""Messages: the tensors that a layer of a user's own gives the next, and the form in which it gives them.

Nothing is known of it before the layer has run on real data, so a message says itself what it holds, and its receiver
reads that before it takes the tensors. The package's own layers give the plain stream instead, whose shape both ends
know beforehand: that of `Boundary` in `stage.py`.
"""

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta  # pyright: ignore[reportMissingImports]

from penstock.runtime.errors import PipelineError
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
    #: the places of those that the next layer may not change in place: somebody else has their memory
    kept: tuple[int, ...] = ()

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
        """The same form of other tensors."""
        return replace(self, tensors=tensors)

    def header(self) -> bytes:
        """The form, what is kept, and shape and dtype of each tensor, as `read_header` reads them."""
        parts = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in self.tensors]
        return json.dumps([self.form.name, self.names, self.kept, parts]).encode() + HEADER_END


def read_header(header: bytearray) -> tuple[Message, Shapes]:
    """The message that has this header, without its tensors, and their shapes and dtypes; more may follow its end."""
    form, names, kept, parts = json.loads(header[: header.index(HEADER_END)])
    shapes = tuple((tuple(shape), getattr(torch, dtype)) for shape, dtype in parts)
    return Message((), Form[form], tuple(names), tuple(kept)), shapes


# ---- Memory that passes from stage to stage, which the next may change in place where nobody else has it


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """The number of a tensor's memory, and how many tensors have it, in Python and among what autograd has saved."""
    memory = tensor.untyped_storage()
    # One more is the handle.
    return memory._cdata, torch._C._storage_Use_Count(memory._cdata) - 1


def expected_memory(x: Tensor | Message, with_leaves: bool) -> dict[int, float]:
    """By memory of a stage's inputs how many tensors have it once they are entered: none where it is not the stage's.

    Rows of floating point that enter the first stage are its own; token ids are all layers'.
    """
    tensors, kept = (
        (x.tensors, x.kept)
        if isinstance(x, Message)
        else ((x,), () if (x.is_floating_point() or x.is_complex()) else (0,))
    )
    found: dict[int, float] = {}
    for place, tensor in enumerate(tensors):
        memory, num = memory_of(tensor)
        found[memory] = (
            -math.inf if place in kept else num + (with_leaves and (tensor.is_floating_point() or tensor.is_complex()))
        )
    return found


def not_its_alone(layer: str) -> PipelineError:
    """The error of a layer that has changed in place an input that somebody else needs."""
    return PipelineError(
        f"{layer} changes in place what it is given, which is not its alone: a layer before it needs it for its "
        "backward, keeps it, or gave a view that no layer may change; let it work on a copy, such as x.clone()"
    )


def refuses_change(output: Tensor) -> bool:
    """True where torch itself lets nobody change the tensor in place; what it says of a copy is not known."""
    if torch._debug_has_internal_overlap(output) == 1:  # pyright: ignore[reportPrivateImportUsage]
        return True
    if not output.requires_grad:
        return False
    return output.is_leaf or (output._is_view() and _get_creation_meta(output) != CreationMeta.DEFAULT)
