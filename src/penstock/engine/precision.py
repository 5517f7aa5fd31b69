"""The dtypes in which a model is kept and computed, and the bits that it keeps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from penstock.model import UnitSpec
from penstock.settings import Precision


def parameter_dtype(precision: Precision) -> torch.dtype:
    dtypes = {Precision.FP64: torch.float64, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    return dtypes.get(precision, torch.float32)


def dtype_under(precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a user's own parameter or buffer: the precision's for fp32, any other dtype as it is."""
    return parameter_dtype(precision) if dtype is torch.float32 else dtype


def stream_dtype(units: Sequence[UnitSpec], precision: Precision) -> torch.dtype:
    """The dtype of the stream that layers pass on: for a user's own layers that of the first one's parameters."""
    dtypes = [torch.float32]
    if units[0].is_own:
        with torch.device("meta"):
            dtypes = [p.dtype for p in units[0].build().parameters() if p.is_floating_point()] + dtypes
    return dtype_under(precision, dtypes[0])


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context manager in which units compute: autocast, or nothing."""
    is_autocast = precision is Precision.BF16_AUTOCAST
    return partial(torch.autocast, device.type, torch.bfloat16) if is_autocast else nullcontext


def slow_precision_warning(precision: Precision, device: torch.device) -> str | None:
    """A warning where products on a GPU are computed in fp32 without TF32, many times slower than it can; else None."""
    if device.type != "cuda" or precision is not Precision.FP32 or torch.backends.cuda.matmul.fp32_precision == "tf32":
        return None
    return (
        "the GPU multiplies matrices in fp32, which on recent ones takes several times as long as TF32 and 15 times as "
        'long as 16 bit; precision = "bf16" or "bf16-autocast" is faster, and so is TF32, by '
        'torch.set_float32_matmul_precision("high")'
    )


def deterministic_if(asked: bool, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """The context manager in which layers compute: that of deterministic kernels, or nothing; on a CPU all are."""
    if not asked or device.type != "cuda":
        return nullcontext
    # Before the first product: without it cuBLAS has no such kernels.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return deterministic_kernels


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Within this context every operation that is repeated gives its bits again; one that cannot raises RuntimeError.

    Backwards in autograd's threads are within it too.
    """
    settings: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    # Not only a warning, with which flash attention's backward would stay as it is.
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fills
