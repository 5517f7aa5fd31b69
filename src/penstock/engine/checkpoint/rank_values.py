"""The fields of what a rank saves beside its tensors, checked where a manifest is read.

An engine's values have the key ``engine``, and those of a run more keys. All else that a checkpoint holds of a rank is
its user's own, and may be any JSON value.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

# ---- The state of a process's random numbers, Python's and PyTorch's, as JSON values


def random_state() -> dict[str, Any]:
    """The state of this process's generators: Python's, PyTorch's, and that of the current CUDA device in use."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers of `state`; a generator that it leaves out stays as it is.

    Raises:
        ValueError: it is no state that `random_state` gave.
    """
    _put(state, random.setstate, torch.set_rng_state, torch.cuda.set_rng_state if torch.cuda.is_available() else None)


def check_random_state(state: Mapping[str, Any]) -> None:
    """Check that `set_random_state` would take a state; nothing is changed. Raises: as there."""
    _put(state, random.Random().setstate, torch.Generator().set_state)


def _put(
    state: Mapping[str, Any],
    python: Callable[[Any], object],
    cpu: Callable[[Tensor], object],
    cuda: Callable[[Tensor], object] | None = None,
) -> None:
    try:
        if "python" in state:
            version, numbers, gauss = state["python"]
            python((version, tuple(numbers), None if gauss is None else float(gauss)))
        if "torch" in state:
            cpu(_tensor(state["torch"]))
        if "cuda" in state:
            values = _tensor(state["cuda"])
            if cuda is not None:
                cuda(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the saved state of random numbers is none ({type(error).__name__}: {reason})") from None


def restore_random_state(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
    """Go on with the states that all ranks have `saved`, in rank order.

    As many ranks as then take their own. Any other number of ranks take, generator by generator, the state that all had
    in common; where each had its own, it belongs to the old layout, and nothing is changed.
    """
    if len(saved) == world_size:
        set_random_state(saved[rank])
    else:
        first = saved[0].items()
        set_random_state({kind: own for kind, own in first if all(theirs.get(kind) == own for theirs in saved)})


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- The fields of what a rank saves beside its tensors, checked where a manifest is read


@dataclass(frozen=True)
class _Field:
    """A field of a JSON object: its kind in words and as a test, and what else it may be."""

    words: str
    fits: Callable[[Any], bool]
    #: the fields of the object that it is
    inner: Mapping[str, _Field] = field(default_factory=dict)
    may_lack: bool = False
    may_be_null: bool = False


def _object(inner: Mapping[str, _Field] | None = None, **may: bool) -> _Field:
    return _Field("an object", lambda value: isinstance(value, dict), inner or {}, **may)


_COUNT = _Field("a whole number from 0 on", lambda value: type(value) is int and 0 <= value < 2**63)
_WHOLE = _Field("a whole number", lambda value: type(value) is int)
_NUMBER = _Field("a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max)
_TEXT = _Field("a string", lambda value: isinstance(value, str))
_OPTIMIZER = {
    "num_steps": _COUNT,
    "num_updates": _COUNT,
    "learning_rate": _NUMBER,
    "scaler": _object({"scale": _NUMBER, "num_good_steps": _COUNT}, may_be_null=True),
    "since": _Field(
        "an object of counts",
        lambda value: isinstance(value, dict) and all(map(_COUNT.fits, value.values())),
        may_lack=True,
    ),
}
_FIELDS = {
    "engine": _object({"step": _COUNT, "optimizer": _object(_OPTIMIZER)}),
    "random": _object(),
    "loader": _object({"epoch": _COUNT, "position": _COUNT, "seed": _WHOLE, "fingerprint": _TEXT}, may_lack=True),
    "early_stop": _object(
        {"best": replace(_NUMBER, may_be_null=True), "num_worse": _COUNT}, may_lack=True, may_be_null=True
    ),
}
_SAME_ON_ALL_RANKS = ("engine", "loader", "early_stop")


def check_rank_values(values: Sequence[Any], step: int) -> None:
    """Check each rank's values of a checkpoint of that step, where they are an engine's.

    Raises: ValueError naming a field that is missing or of another kind, or that cannot be with the others.
    """
    engines = [isinstance(theirs, dict) and "engine" in theirs for theirs in values]
    if not any(engines):
        return
    if not all(engines):
        raise ValueError(f"rank {engines.index(False)} has no values of an engine, and rank {engines.index(True)} has")
    for rank, theirs in enumerate(values):
        try:
            _check_fields(theirs, _FIELDS)
            check_random_state(theirs["random"])
        except ValueError as error:
            raise ValueError(f"of rank {rank}, {error}") from None
        if differing := [key for key in _SAME_ON_ALL_RANKS if theirs.get(key) != values[0].get(key)]:
            raise ValueError(f"ranks 0 and {rank} have not the same {differing[0]}")
    # Updates may outnumber steps: a caller may give several steps the same number.
    engine = values[0]["engine"]
    num_steps = engine["optimizer"]["num_steps"]
    if not num_steps == engine["step"] == step:
        raise ValueError(
            f"step {engine['step']} of the engine and {num_steps} of the optimizer are not {step}, the checkpoint's"
        )


def _check_fields(content: Mapping[str, Any], fields: Mapping[str, _Field], within: str = "") -> None:
    for key, wanted in fields.items():
        name = f"{within}{key}"
        if key not in content:
            if wanted.may_lack:
                continue
            raise ValueError(f"{name} is missing")
        value = content[key]
        if value is None and wanted.may_be_null:
            continue
        if not wanted.fits(value):
            shown = repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}..."
            raise ValueError(f"{name} is {shown}; {wanted.words} is expected")
        _check_fields(content[key], wanted.inner, f"{name}.")
