"""The three matrix products of a linear layer: the libraries that compute them, and weights cast or packed for them.

A `Matmul` computes with weights as they are stored, and can be trained with. `PackedWeights` are a copy of weights, or
take their place, in the order or the numbers in which one kind of product reads them; they only give outputs.

On CPUs PyTorch computes fp32 products with MKL, which runs AVX2 code on CPUs that are not Intel's. oneDNN, which
PyTorch ships too, uses AVX-512 wherever it is available: 240 GFLOP/s against 107 on an AMD Zen 5 core
(`python benchmarks/units.py`).

Shapes: T tokens, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW_ROWS = 8
"""The number of rows for which a packed order is chosen; it serves any other number as well."""


class PackedWeights(Protocol):
    """Weights and biases of one layer, or of several that read the same input, as one kind of product reads them."""

    def output(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side [..., O], in the dtype of x; a row depends on that row of x alone."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, scales and biases."""
        ...


Pack = Callable[[Tensor, Tensor | None], PackedWeights | None]
"""Makes packed weights of weights [O, I] and biases [O]; None where they stay as they are."""


class Matmul(Protocol):
    """One way to compute a linear layer and its gradients.

    Gradients take and return matrices; `output` keeps the leading dimensions. `packed` returns the weights of layers
    that read the same input in an order that is read faster, with the same bits; None where there is none.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor: ...

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor: ...

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor: ...

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights | None: ...


@dataclass(frozen=True)
class TorchMatmul:
    """The products that `nn.Linear` and autograd compute, bit for bit."""

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x, weight_OI, bias_O)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return grad_TO @ weight_OI

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        return grad_TO.t() @ x_TI

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        return None


@dataclass(frozen=True)
class OneDnnMatmul:
    """oneDNN's products on a CPU: outputs in fp32 and bf16, gradients in fp32; elsewhere those of `TorchMatmul`.

    oneDNN reads transposed operands in place, and its bits depend only on shapes, not on addresses. With few rows most
    of the time goes into reading weights. Packing halves that, and the bits stay the same.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return _of_rows(x, weight_OI, bias_O) if _has_outputs(x) else TORCH.output(x, weight_OI, bias_O)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return _onednn(grad_TO, weight_OI.t()) if _is_fp32_on_cpu(grad_TO) else TORCH.input_gradient(grad_TO, weight_OI)

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        # oneDNN refuses sums of no rows, which a rank without tokens has.
        is_here = _is_fp32_on_cpu(grad_TO) and len(grad_TO)
        return _onednn(grad_TO.t(), x_TI.t()) if is_here else TORCH.weight_gradient(grad_TO, x_TI)

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> "OneDnnWeights | None":
        return OneDnnWeights.of(weight_OI, bias_O) if _has_outputs(weight_OI) else None


class OneDnnWeights:
    """fp32 or bf16 weights in the order in which oneDNN reads them fastest for few rows."""

    #: the weights, in an order that only oneDNN understands
    packed: Tensor
    #: [O], in the weights' dtype
    bias_O: Tensor | None

    def __init__(self, packed: Tensor, bias_O: Tensor | None) -> None:
        self.packed, self.bias_O = packed, bias_O

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None) -> "OneDnnWeights":
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _FEW_ROWS), bias_O)

    def output(self, x: Tensor) -> Tensor:
        return _of_rows(x, self.packed, self.bias_O)

    @property
    def num_bytes(self) -> int:
        return self.packed.numel() * self.packed.itemsize + (0 if self.bias_O is None else self.bias_O.nbytes)


TORCH = TorchMatmul()


def fastest_matmul() -> Matmul:
    """oneDNN's products if this build of PyTorch has them, else PyTorch's own choice."""
    return OneDnnMatmul() if hasattr(torch.ops.mkldnn, "_linear_pointwise") else TORCH


def _is_fp32_on_cpu(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu"


def _has_outputs(x: Tensor) -> bool:
    """True where oneDNN computes outputs in that dtype on that device."""
    return _is_fp32_on_cpu(x) or (
        x.dtype is torch.bfloat16 and x.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _of_rows(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """oneDNN's output, in which a row depends only on that row of x."""
    if x.shape[:-1].numel() != 1:
        return _onednn(x, weight_OI, bias_O)
    # A single row would be computed differently, so it is computed twice.
    return _onednn(x.reshape(1, -1).repeat(2, 1), weight_OI, bias_O)[0].view(*x.shape[:-1], -1)


def _onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")


class WeightCasts:
    """Copies of an engine's weights in another dtype, or packed for its products, while no weight changes.

    In training a cast lives as long as the product that needs it. A pass over many microbatches in which no weight
    changes keeps the casts of its first microbatch. Only generation packs weights: it reads all of them for each token.
    """

    #: weight -> its cast; None outside of `kept`
    _kept: dict[Tensor, Tensor] | None
    #: weights read by one product -> those weights packed, or None where they cannot be
    _packed: dict[tuple[Tensor, ...], PackedWeights | None]
    #: True while weights are packed on first use
    _packs: bool

    def __init__(self) -> None:
        self._kept = None
        self._packed = {}
        self._packs = False

    @contextmanager
    def kept(self, packed: bool = False) -> Iterator[None]:
        """Within this context each weight is cast at most once, on first use, and with `packed` also packed.

        Contexts nest; the outermost one frees the memory.
        """
        before, packs = self._kept, self._packs
        self._kept = {} if before is None else before
        self._packs = packed
        try:
            yield
        finally:
            self._packs = packs
            if before is None:
                self._kept = None
                self._packed.clear()

    def renew(self) -> None:
        """Drop all copies, because the weights have changed."""
        if self._kept is not None:
            self._kept = {}
        self._packed.clear()

    def packed(self, weights: tuple[Tensor, ...], pack: Callable[[], PackedWeights | None]) -> PackedWeights | None:
        """The result of `pack`, computed once; None where nothing is packed now or these weights cannot be."""
        if not self._packs:
            return None
        if weights not in self._packed:
            self._packed[weights] = pack()
        return self._packed[weights]

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in that dtype; the weight itself if it has that dtype already."""
        if weight.dtype == dtype or self._kept is None:
            return weight.to(dtype)
        found = self._kept.get(weight)
        if found is None or found.dtype != dtype:
            found = self._kept[weight] = weight.detach().to(dtype)
        return found


@runtime_checkable
class Casting(Protocol):
    """A module that looks up its weights' casts in `casts`, if it has been given one."""

    casts: WeightCasts | None


def share_casts(module: nn.Module, casts: WeightCasts) -> int:
    """Attach `casts` to every part of the module that casts weights; return the number of parts."""
    found = [part for part in module.modules() if isinstance(part, Casting)]
    for part in found:
        part.casts = casts
    return len(found)
