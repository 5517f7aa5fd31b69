"""Weights of linear layers as 8-bit or 4-bit whole numbers, and the table of these kinds.

Products of 8-bit weights and activations that are rounded to 8 bits as they come are exact in whole numbers. The other
kinds round weights alone. Adding a kind takes one function that makes `PackedWeights`, its name in `settings.Quantize`
and its line in `quantizer`.

Shapes: T tokens, I inputs, O outputs, G inputs of a group.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.cpu.onednn import fastest_matmul
from penstock.model.linear import Pack, PackedWeights
from penstock.settings import Quantize

_LARGEST = 127
_ZERO = 128
"""Kernels that take unsigned activations take this for zero."""
_LARGEST_PAIR = (2**15 - 1) // 255
"""The largest sum of two weights whose products with activations fit 16 bits together."""
_SPARSE = 32
"""Of so many weights one may be multiplied alone: then it takes less time than all of them together."""
_EXACT = 2**24
"""Up to here each whole number is one in fp32."""
IN_PARTS = ", in parts"

SHAPES = ((512, 2048), (2048, 2048))
"""Inputs and outputs of the products that are timed; each layer is taken for the nearest."""
_FEW, _MANY = 8, 128
"""Rows of a product that is timed: answers that are written together, and a prompt that is read."""
_NUM_TURNS, _NUM_LONG_TURNS = 5, 3
_FAR = 4.0
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}

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

Seconds = dict[str, list[float]]
"""Kernel or kind -> seconds for [16 products of 8 rows, as in decoding; one of 128 rows, as in reading a prompt]."""


def fbgemm(weight_OI: Tensor, scales_O: Tensor) -> Product:
    """FBGEMM's, which rounds its input itself: fastest with AVX-512 for few rows."""
    zeros = torch.zeros(len(scales_O), dtype=torch.int64)
    with warnings.catch_warnings():
        # Quantized tensors are to go from PyTorch; then another kernel is chosen.
        warnings.simplefilter("ignore")
        make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        packed = torch.ops.quantized.linear_prepack(make(weight_OI, scales_O.double(), zeros, 0), None)
    # Without what a call in Python looks up each time: a tenth of a small product.
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
    return lambda x: multiply(x, 1.0, _ZERO, packed)


def onednn(weight_OI: Tensor, scales_O: Tensor) -> Product:
    """oneDNN's, which has code for AMX."""
    packed = torch.ops.onednn.qlinear_prepack(weight_OI, [_FEW, weight_OI.shape[1]])
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


def in_parts(weight_OI: Tensor, scales_O: Tensor, kernel: Callable[[Tensor, Tensor], Product]) -> Product:
    """A product of the usual bits by a kernel that adds up two in 16 bits, as those do that know neither VNNI nor AMX.

    Of two neighbouring weights that are too large together, one is cut to what fits. What is cut off is the rest: as a
    rule few numbers, each of which is multiplied alone (a hundredth of normally distributed weights); where they are
    many, they are a second product.
    """
    fitting_OI, rest_OI = _cut_to_16_bits(weight_OI)
    if not rest_OI.any():
        return kernel(weight_OI, scales_O)
    ones_O = torch.ones(len(scales_O))
    is_sparse = int(rest_OI.count_nonzero()) * _SPARSE <= rest_OI.numel() and len(_exact_parts(rest_OI)) == 1
    # Each addend is exact in fp32, and the sum of all is rounded once.
    addends = [
        (kernel(part.contiguous(), ones_O), own)
        for weights in ([fitting_OI] if is_sparse else [fitting_OI, rest_OI])
        for part, own in _exact_parts(weights)
    ]
    if is_sparse:
        addends.append((_few_products(rest_OI), slice(None)))
    if len(addends) == 2:
        multiply, multiply_rest = (product for product, _ in addends)
        return lambda x: multiply(x).add_(multiply_rest(x)).mul_(scales_O)

    def product(x: Tensor) -> Tensor:
        sums = [multiply(x[..., own].contiguous()).double() for multiply, own in addends]
        return torch.stack(sums).sum(0).float().mul_(scales_O)

    return product


def _cut_to_16_bits(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of which no two neighbours' products with 0 to 255 add up to more than 16 bits, and the rest, in int8."""
    fitting_OI, rest_OI = weight_OI.clone(), torch.zeros_like(weight_OI)
    num_pairs, num_outputs = weight_OI.shape[1] // 2, max(1, _PART // weight_OI.shape[1])
    for fitting, rest in zip(fitting_OI.split(num_outputs), rest_OI.split(num_outputs), strict=True):
        pairs = fitting[:, : 2 * num_pairs].unflatten(1, (num_pairs, 2))
        sums = pairs.sum(2, dtype=torch.int16)
        over = sums - sums.clamp(-_LARGEST_PAIR, _LARGEST_PAIR)
        # The larger one is more than half of what fits, so that nothing changes its sign.
        larger = pairs.abs().argmax(2, keepdim=True)
        cut = torch.zeros_like(pairs).scatter_(2, larger, over[..., None].to(torch.int8))
        pairs -= cut
        rest[:, : 2 * num_pairs] = cut.flatten(1)
    return fitting_OI, rest_OI


def _few_products(rest_OI: Tensor) -> Product:
    """The product with weights that are nearly all zero, each output being a weighted sum of some inputs."""
    outputs, inputs = rest_OI.nonzero().unbind(1)
    weights = rest_OI[outputs, inputs].float()
    counts = torch.bincount(outputs, minlength=len(rest_OI))
    starts, inputs = (counts.cumsum(0) - counts).int(), inputs.int()
    zero = torch.tensor(float(_ZERO))

    def product(x: Tensor) -> Tensor:
        rounded = torch.add(x, zero).round_().sub_(zero)
        x_IT = (rounded if x.dim() == 2 else rounded.flatten(0, -2)).t().contiguous()
        sums_TO = torch.embedding_bag(x_IT, inputs, starts, False, 0, False, weights)[0].t()
        return sums_TO if x.dim() == 2 else sums_TO.unflatten(0, x.shape[:-1])

    return product


def _exact_parts(weight_OI: Tensor) -> list[tuple[Tensor, slice]]:
    """As few equal parts of the inputs as leave each output's sum of products exact in fp32; pairs stay together."""
    sizes, num_parts, num_all = weight_OI.abs(), 1, weight_OI.shape[1]
    while True:
        num_inputs = 2 * -(-num_all // (2 * num_parts))
        if all(part.sum(1).max().item() * _LARGEST <= _EXACT for part in sizes.split(num_inputs, 1)):
            begins = range(0, num_all, num_inputs)
            return [(weight_OI[:, begin : begin + num_inputs], slice(begin, begin + num_inputs)) for begin in begins]
        num_parts += 1


INT8_KERNELS: Mapping[str, Int8Kernel] = {
    "FBGEMM": fbgemm,
    "oneDNN": onednn,
    "torch._int_mm": int_mm,
    f"FBGEMM{IN_PARTS}": partial(in_parts, kernel=fbgemm),
    f"oneDNN{IN_PARTS}": partial(in_parts, kernel=onednn),
}


def int8_weights(weight_OI: Tensor, bias_O: Tensor | None, kernel: Int8Kernel) -> PackedWeights:
    """8-bit weights, for activations that are rounded to 8 bits row by row.

    A weight is off by at most half a scale, 1/254 of the largest of its output; an activation by 1/254 of the largest
    of its row.
    """
    rounded_OI, scales_O = rounded(weight_OI)
    product, bias_O = kernel(rounded_OI, scales_O), None if bias_O is None else bias_O.detach().float()
    # A row of zeros needs a scale too; beside any other this is nothing.
    least = torch.tensor(torch.finfo(torch.float32).tiny)

    def output(x: Tensor) -> Tensor:
        wide = x.float()
        sizes = wide.abs()
        scales_T1 = torch.add(least, sizes.amax(-1, True), alpha=1 / _LARGEST)
        y = product(torch.div(wide, scales_T1, out=sizes)).mul_(scales_T1)
        if bias_O is not None:
            y.add_(bias_O)
        return y if wide is x else y.to(x.dtype)

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


def quantizer(kind: Quantize, seconds: Sequence[Seconds] | None = None) -> Pack:
    """The function that packs weights in this kind of numbers.

    seconds: of each shape's int8 products, which choose the kernel; left out, they are measured.

    Raises: ValueError for NONE and AUTO, and where the processor lacks the kind.
    """
    if kind is Quantize.INT8:
        found = measured_seconds(torch.float32, kind) if seconds is None else seconds
        kernels = [INT8_KERNELS[_fastest_kernel(of_shape)] for of_shape in found]
        return lambda weight_OI, bias_O: int8_weights(weight_OI, bias_O, kernels[_shape_like(weight_OI.numel())])
    kinds: dict[Quantize, Pack] = {Quantize.INT8_WEIGHTS: int8_weights_alone, Quantize.INT4: int4_weights}
    if kind not in kinds:
        raise ValueError(f"quantize = {kind} packs nothing; possible are int8, {', '.join(kinds)}")
    return kinds[kind]


# ---- How fast each kind is here

_BY = f"{Quantize.INT8} by "


def _fastest_kernel(seconds: Seconds) -> str:
    """The name of the int8 kernel. Raises: ValueError where none is exact."""
    found = {name.removeprefix(_BY): sum(took_s) for name, took_s in seconds.items() if name.startswith(_BY)}
    if not found:
        raise ValueError("this processor has no exact product of 8-bit numbers; int8-weights and int4 are possible")
    return min(found, key=found.__getitem__)


def _shape_like(num_weights: int) -> int:
    """The number of the shape that is timed whose weights are nearest to so many."""
    return min(range(len(SHAPES)), key=lambda i: abs(math.log(num_weights / math.prod(SHAPES[i]))))


def measured_seconds(dtype: torch.dtype, kind: Quantize) -> list[Seconds]:
    """Seconds, for each of `SHAPES`, by products in that dtype and of that kind, of int8 by each exact kernel."""
    return _measured(dtype, Quantize.INT8 if kind is Quantize.AUTO else kind, torch.get_num_threads())


@cache
def _measured(dtype: torch.dtype, kind: Quantize, num_threads: int) -> list[Seconds]:
    found = []
    for shape in SHAPES:
        products = _products(dtype, (kind,), shape)
        few = _medians(products, _rows(_FEW, shape, dtype), _NUM_TURNS)
        # What is far slower is not waited for with more rows.
        near = {name: product for name, product in products.items() if few[name] < _FAR * min(few.values())}
        scale = _MANY / _FEW
        many = _medians(near, _rows(_MANY, shape, dtype), _NUM_LONG_TURNS)
        found.append({name: [scale * took_s, many.get(name, scale * took_s)] for name, took_s in few.items()})
    return found


def seconds_of_all(views: Sequence[Sequence[Seconds]]) -> list[Seconds]:
    """The sums of what all ranks have measured, of the products that each of them has: the same on all ranks."""
    found: list[Seconds] = []
    for shape in zip(*views, strict=True):
        names = [name for name in shape[0] if all(name in theirs for theirs in shape)]
        found.append({name: [sum(part) for part in zip(*(theirs[name] for theirs in shape))] for name in names})
    return found


def times_as_slow(kind: Quantize, dtype: torch.dtype, seconds: Sequence[Seconds], only_reads: bool = False) -> float:
    """The seconds of products of this kind over those in that dtype, of all shapes together.

    The large ones weigh most: weights of whole models, too, come from memory.

    only_reads: tokens are read and none is written.
    """
    own = plain = 0.0
    for of_shape in seconds:
        name = _BY + _fastest_kernel(of_shape) if kind in (Quantize.INT8, Quantize.AUTO) else str(kind)
        own += sum(of_shape[name][only_reads:])
        plain += sum(of_shape[_DTYPES[dtype]][only_reads:])
    return own / plain


def _products(dtype: torch.dtype, kinds: Sequence[Quantize], shape: tuple[int, int]) -> dict[str, Product]:
    """The products in that dtype and of these kinds, of int8 by each kernel that is exact on this processor."""
    num_inputs, num_outputs = shape
    weight_OI = _signed(num_outputs).expand(num_outputs, num_inputs).contiguous()
    own = weight_OI.to(dtype)
    packed = fastest_matmul().packed(own, None)
    found: dict[str, Product] = {_DTYPES[dtype]: partial(F.linear, weight=own) if packed is None else packed.output}
    for kind in kinds:
        if kind in (Quantize.INT8_WEIGHTS, Quantize.INT4) and (packed := quantizer(kind)(weight_OI, None)) is not None:
            found[str(kind)] = packed.output
    if Quantize.INT8 not in kinds:
        return found
    x, usual_OI = _rows(_FEW, shape, torch.float32), torch.randn(weight_OI.shape, generator=torch.Generator())
    for name, kernel in INT8_KERNELS.items():
        if _BY + name.removesuffix(IN_PARTS) in found:
            continue
        try:
            product = int8_weights(weight_OI, None, kernel).output
            # Where sums of two products are kept in 16 bits, which these exceed, they are far too small.
            if torch.equal(product(x), x[:, :1] * _signed(num_outputs).t() * num_inputs):
                found[_BY + name] = int8_weights(usual_OI, None, kernel).output
        except (RuntimeError, AttributeError, NotImplementedError):
            # This build of PyTorch or this processor has no such kernel.
            continue
    return found


def _signed(count: int) -> Tensor:
    """The largest weight and its negative in turns, [count, 1]."""
    return torch.tensor([[float(_LARGEST)], [-float(_LARGEST)]]).repeat(-(-count // 2), 1)[:count]


def _rows(count: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """So many rows of the largest activations, of either sign."""
    return _signed(count).expand(count, shape[0]).to(dtype)


def _medians(products: Mapping[str, Product], x: Tensor, num_turns: int) -> dict[str, float]:
    """The median seconds of each, which take turns; one turn more comes first, and does not count.

    Seconds are those of the thread that calls, on a processor: it has its share of each product, and while other
    programs run it has no more.
    """
    found: dict[str, list[float]] = {name: [] for name in products}
    for turn in range(num_turns + 1):
        for name, product in products.items():
            start = time.thread_time()
            product(x)
            if turn:
                found[name].append(time.thread_time() - start)
    return {name: statistics.median(times) for name, times in found.items()}
