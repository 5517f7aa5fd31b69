"""Weights of linear layers as 8-bit or 4-bit whole numbers, and the table of these kinds.

Adding a kind takes one class of `PackedWeights`, its name in `settings.Quantize` and its line in `quantizer`.

Shapes: T tokens, I inputs, O outputs, G inputs of a group.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.int8 import (
    INT8_KERNELS,
    NUM_ROWS,
    WIDTH,
    Int8Weights,
    fastest_int8_kernel,
    least_seconds,
    measured_kernels,
    rounded,
)
from penstock.model.matmul import Pack, fastest_matmul
from penstock.settings import Quantize

_GROUP, _BLOCK = 32, 16
_NUM_STEPS = 15
_MIDDLE = 8
_ROWS_AT_ONCE = 4096
"""Outputs that are packed together: a multiple of the kernel's blocks."""


def quantizer(kind: Quantize) -> Pack:
    """The function that packs weights in this kind of numbers; int8 chooses its kernel by a short measurement.

    Raises: ValueError for NONE, and where the processor lacks the kind.
    """
    if kind is Quantize.INT8:
        return partial(Int8Weights, kernel=fastest_int8_kernel())
    kinds: dict[Quantize, Pack] = {Quantize.INT8_WEIGHTS: Int8WeightsAlone, Quantize.INT4: Int4Weights}
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
        f"int8 by {name}": partial(Int8Weights, kernel=INT8_KERNELS[name]) for name in measured_kernels()
    }
    kinds |= {kind: quantizer(kind) for kind in (Quantize.INT8_WEIGHTS, Quantize.INT4)}
    for name, pack in kinds.items():
        packed = pack(weight, None)
        assert packed is not None
        found[str(name)] = least_seconds(partial(packed.output, torch.randn(NUM_ROWS, WIDTH)))
    return found


class Int8WeightsAlone:
    """8-bit weights with one scale for each output; activations are bf16."""

    #: inputs of value 0 that fill up the last block
    num_more: int
    #: whole numbers [O, I] and scales [O]
    weight_OI: Tensor
    scales_O: Tensor
    #: [O] bf16
    bias_O: Tensor | None

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        # The kernel reads whole blocks of inputs, beyond the end where the last one is not full.
        rounded_OI, scales_O = rounded(weight_OI)
        self.num_more = -weight_OI.shape[1] % _GROUP
        self.weight_OI = F.pad(rounded_OI, (0, self.num_more)) if self.num_more else rounded_OI
        self.scales_O, self.bias_O = scales_O.bfloat16(), _bf16(bias_O)

    def output(self, x: Tensor) -> Tensor:
        x_TI = F.pad(x.flatten(0, -2).bfloat16(), (0, self.num_more)).contiguous()
        return _finished(torch.ops.aten._weight_int8pack_mm(x_TI, self.weight_OI, self.scales_O), self.bias_O, x)

    @property
    def num_bytes(self) -> int:
        return self.weight_OI.nbytes + self.scales_O.nbytes + (0 if self.bias_O is None else self.bias_O.nbytes)


class Int4Weights:
    """4-bit weights, each 32 inputs of an output with a scale and a zero point; activations are bf16.

    Raises: ValueError where the number of inputs is no multiple of 32.
    """

    #: two weights a byte, in the kernel's order
    packed: Tensor
    #: scales and zero points [I / G, O, 2] bf16
    scales_and_zeros: Tensor
    #: [O] bf16
    bias_O: Tensor | None
    #: O; the kernel's are filled up to whole blocks
    _num_outputs: int

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        num_outputs, num_inputs = weight_OI.shape
        if num_inputs % _GROUP:
            raise ValueError(
                f"a layer of {num_inputs} inputs cannot be kept as int4, which takes multiples of {_GROUP}; int8 is "
                "possible"
            )
        self._num_outputs = num_outputs
        parts = [self._packed(part) for part in weight_OI.detach().split(_ROWS_AT_ONCE)]
        self.packed = torch.cat([packed for packed, _ in parts])
        self.scales_and_zeros = torch.cat([scales for _, scales in parts], 1)
        self.bias_O = _bf16(bias_O)

    @staticmethod
    def _packed(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        weight_OI = F.pad(weight_OI.float(), (0, 0, 0, -len(weight_OI) % _BLOCK))
        groups = weight_OI.unflatten(1, (-1, _GROUP))
        least, most = groups.aminmax(dim=2)
        # As they are stored, so that rounding them adds no error.
        scales = ((most - least) / _NUM_STEPS).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16().float()
        zeros = (least + _MIDDLE * scales).bfloat16().float()
        steps = ((groups - zeros[..., None]) / scales[..., None] + _MIDDLE).round_().clamp_(0, _NUM_STEPS)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(steps.flatten(1).int(), 1)
        return packed, torch.stack((scales, zeros), -1).transpose(0, 1).bfloat16().contiguous()

    def output(self, x: Tensor) -> Tensor:
        x_TI = x.flatten(0, -2).bfloat16().contiguous()
        y_TO = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TI, self.packed, _GROUP, self.scales_and_zeros)
        return _finished(y_TO[:, : self._num_outputs], self.bias_O, x)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.packed, self.scales_and_zeros, self.bias_O) if t is not None)


def _bf16(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.detach().bfloat16()


def _finished(y_TO: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    """The outputs in the dtype and the leading shape of x."""
    y_TO = y_TO if bias_O is None else y_TO + bias_O
    return y_TO.to(x.dtype).reshape(*x.shape[:-1], y_TO.shape[-1])
