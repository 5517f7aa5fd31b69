"""Products of quantized weights: their error, their rows, their kernels, and what takes the place of parameters."""

import math
from collections.abc import Callable

import pytest
import torch

from penstock.model import Linear
from penstock.model.linear import OneDnnMatmul, PackedWeights, fix_weights, outputs
from penstock.model.quantized import (
    INT8_KERNELS,
    fastest_int8_kernel,
    int4_weights,
    int8_weights,
    int8_weights_alone,
    int_mm,
    measured_kernels,
    quantizer,
    rounded,
)
from penstock.settings import Quantize

SIZES = [(64, 96), (520, 80), (1408, 512)]
KINDS = [Quantize.INT8, Quantize.INT8_WEIGHTS, Quantize.INT4]


def values(num_inputs: int, num_outputs: int, num_rows: int = 65) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations with some far larger than others, weights and biases."""
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    x[:, 3] *= 20
    weight = torch.randn(num_outputs, num_inputs, generator=generator) * torch.rand(num_outputs, 1, generator=generator)
    return x, weight, torch.randn(num_outputs, generator=generator)


@pytest.mark.shows(131)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
def test_an_int8_product_is_off_by_half_a_step_of_each_factor_at_most(num_inputs: int, num_outputs: int) -> None:
    x, weight, bias = values(num_inputs, num_outputs)
    y = int8_weights(weight, bias, fastest_int8_kernel()).output(x).double()
    whole, scales = rounded(weight)
    of_weights = x.double().abs().sum(1, keepdim=True) * scales / 2
    of_activations = x.double().abs().amax(1, keepdim=True) / 127 / 2 * (whole.double().abs().sum(1) * scales)
    exact = x.double() @ weight.double().t() + bias
    assert ((y - exact).abs() <= 1.001 * (of_weights + of_activations) + 1e-6).all()
    assert (y - exact).abs().max() > 0, "it is rounded"


@pytest.mark.shows(131)
@pytest.mark.parametrize("kind", [Quantize.INT8_WEIGHTS, Quantize.INT4])
def test_weights_alone_are_off_by_half_a_step_of_theirs_at_most(kind: Quantize) -> None:
    x, weight, bias = values(1408, 512)
    x = x.bfloat16()
    packed = quantizer(kind)(weight, bias)
    assert packed is not None
    y, exact = packed.output(x.float()).double(), x.double() @ weight.double().t() + bias
    if kind is Quantize.INT4:
        groups = weight.unflatten(1, (-1, 32))
        steps = (groups.amax(2) - groups.amin(2)) / 15
        of_weights = x.double().abs().unflatten(1, (-1, 32)).sum(2) @ steps.double().t() / 2
    else:
        of_weights = x.double().abs().sum(1, keepdim=True) * rounded(weight)[1] / 2
    # Scales, zero points and outputs are bf16, of 8 bits.
    of_bf16 = 2**-7 * (x.double().abs() @ weight.double().abs().t() + bias.abs())
    assert ((y - exact).abs() <= of_weights + of_bf16).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 97), (1408, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_that_row_alone(kind: Quantize, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = values(num_inputs, num_outputs)
    x, packed = x.to(dtype), quantizer(kind)(weight, bias)
    assert packed is not None
    whole = packed.output(x)
    assert whole.dtype is dtype
    for begin, end in ((4, 4), (0, 1), (7, 8), (3, 5), (8, 16), (1, 18), (20, 64)):
        assert torch.equal(packed.output(x[begin:end].clone()), whole[begin:end]), (begin, end)
    # Rows may have any leading shape.
    for shape in ((1,), (4, 2), (2, 2, 2)):
        rows = x[: math.prod(shape)]
        assert torch.equal(packed.output(rows.view(*shape, -1)), whole[: len(rows)].view(*shape, -1)), shape


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_makes_products_neither_larger_nor_smaller(kind: Quantize) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, 1024, generator=generator).double() for count in (64, 512))
    packed = quantizer(kind)(weight.float(), None)
    assert packed is not None
    exact, y = x @ weight.t(), packed.output(x.float()).double()
    # Errors of 32,768 products cancel: what is left of a 4-bit step of 0.25 is below 0.001.
    assert ((y * exact).sum() / exact.square().sum()).item() == pytest.approx(1, abs=0.003)


@pytest.mark.parametrize("num_inputs", [1, 31, 56, 520])
@pytest.mark.parametrize("kind", [Quantize.INT8, Quantize.INT8_WEIGHTS])
def test_any_number_of_inputs_will_do_in_8_bits(kind: Quantize, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, num_inputs, generator=generator) for count in (5, 24))
    packed = quantizer(kind)(weight, None)
    assert packed is not None
    exact = x @ weight.t()
    assert torch.allclose(packed.output(x), exact, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_rounded_part_by_part_are_those_rounded_at_once_and_stay_as_they_were(dtype: torch.dtype) -> None:
    weight_OI = torch.randn(700, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight_OI[5] = 0
    before = weight_OI.clone()
    found_OI, scales_O = rounded(weight_OI)
    wide = before.float()
    expected_O = (wide.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    assert torch.equal(scales_O, expected_O)
    assert torch.equal(found_OI, (wide / expected_O[:, None]).round().to(torch.int8))
    assert torch.equal(weight_OI, before)


def test_all_int8_kernels_that_are_exact_give_the_same_bits() -> None:
    x, weight, bias = values(520, 80)
    x[5] = 0
    found = {name: int8_weights(weight, bias, INT8_KERNELS[name]).output(x) for name in measured_kernels()}
    assert found
    first = next(iter(found.values()))
    assert all(torch.equal(y, first) for y in found.values()), list(found)
    assert torch.equal(first[5], bias), "a row of zeros gives the biases"


def test_a_kernel_that_loses_large_sums_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(weight_OI: torch.Tensor, scales_O: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            pairs = ((x[:, None] + 128) * weight_OI).unflatten(-1, (-1, 2)).sum(-1)
            return pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weight_OI.sum(1)

        return product

    monkeypatch.setattr("penstock.model.quantized.INT8_KERNELS", {"saturating": saturating})
    with pytest.raises(ValueError, match=r"no exact product of 8-bit numbers.*int4 are possible"):
        fastest_int8_kernel()


def test_int4_refuses_shapes_that_its_kernel_does_not_take() -> None:
    with pytest.raises(ValueError, match=r"48 inputs.*int8 is possible"):
        int4_weights(torch.zeros(96, 48), None)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights_take_the_bytes_that_their_numbers_take(kind: Quantize) -> None:
    _, weight, _ = values(1408, 512)
    packed = quantizer(kind)(weight, None)
    assert packed is not None
    bits = 4 + 32 / 32 if kind is Quantize.INT4 else 8
    assert packed.num_bytes == pytest.approx(weight.numel() * bits / 8, rel=0.01)


class Joint(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (Linear(64, size, True, OneDnnMatmul()) for size in (96, 32))
        for layer in (self.a, self.b):
            torch.nn.init.normal_(layer.weight)
            torch.nn.init.normal_(layer.bias)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        return ((self.a, self.b),)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_packed_weights_take_the_place_of_the_parameters_of_layers_that_read_the_same(kind: Quantize | None) -> None:
    torch.manual_seed(0)
    module, x = Joint(), torch.randn(5, 64)
    exact = module.a(x), module.b(x)
    assert fix_weights(module, None if kind is None else quantizer(kind)) == 2
    assert not list(module.parameters())
    found = outputs(x, (module.a, module.b))
    for layer, of_all, own in zip((module.a, module.b), found, exact, strict=True):
        assert torch.equal(layer(x), of_all)
        assert (
            torch.equal(of_all, own)
            if kind is None
            else torch.allclose(of_all, own, atol=0.15 * own.abs().max().item())
        )
        assert kind is None or not torch.equal(of_all, own)


def test_the_table_has_every_kind() -> None:
    weight = torch.randn(64, 64)
    for kind in Quantize:
        if kind is Quantize.NONE:
            with pytest.raises(ValueError, match="packs nothing; possible are int8"):
                quantizer(kind)
        else:
            packed: PackedWeights | None = quantizer(kind)(weight, None)
            assert packed is not None and packed.output(torch.ones(2, 64)).shape == (2, 64)
    assert quantizer(Quantize.INT8_WEIGHTS) is int8_weights_alone


def test_rows_of_any_shape_are_multiplied_by_torchs_own_product() -> None:
    """Which machines without FBGEMM and oneDNN use."""
    weight_OI, x = torch.randint(-127, 128, (8, 16), dtype=torch.int8), torch.randint(-127, 128, (3, 6, 16)).float()
    scales_O = torch.rand(8)
    expected = (x @ weight_OI.float().t()) * scales_O
    assert torch.equal(int_mm(weight_OI, scales_O)(x), expected)
