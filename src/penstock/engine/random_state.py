"""The state of a process's random numbers, Python's and PyTorch's, as JSON values."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


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
