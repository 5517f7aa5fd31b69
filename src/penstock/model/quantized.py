"""Weights of linear layers as 8-bit or 4-bit whole numbers, and the table of these kinds.

Products of 8-bit weights and activations that are rounded to 8 bits as they come are exact in whole numbers. The other
kinds round weights alone. Adding a kind takes one function that makes `PackedWeights`, its name in `settings.Quantize`
and its line in `quantizer`.

Shapes: T tokens, I inputs, O outputs, G inputs of a group.
"""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.linear import Pack, PackedWeights, fastest_matmul
from penstock.settings import Quantize

_LARGEST = 127
_ZERO = 128
"""Kernels that take unsigned activations take this for zero."""
NUM_ROWS, WIDTH = 8, 1024
"""Rows, inputs and outputs of the product that is timed."""

_NUM_TIMES = 8
_PART = 1 << 19
"""Weights that are rounded at a time: what a core's own cache holds of them in fp32."""

_GROUP, _BLOCK = 32, 16
_NUM_STEPS = 15
_MIDDLE = 8
_ROWS_AT_ONCE = 4096
"""Outputs that are packed together: a multiple of the kernel's blocks."""


Product = Callable[[Tensor], Tensor]

Int8Kernel = Callable[[Tensor, Tensor], Product]
"""One way to multiply whole numbers: weights [O, I] int8 and scales [O] fp32 -> their product.

The product is x w^T * scales [..., O] fp32 for x [..., I] fp32 from -127 to 127, which it rounds to whole numbers: as
those nearest to x + 128 in fp32, halves to the even one.
"""


def fbgemm(weight_OI: Tensor, scales_O: Tensor) -> Product:
    """FBGEMM's, which rounds its input itself: fastest with AVX-512 for few rows."""
    zeros = torch.zeros(len(scales_O), dtype=torch.int64)
    with warnings.catch_warnings():
        # Quantized tensors are to go from PyTorch; then another kernel is chosen.
        warnings.simplefilter("ignore")
        make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        packed = torch.ops.quantized.linear_prepack(make(weight_OI, scales_O.double(), zeros, 0), None)
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    return lambda x: multiply(x, 1.0, _ZERO, packed)


def onednn(weight_OI: Tensor, scales_O: Tensor) -> Product:
    """oneDNN's, which has code for AMX."""
    packed = torch.ops.onednn.qlinear_prepack(weight_OI, [NUM_ROWS, weight_OI.shape[1]])
    zeros_O = torch.zeros(len(scales_O), dtype=torch.int64)

    def product(x: Tensor) -> Tensor:
        # Signed activations would run through its reference code.
        given = ((x + _ZERO).round_().to(torch.uint8), 1.0, _ZERO, packed, scales_O, zeros_O, None)
        return torch.ops.onednn.qlinear_pointwise(*given, 1.0, 0, torch.float32, "none", [], "")

    return product


def int_mm(weight_OI: Tensor, scales_O: Tensor) -> Product:
    """`torch._int_mm`, on weights as they are."""
    weight_IO = weight_OI.t()

    def product(x: Tensor) -> Tensor:
        rounded = (x.flatten(0, -2) + _ZERO).round_().sub_(_ZERO)
        sums = torch.ops.aten._int_mm(rounded.to(torch.int8), weight_IO)
        return sums.to(torch.float32).mul_(scales_O).view(*x.shape[:-1], len(scales_O))

    return product


INT8_KERNELS: Mapping[str, Int8Kernel] = {"FBGEMM": fbgemm, "oneDNN": onednn, "torch._int_mm": int_mm}


def int8_weights(weight_OI: Tensor, bias_O: Tensor | None, kernel: Int8Kernel) -> PackedWeights:
    """8-bit weights, for activations that are rounded to 8 bits row by row.

    A weight is off by at most half a scale, 1/254 of the largest of its output; an activation by 1/254 of the largest
    of its row.
    """
    rounded_OI, scales_O = rounded(weight_OI)
    product, bias_O = kernel(rounded_OI, scales_O), None if bias_O is None else bias_O.detach().float()

    def output(x: Tensor) -> Tensor:
        wide = x.float()
        # A row of zeros needs a scale too.
        scales_T1 = wide.abs().amax(-1, keepdim=True).mul_(1 / _LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        y = product(wide / scales_T1).mul_(scales_T1)
        return (y if bias_O is None else y.add_(bias_O)).to(x.dtype)

    return PackedWeights.of(output, rounded_OI, scales_O, bias_O)


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
            product = kernel(weight_OI.to(torch.int8), torch.ones(WIDTH))
            # Where sums of two products are kept in 16 bits, which they exceed, this is far too small.
            if not bool((product(x) == WIDTH * _LARGEST**2).all()):
                continue
        except (RuntimeError, AttributeError, NotImplementedError):
            # This build of PyTorch or this processor has no such kernel.
            continue
        found[name] = least_seconds(partial(product, x))
    return found


def least_seconds(act: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls."""
    least = math.inf
    for _ in range(_NUM_TIMES):
        start = time.perf_counter()
        act()
        least = min(least, time.perf_counter() - start)
    return least


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


def int8_weights_alone(weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights:
    """8-bit weights with one scale for each output; activations are bf16."""
    rounded_OI, scales_O = rounded(weight_OI)
    # The kernel reads whole blocks of inputs, beyond the end where the last one is not full.
    num_more = -weight_OI.shape[1] % _GROUP
    whole_OI = F.pad(rounded_OI, (0, num_more)) if num_more else rounded_OI
    scales_O, bias_O = scales_O.bfloat16(), _bf16(bias_O)

    def output(x: Tensor) -> Tensor:
        x_TI = F.pad(x.flatten(0, -2).bfloat16(), (0, num_more)).contiguous()
        return _finished(torch.ops.aten._weight_int8pack_mm(x_TI, whole_OI, scales_O), bias_O, x)

    return PackedWeights.of(output, whole_OI, scales_O, bias_O)


def int4_weights(weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights:
    """4-bit weights, each 32 inputs of an output with a scale and a zero point; activations are bf16.

    Raises: ValueError where the number of inputs is no multiple of 32.
    """
    num_outputs, num_inputs = weight_OI.shape
    if num_inputs % _GROUP:
        raise ValueError(
            f"a layer of {num_inputs} inputs cannot be kept as int4, which takes multiples of {_GROUP}; int8 is "
            "possible"
        )
    parts = [_as_int4(part) for part in weight_OI.detach().split(_ROWS_AT_ONCE)]
    # Two weights a byte, in the kernel's order; scales and zero points [I / G, O, 2] bf16.
    packed, scales = torch.cat([packed for packed, _ in parts]), torch.cat([scales for _, scales in parts], 1)
    bias_O = _bf16(bias_O)

    def output(x: Tensor) -> Tensor:
        x_TI = x.flatten(0, -2).bfloat16().contiguous()
        y_TO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, packed, _GROUP, scales)
        # The kernel's outputs are filled up to whole blocks.
        return _finished(y_TO[:, :num_outputs], bias_O, x)

    return PackedWeights.of(output, packed, scales, bias_O)


def _as_int4(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Packed weights, and scales with zero points [I / G, O, 2] bf16."""
    weight_OI = F.pad(weight_OI.float(), (0, 0, 0, -len(weight_OI) % _BLOCK))
    groups = weight_OI.unflatten(1, (-1, _GROUP))
    least, most = groups.aminmax(dim=2)
    # As they are stored, so that rounding them adds no error.
    scales = ((most - least) / _NUM_STEPS).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16().float()
    zeros = (least + _MIDDLE * scales).bfloat16().float()
    steps = ((groups - zeros[..., None]) / scales[..., None] + _MIDDLE).round_().clamp_(0, _NUM_STEPS)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.flatten(1).int(), 1)
    return packed, torch.stack((scales, zeros), -1).transpose(0, 1).bfloat16().contiguous()


def _bf16(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.detach().bfloat16()


def _finished(y_TO: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    """The outputs in the dtype and the leading shape of x."""
    y_TO = y_TO if bias_O is None else y_TO + bias_O
    return y_TO.to(x.dtype).reshape(*x.shape[:-1], y_TO.shape[-1])


def quantizer(kind: Quantize) -> Pack:
    """The function that packs weights in this kind of numbers; int8 chooses its kernel by a short measurement.

    Raises: ValueError for NONE, and where the processor lacks the kind.
    """
    if kind is Quantize.INT8:
        return partial(int8_weights, kernel=fastest_int8_kernel())
    kinds: dict[Quantize, Pack] = {Quantize.INT8_WEIGHTS: int8_weights_alone, Quantize.INT4: int4_weights}
    if kind not in kinds:
        raise ValueError(f"quantize = {kind} packs nothing; possible are int8, {', '.join(kinds)}")
    return kinds[kind]


def measured_products() -> dict[str, float]:
    """Seconds of a product of 8 rows, 1,024 wide, by kind, and for int8 by kernel: what this processor is fast at."""
    weight, found = torch.randn(WIDTH, WIDTH), {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(NUM_ROWS, WIDTH, dtype=dtype)
        if (packed := fastest_matmul().packed(weight.to(dtype), None)) is not None:
            found["fp32" if dtype is torch.float32 else "bf16"] = least_seconds(partial(packed.output, x))
    kinds: dict[str, Pack] = {
        f"int8 by {name}": partial(int8_weights, kernel=INT8_KERNELS[name]) for name in measured_kernels()
    }
    kinds |= {kind: quantizer(kind) for kind in (Quantize.INT8_WEIGHTS, Quantize.INT4)}
    for name, pack in kinds.items():
        packed = pack(weight, None)
        assert packed is not None
        found[str(name)] = least_seconds(partial(packed.output, torch.randn(NUM_ROWS, WIDTH)))
    return found
