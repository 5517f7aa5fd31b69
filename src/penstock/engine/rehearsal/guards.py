"""Finds what a CPU forgives and a device does not: values read back by the host within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
)
from torch.utils._python_dispatch import _disable_current_modes

from penstock.runtime import Recorder
from penstock.schedule.rehearsal import RehearsalError


def read_by_design(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` outside of the program, where the engine reads a few values, such as the gradient norm.

    Each is 1.
    """
    if func is not _READ or not isinstance(args[0], FakeTensor):
        return _of_host(func, args)
    return 1.0 if args[0].is_floating_point() else 1


def never_read(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` within the program, where no value of a device may be read.

    Raises:
        RehearsalError: one would be.
        RuntimeError: factors of a product have different types.
    """
    if func is _READ and isinstance(args[0], FakeTensor):
        raise RehearsalError(f"the host reads a value of {_described(args[0])}")
    if func in _COPIES:
        source, target = (args[0], kwargs.get("device")) if func is _TO_COPY else (args[1], args[0].device)
        if target is not None and torch.device(target).type == "cpu" != source.device.type:
            raise RehearsalError(f"{_described(source)} is copied to the host")
    if func in _PRODUCTS and len({factor.dtype for factor in args if isinstance(factor, Tensor)}) > 1:
        # Tensors without data are multiplied whatever their types.
        raise RuntimeError(f"{func} of {' and '.join(str(f.dtype) for f in args if isinstance(f, Tensor))}")
    return _of_host(func, args)


_READ = torch.ops.aten._local_scalar_dense.default
_TO_COPY = torch.ops.aten._to_copy.default
_PRODUCTS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default}
)
_COPIES = frozenset({_TO_COPY, torch.ops.aten.copy_.default})


def _of_host(func: Any, args: Any) -> Any:
    """The value of a real tensor, which lies in the host's memory; None for all other operations."""
    if func is not _READ or isinstance(args[0], FakeTensor):
        return None
    with _disable_current_modes():
        return func(*args)


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}"


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Say of a failure in which action it came, and what it would be on a device.

    Raises:
        RehearsalError: the step would fail, or wait for the device.
    """
    try:
        yield
    except RehearsalError as error:
        raise RehearsalError(
            f"{recorder.doing}: {error}, so that it waits for the device, which then idles; keep values on the device "
            "until the step has ended"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RehearsalError(
            f"{recorder.doing}: {error.func} needs the data of a tensor on the host, which would wait for the device; "
            "use operations whose result's shape does not depend on data"
        ) from error
    except FakeTensorDeviceMismatchError as error:
        raise RehearsalError(f"{recorder.doing}: {error}; the host's tensors are 'cpu', the device's 'meta'") from error
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise RehearsalError(f"{recorder.doing}: {type(error).__name__}: {error}") from error
