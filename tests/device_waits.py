"""What makes the host wait for a device, counted by line on tensors of a device that are not there.

Tensors are fakes on the meta device, whose operations take the paths of a GPU's. A copy to a device that is asked not
to block counts as one that does not: that its source is pinned memory is another test's.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

READ = "a read"
BLOCKING = "a blocking copy to the device"
UPLOAD = "a copy to the device that does not block"

# The shape of their results depends on data, so that fakes refuse them afterwards.
_SHAPED_BY_DATA = ("nonzero", "masked_select", "_unique2", "bincount")


class _Calls(TorchFunctionMode):
    """Tensors made of Python's numbers on a device, which no operation copies there on a device that is not there."""

    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor) and made.device.type == "meta":
            self.waits.note(BLOCKING)
        return made


class _Operations(TorchDispatchMode):
    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Without gradients these come as they are called, and not as the operations that they are made of.
            with self:
                return func.decompose(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            return self._number(args[0])
        if name == "_to_copy":
            self._copied(args[0].device, kwargs.get("device"), kwargs.get("non_blocking", False))
        elif name == "copy_":
            self._copied(
                args[1].device, args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and args[0].device.type == "meta":
            for _ in (index for index in args[1] if index is not None and index.device.type == "cpu" and index.dim()):
                self.waits.note(BLOCKING)
        elif name in _SHAPED_BY_DATA and args[0].device.type == "meta":
            self.waits.note(READ)
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                return tensor.item()
        if tensor.device.type == "meta":
            self.waits.note(READ)
        elif tensor.constant is not None:
            with _disable_current_modes():
                return tensor.constant.item()
        return 1.0 if tensor.is_floating_point() else 1

    def _copied(self, source: torch.device, target: Any, non_blocking: bool) -> None:
        if target is None or torch.device(target).type == source.type:
            return
        if source.type == "meta":
            self.waits.note(READ)
        else:
            self.waits.note(UPLOAD if non_blocking else BLOCKING)


class DeviceWaits:
    """What waited in each phase of what was watched."""

    def __init__(self) -> None:
        #: (phase, kind) -> the package's lines, each with how often
        self.places: dict[tuple[str, str], Counter[str]] = {}
        self.phase = "before"

    def note(self, kind: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/penstock/" in f.filename]
        line = f"{frames[-1].filename.rpartition('/penstock/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
        self.places.setdefault((self.phase, kind), Counter())[line] += 1

    def of(self, phase: str) -> dict[str, int]:
        """Kind -> how often, in a phase."""
        return {kind: lines.total() for (during, kind), lines in self.places.items() if during == phase}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch this thread. A value that is read is 1."""

        def tolist(values: Tensor) -> Any:
            # One read, however many values.
            if values.device.type == "meta":
                self.note(READ)
            with _disable_current_modes():
                return torch.ones(values.shape, dtype=values.dtype).tolist()

        with _Operations(self), _Calls(self), mock.patch.object(FakeTensor, "tolist", tolist):
            yield
