"""The numbers that a plain loop or an engine computes, each at its place in step, microbatch and model."""

from __future__ import annotations

import enum
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data import PackedBatch
from penstock.engine.check.plain_loop import PlainLoop
from penstock.engine.check.ranks_in_turn import EngineInTurn
from penstock.engine.checkpoint.manifest import random_state


class Quantity(enum.Enum):
    """A kind of quantity that is compared, in the order in which a step computes them."""

    OUTPUT = "the output of"
    LOSS = "the loss"
    GRADIENT = "the gradient of"
    STATE = ""
    RANDOM = "the state of torch's random numbers after the step"


class Point(NamedTuple):
    """The place of a quantity: step, kind, microbatch (-1 for none), and layer or tensor."""

    step: int
    kind: Quantity
    microbatch: int
    name: str


@dataclass(eq=False)
class Observed:
    """All quantities that one way has computed, in the order of a plain loop."""

    #: digests of outputs; losses, gradients and state themselves
    values: dict[Point, Any] = field(default_factory=dict)
    #: parameter that a rank has reached without holding it -> that rank
    reached: dict[str, int] = field(default_factory=dict)
    #: width of the first layer's output
    width: int = 0
    _step: int = 0
    #: layer -> its calls in this step
    _calls: Counter[str] = field(default_factory=Counter)

    def note_outputs(self, modules: Mapping[str, nn.Module], names: Iterable[str]) -> None:
        """Note the outputs of the layers of these names from now on, microbatch after microbatch."""

        def note(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
            self.values[Point(self._step, Quantity.OUTPUT, self._calls[name], name)] = _digest(output)
            self._calls[name] += 1
            if isinstance(output, Tensor) and output.dim():
                self.width = self.width or output.shape[-1]

        for name in modules.keys() & names:
            modules[name].register_forward_hook(partial(note, name))

    def take(self, loop: PlainLoop | EngineInTurn, microbatches: Sequence[PackedBatch], step: int) -> None:
        """Take a step; note its losses and gradients, and the `state_dict` and random numbers that it leaves."""
        self._step, self._calls = step, Counter()
        loop.take_step(microbatches)
        for microbatch, loss in enumerate(loop.losses):
            self.values[Point(self._step, Quantity.LOSS, microbatch, "")] = loss.detach().clone()
        for name, gradient in loop.gradients.items():
            self.values[Point(self._step, Quantity.GRADIENT, -1, name)] = gradient
        for layer, module in loop.modules.items():
            for key, entry in module.state_dict().items():
                value = entry.detach().clone() if isinstance(entry, Tensor) else _digest(entry)
                self.values[Point(self._step, Quantity.STATE, -1, f"{layer}.{key}")] = value
        state = random_state()
        self.values[Point(self._step, Quantity.RANDOM, -1, "")] = _digest([state["torch"], state.get("cuda")])


def _digest(value: Any) -> int:
    """A digest of the bits of tensors, numbers, text, and containers of them."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest = zlib.crc32(str((value.dtype, tuple(value.shape))).encode())
        return zlib.crc32(data.view(torch.uint8).numpy().tobytes(), digest)
    if isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([_digest(part) for part in value]).encode())
    return zlib.crc32(repr(value).encode())


def check_number(value: Tensor, what: str) -> None:
    """Refuse a value of a plain loop that nothing can be compared with. Raises: ValueError where it holds NaN."""
    if value.isnan().any():
        raise ValueError(f"{what} is NaN in a plain loop, which equals nothing; give layers and a batch that have none")


def check_numbers(observed: Observed, parameters: Container[str]) -> None:
    """Refuse losses and parameters of a plain loop that are NaN. Raises: ValueError with the first one's place."""
    for place, value in observed.values.items():
        match place.kind:
            case Quantity.LOSS:
                check_number(value, f"step {place.step}, microbatch {place.microbatch}: the loss")
            case Quantity.STATE if place.name in parameters:
                check_number(value, f"step {place.step}: {place.name}")


def has_equal_bits(one: Any, other: Any) -> bool:
    """True if two values of one point are equal, bit for bit."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one == other
    return one.shape == other.shape and bool(torch.isclose(one, other, 0.0, 0.0, equal_nan=True).all())


def difference_in_words(one: Any, other: Any) -> str:
    """The difference of two values of one point, in words."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return "other bits"
    if one.shape != other.shape:
        return f"{list(one.shape)} in a plain loop, {list(other.shape)} here"
    if one.numel() == 1:
        return f"{one.item():.9g} in a plain loop, {other.item():.9g} here"
    wide = [tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (one, other)]
    return f"by up to {(wide[0] - wide[1]).abs().max().item():.3g}, of values up to {wide[0].abs().max().item():.3g}"
