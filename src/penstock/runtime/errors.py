"""The errors that a rank raises because of other ranks, or of the way to them."""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.settings.declare import words_of

T = TypeVar("T")


class PipelineError(RuntimeError):
    """Ranks of one pipeline disagree, or a rank cannot go on; the message names ranks, actions and what is awaited.

    >>> issubclass(TransportError, PipelineError), issubclass(StepError, PipelineError)
    (True, True)
    """

    is_of_other_rank = False
    """True where another rank has failed, whose own exception says more."""


class TransportError(PipelineError):
    """A message was not sent or did not arrive; the message names the link, the action and the time waited.

    >>> raise TransportError("activations from rank 0 to rank 1 did not arrive")
    Traceback (most recent call last):
    penstock.runtime.errors.TransportError: activations from rank 0 to rank 1 did not arrive
    """

    is_of_other_rank = True


class StepError(PipelineError):
    """A rank failed in a step, which has been undone on all ranks; the message names rank, action and what it raised.

    On the rank that failed, `__cause__` is its own exception.

    >>> raise StepError("rank 1 failed in 1F0, step 3: OSError: no such file")
    Traceback (most recent call last):
    penstock.runtime.errors.StepError: rank 1 failed in 1F0, step 3: OSError: no such file
    """


class CallbackError(PipelineError):
    """A callback raised on some rank, after a step, evaluation or checkpoint that stays as it is.

    The message names rank, event and what was raised. On that rank `__cause__` is its own exception.

    >>> raise CallbackError("rank 1 failed in on_step, step 3: OSError: no space left")
    Traceback (most recent call last):
    penstock.runtime.errors.CallbackError: rank 1 failed in on_step, step 3: OSError: no space left
    """


class Deadlock(PipelineError):
    """No rank of an in-process run can go on; the message says for each rank what it waits for."""


_LAYER = "in the layer "


# How Python, torch and einops say that a tensor has fewer dimensions than a layer takes, or more rows.
_DIMENSIONS = re.compile(
    r"values to unpack|imension out of range|tuple index out of range|too many indices|index out of range in self"
    r"|number of (dimensions|subscripts)|is invalid for input of size|xpected .*\b\d+(-?D\b| dims| channels)|D tensor"
    r"|must match the (existing )?size"
)


def shape_given(error: Exception, value: Any) -> str:
    """The shape of what a layer was given, as the end of its error's sentence; "" where that is not the reason."""
    if not isinstance(value, Tensor) or not _DIMENSIONS.search(words_of(error)):
        return ""
    return (
        f"; it was given {list(value.shape)}, all tokens of a microbatch end to end, and no [B, T]: see "
        "docs/tutorials/from_a_training_loop.md"
    )


def note_layer(error: BaseException, layer: str) -> None:
    """Note in which layer an error was raised. Raises: RuntimeError for what Python takes for a generator's end."""
    if isinstance(error, StopIteration):
        raise RuntimeError(f"{layer}: StopIteration, as next() raises it at the end of an iterator") from error
    error.add_note(_LAYER + layer)


def layer_notes(error: BaseException) -> list[str]:
    """The notes that say in which layer an error was raised."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith(_LAYER)]


def first_line(error: BaseException) -> str:
    """The useful part of a backend's error: its first line, without the place in its source and general advice."""
    text = words_of(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    line = line.split("] ", 1)[-1] if line.startswith("[") else line
    return line.partition(". This is typically caused by ")[0]


def is_of_link(error: BaseException | None) -> bool:
    """True for what a backend raises when a peer or a link is gone, which says nothing of the reason.

    gloo has no exception class of its own.
    """
    if isinstance(error, TransportError | dist.DistError):
        return True
    names = ("gloo", "pair closure", "NCCL")
    return isinstance(error, RuntimeError) and any(name in words_of(error) for name in names)


def is_of_device(error: BaseException | None) -> bool:
    """True for an error of CUDA or NCCL, also behind a transport's: it closes no connection, so no peer sees it."""
    while error is not None:
        if isinstance(error, torch.AcceleratorError | dist.DistBackendError) or "NCCL" in words_of(error):
            return True
        error = error.__cause__
    return False


def has_lost_device(error: BaseException | None) -> bool:
    """True after an error of CUDA, also behind another one, with which the device takes no more of this process."""
    while error is not None:
        if isinstance(error, torch.AcceleratorError) and "out of memory" not in words_of(error):
            return True
        error = error.__cause__
    return False


def name_changing(error: RuntimeError, layers: Sequence[str], changing: Sequence[str]) -> None:
    """Raise autograd's error of a tensor that was changed in place anew, with the layers; for any other do nothing.

    layers: those of the stage whose backward failed. changing: those of them that have changed their input in place.

    Raises: RuntimeError.
    """
    if "inplace operation" in words_of(error):
        who = " or ".join(changing) or f"one of the layers {layers[0]} to {layers[-1]}"
        raise RuntimeError(f"{who} changes in place what a backward needs; let it work on a copy ({error})") from error
