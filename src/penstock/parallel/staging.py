"""Host memory that a device copies from and to by itself: a microbatch's, and that of tensors which gloo carries.

The host waits for the device where a tensor leaves it, and not where one arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from penstock.settings import TransportKind

_ALIGNED_BYTES = 16
"""Tensors of a packed copy begin at multiples of this, whatever their dtypes."""


def in_one_copy(tables: Sequence[Mapping[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """The tables with their tensors on the device, packed into one copy for which the host does not wait.

    Tensors that are on the device already, as all are on a CPU, stay as they are.
    """
    leaving = {id(x): x for table in tables for x in table.values() if x.device != device}
    if not leaving:
        return [dict(table) for table in tables]
    sizes = (-(-x.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for x in leaving.values())
    starts = list(accumulate(sizes, initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def views(buffer: Tensor) -> dict[int, Tensor]:
        return {
            number: buffer[start : start + x.nbytes].view(x.dtype).view(x.shape)
            for (number, x), start in zip(leaving.items(), starts, strict=False)
        }

    for number, place in views(packed).items():
        place.copy_(leaving[number])
    arriving = views(packed.to(device, non_blocking=True))
    return [{name: arriving.get(id(x), x) for name, x in table.items()} for table in tables]


def begin_read(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to host memory; returns what waits for the copy."""
    if x.device.type != "cuda":
        return x.cpu
    copy, event = x.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return copy

    return wait


def read_numbers(numbers: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one element each: on one device by one read, for which the host waits once."""
    values = [0.0] * len(numbers)
    by_device: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, {}).setdefault(number.dtype, []).append(place)
    for by_dtype in by_device.values():
        # Numbers of one dtype are widened together, since each launch takes its time.
        stacks = [torch.stack([numbers[i].reshape(()) for i in places]).double() for places in by_dtype.values()]
        for place, value in zip(chain.from_iterable(by_dtype.values()), torch.cat(stacks).tolist(), strict=True):
            values[place] = value
    return values


def is_staged(device: torch.device, transport: TransportKind) -> bool:
    """True if this device's tensors travel through host memory that is not theirs."""
    return device.type != "cpu" and transport == "host"


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory from and to which a device copies by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory, which is there when this returns."""
    return host_empty(x.shape, x.dtype).copy_(x.detach())


def to_device(on_host: Tensor, x: Tensor) -> Tensor:
    """Fill `x` with what has come, as a backend would: autograd does not count it as a change. Returns `x`."""
    x.data.copy_(on_host, non_blocking=True)
    return x


class StagedTensors:
    """A collective's arguments with copies in host memory in place of its tensors.

    The first argument is written; where no other one holds a tensor, it is read as well.
    """

    #: the arguments to launch it with
    arguments: list[Any]
    #: the tensors that it writes, and their copies
    _written: list[tuple[Tensor, Tensor]]

    def __init__(self, arguments: Sequence[Any]) -> None:
        num_read = 0

        def read(x: Tensor) -> Tensor:
            nonlocal num_read
            num_read += 1
            return to_host(x)

        def written(x: Tensor) -> Tensor:
            copy = host_empty(x.shape, x.dtype) if num_read else to_host(x)
            self._written.append((x, copy))
            return copy

        self._written = []
        others = _with_tensors(arguments[1:], read)
        self.arguments = [*_with_tensors(arguments[:1], written), *others]

    def arrive(self) -> None:
        """Fill the tensors with what the collective has written, once."""
        while self._written:
            x, copy = self._written.pop()
            to_device(copy, x)


def _with_tensors(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """The value with each tensor in it, or in its lists, replaced by another."""
    if isinstance(value, list | tuple):
        return [_with_tensors(inner, make) for inner in value]
    return make(value) if isinstance(value, Tensor) else value


@dataclass(eq=False)
class StagedWork:
    """A collective over copies in host memory, whose results are in the tensors once it has been waited for."""

    #: the collective over the copies
    work: Any
    #: the copies
    copies: StagedTensors

    def wait(self, *timeout: Any) -> bool:
        """Raises: RuntimeError as the collective does; then the tensors stay as they are."""
        done = self.work.wait(*timeout)
        self.copies.arrive()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)
