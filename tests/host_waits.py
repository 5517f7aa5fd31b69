"""What makes a host wait for a device, and what makes ranks wait for each other, seen on a machine without devices.

A value can be read back on a CPU without anybody noticing. So the operations are watched that would wait on a device:
those that give Python a number or data, those whose result's shape depends on data, and copies between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Those that are called from Python, and on a CPU go past the dispatcher.
_READING_METHODS = {
    getattr(Tensor, name): name
    for name in (
        *("item", "tolist", "numpy", "cpu", "nonzero", "unique", "is_nonzero"),
        *("__bool__", "__float__", "__int__", "__index__", "__array__", "__contains__"),
    )
}

# Those that reach the dispatcher from anywhere, from within a backward too.
_READING_OPERATIONS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    "bincount",
}


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING_METHODS:
            self.note(f"Tensor.{_READING_METHODS[func]}")
        elif func is Tensor.to and _device_in(args[1:], kwargs) not in (None, args[0].device):
            self.note("Tensor.to")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, waits: HostWaits, note: Callable[[str], None]) -> None:
        super().__init__()
        self.waits, self.note = waits, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        tensors = [a for a in args if isinstance(a, Tensor)]
        self.waits.num_operations += 1
        if space == "c10d":
            self.waits.collectives[name] += 1
        elif name in _READING_OPERATIONS:
            self.note(func._schema.name)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                self.note(f"{func._schema.name} by a mask")
        elif name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.note(func._schema.name)
        elif (name == "copy_" and len({t.device for t in tensors}) > 1) or (
            name == "_to_copy" and _device_in((), kwargs) not in (None, tensors[0].device)
        ):
            self.note(f"{func._schema.name} to another device")
        return func(*args, **(kwargs or {}))


def _device_in(args: Any, kwargs: Any) -> torch.device | None:
    found = [a for a in (*args, (kwargs or {}).get("device")) if isinstance(a, torch.device | str)]
    return torch.device(found[0]) if found else None


class HostWaits:
    """What was read back, and which collectives were launched, while it watched: how often, by name."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.num_operations = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this thread."""

        def note(name: str) -> None:
            self.reads[name] += 1

        with _Operations(self, note), _Calls(note):
            yield
