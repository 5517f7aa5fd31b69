"""Products of 8-bit weights and activations that are rounded to 8 bits as they come: exact in whole numbers.

Each output has one scale for its weights, and each row of activations one of its own, so a row's numbers depend on that
row alone. Sums of whole numbers have no rounding: all kernels give the same bits, and the fastest is chosen.

Shapes: T tokens, I inputs, O outputs.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

_LARGEST = 127
_ZERO = 128
"""Kernels that take unsigned activations take this for zero."""
NUM_ROWS, WIDTH = 8, 1024
"""Rows, inputs and outputs of the product that is timed."""

_NUM_TIMES = 8
_PART = 1 << 19
"""Weights that are rounded at a time: what a core's own cache holds of them in fp32."""


class Int8Kernel(Protocol):
    """One way to multiply whole numbers.

    `pack` takes weights [O, I] int8 and scales [O] fp32 and returns them in the form that `output` takes. `output`
    returns x w^T * scales [..., O] fp32 for x [..., I] fp32 from -127 to 127, which it rounds to whole numbers: as
    those nearest to x + 128 in fp32, halves to the even one.
    """

    def pack(self, weight_OI: Tensor, scales_O: Tensor) -> Any: ...

    def output(self, x: Tensor, packed: Any) -> Tensor: ...


class FbgemmKernel:
    """FBGEMM's, which rounds its input itself: fastest with AVX-512 for few rows."""

    def pack(self, weight_OI: Tensor, scales_O: Tensor) -> Any:
        zeros = torch.zeros(len(scales_O), dtype=torch.int64)
        with warnings.catch_warnings():
            # Quantized tensors are to go from PyTorch; then another kernel is chosen.
            warnings.simplefilter("ignore")
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
            return torch.ops.quantized.linear_prepack(make(weight_OI, scales_O.double(), zeros, 0), None)

    def output(self, x: Tensor, packed: Any) -> Tensor:
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(x, 1.0, _ZERO, packed)


class OneDnnKernel:
    """oneDNN's, which has code for AMX."""

    def pack(self, weight_OI: Tensor, scales_O: Tensor) -> Any:
        packed = torch.ops.onednn.qlinear_prepack(weight_OI, [NUM_ROWS, weight_OI.shape[1]])
        return packed, scales_O, torch.zeros(len(scales_O), dtype=torch.int64)

    def output(self, x: Tensor, packed: Any) -> Tensor:
        weight, scales_O, zeros_O = packed
        # Signed activations would run through its reference code.
        given = ((x + _ZERO).round_().to(torch.uint8), 1.0, _ZERO, weight, scales_O, zeros_O, None)
        return torch.ops.onednn.qlinear_pointwise(*given, 1.0, 0, torch.float32, "none", [], "")


class IntMatmulKernel:
    """`torch._int_mm`, on weights as they are."""

    def pack(self, weight_OI: Tensor, scales_O: Tensor) -> Any:
        return weight_OI.t(), scales_O

    def output(self, x: Tensor, packed: Any) -> Tensor:
        weight_IO, scales_O = packed
        rounded = (x.flatten(0, -2) + _ZERO).round_().sub_(_ZERO)
        sums = torch.ops.aten._int_mm(rounded.to(torch.int8), weight_IO)
        return sums.to(torch.float32).mul_(scales_O).view(*x.shape[:-1], len(scales_O))


INT8_KERNELS: Mapping[str, Int8Kernel] = {
    "FBGEMM": FbgemmKernel(),
    "oneDNN": OneDnnKernel(),
    "torch._int_mm": IntMatmulKernel(),
}


class Int8Weights:
    """8-bit weights, for activations that are rounded to 8 bits row by row.

    A weight is off by at most half a scale, 1/254 of the largest of its output; an activation by 1/254 of the largest
    of its row.
    """

    #: multiplies whole numbers
    kernel: Int8Kernel
    #: the weights and scales as the kernel takes them
    packed: Any
    #: [O] fp32
    bias_O: Tensor | None
    #: bytes of weights, scales and biases
    num_bytes: int

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, kernel: Int8Kernel) -> None:
        rounded_OI, scales_O = rounded(weight_OI)
        self.kernel, self.packed = kernel, kernel.pack(rounded_OI, scales_O)
        self.bias_O = None if bias_O is None else bias_O.detach().float()
        self.num_bytes = rounded_OI.nbytes + scales_O.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)

    def output(self, x: Tensor) -> Tensor:
        wide = x.float()
        # A row of zeros needs a scale too.
        scales_T1 = wide.abs().amax(-1, keepdim=True).mul_(1 / _LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        y = self.kernel.output(wide / scales_T1, self.packed).mul_(scales_T1)
        return (y if self.bias_O is None else y.add_(self.bias_O)).to(x.dtype)


def rounded(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as whole numbers from -127 to 127 [O, I] int8, and the scale of each output [O] fp32."""
    rounded_OI, scales_O = torch.empty(weight_OI.shape, dtype=torch.int8), torch.empty(len(weight_OI))
    num_outputs = max(1, _PART // weight_OI.shape[1])
    for whole, scales, weights in zip(*(t.split(num_outputs) for t in (rounded_OI, scales_O, weight_OI.detach()))):
        wide = weights.float()
        sizes = wide.abs()
        scales.copy_(sizes.amax(1).div_(_LARGEST).clamp_min_(torch.finfo(torch.float32).tiny))
        # The sizes' memory is at hand; that of `wide` may be the weights' own.
        whole.copy_(torch.div(wide, scales[:, None], out=sizes).round_())
    return rounded_OI, scales_O


def measured_kernels() -> dict[str, float]:
    """Seconds of a product of 8 rows, 1,024 wide, for each kernel that is exact on this processor."""
    found = {}
    x, weight_OI = torch.full((NUM_ROWS, WIDTH), float(_LARGEST)), torch.full((WIDTH, WIDTH), _LARGEST)
    for name, kernel in INT8_KERNELS.items():
        try:
            packed = kernel.pack(weight_OI.to(torch.int8), torch.ones(WIDTH))
            # Where sums of two products are kept in 16 bits, which they exceed, this is far too small.
            if not bool((kernel.output(x, packed) == WIDTH * _LARGEST**2).all()):
                continue
        except (RuntimeError, AttributeError, NotImplementedError):
            # This build of PyTorch or this processor has no such kernel.
            continue
        found[name] = least_seconds(lambda kernel=kernel, packed=packed: kernel.output(x, packed))
    return found


def least_seconds(act: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    return min(_seconds(act) for _ in range(_NUM_TIMES))


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def fastest_int8_kernel() -> Int8Kernel:
    """The fastest kernel by a measurement of a few milliseconds.

    Raises: ValueError where none is exact.
    """
    found = measured_kernels()
    if not found:
        raise ValueError(
            "this processor has no exact product of 8-bit numbers (VNNI or AMX); int8-weights and int4 are possible"
        )
    return INT8_KERNELS[min(found, key=found.__getitem__)]
