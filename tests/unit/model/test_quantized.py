"""Products of quantized weights: their error, their rows, their kernels, and what takes the place of parameters."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benchmarks.int8 import AVX2, INSTRUCTIONS

from penstock.model import Linear
from penstock.model.cpu.onednn import OneDnnMatmul
from penstock.model.cpu.quantized import (
    IN_PARTS,
    INT8_KERNELS,
    SHAPES,
    _measured,
    _medians,
    fbgemm,
    in_parts,
    int4_weights,
    int8_weights,
    int8_weights_alone,
    int_mm,
    measured_seconds,
    onednn,
    quantizer,
    rounded,
    seconds_of_all,
    times_as_slow,
)
from penstock.model.linear import PackedWeights, fix_weights, outputs
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
    packed = quantizer(Quantize.INT8)(weight, bias)
    assert packed is not None
    y = packed.output(x).double()
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


def kernels_here() -> list[str]:
    """The exact ones of this processor."""
    names = {name for of_shape in measured_seconds(torch.float32, Quantize.INT8) for name in of_shape}
    return sorted(name.removeprefix("int8 by ") for name in names if name.startswith("int8 by "))


@pytest.mark.parametrize("num_inputs", [520, 4097])
def test_all_int8_kernels_that_are_exact_give_the_same_bits(num_inputs: int) -> None:
    x, weight, bias = values(num_inputs, 80)
    x[5], x[6], weight[0], bias[0] = 0, 1, 3, 0
    names = {*kernels_here(), *(name for name in INT8_KERNELS if name.endswith(IN_PARTS))}
    found = {name: int8_weights(weight, bias, INT8_KERNELS[name]).output(x) for name in names}
    first = next(iter(found.values()))
    assert all(torch.equal(y, first) for y in found.values()), list(found)
    assert torch.equal(first[5], bias), "a row of zeros gives the biases"


def adversaries(num_inputs: int, num_outputs: int = 40) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Activations from -127 to 127 and weights whose sums of two products exceed 16 bits, or come close to it."""
    generator = torch.Generator().manual_seed(num_inputs)

    def whole(*shape: int, most: int = 127) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).to(torch.int8)

    x, signs = whole(9, num_inputs).float(), torch.tensor([1, -1]).repeat(num_outputs)[:num_outputs, None]
    x[0], x[1], x[2, ::2] = 127, -127, 127
    largest = (127 * signs).expand(num_outputs, num_inputs).to(torch.int8)
    # Neighbours of 127 and 1 fill 16 bits to the last; 127 and 2 do not fit.
    full = (torch.where(torch.arange(num_inputs) % 2 == 0, 127, 1) * signs).to(torch.int8)
    over = (torch.where(torch.arange(num_inputs) % 2 == 0, 127, 2) * signs).to(torch.int8)
    one_pair = whole(num_outputs, num_inputs, most=60)
    one_pair[-1, -2:] = 127
    # Sums beyond 2**24, of which fp32 holds not every one.
    beyond = whole(num_outputs, num_inputs, most=13) + 114
    x[3:6] = whole(3, num_inputs, most=13).float() + 114
    normal = (34 * torch.randn(num_outputs, num_inputs, generator=generator)).round().clamp(-127, 127).to(torch.int8)
    # With 128 more, fp32 rounds these to halves before they become whole numbers.
    between = whole(9, num_inputs, most=126).float().add_(0.5)
    between[::2] = between[::2].nextafter(torch.tensor(-200.0))
    return {
        "any": (x, whole(num_outputs, num_inputs)),
        "largest": (x, largest),
        "full": (x, full),
        "over": (x, over),
        "small": (x, whole(num_outputs, num_inputs, most=64)),
        "one pair": (x, one_pair),
        "beyond": (x, beyond),
        "normal": (x, normal),
        "between": (between, normal),
    }


def exact(x: torch.Tensor, weight_OI: torch.Tensor, scales_O: torch.Tensor) -> torch.Tensor:
    """Whole numbers, rounded to fp32 once, and then scaled."""
    return (((x + 128).round() - 128).long() @ weight_OI.long().t()).float() * scales_O


@pytest.mark.shows(175)
@pytest.mark.parametrize("num_inputs", [1, 57, 512, 5000])
@pytest.mark.parametrize("kernel", [fbgemm, onednn])
def test_products_in_parts_are_those_of_whole_numbers(
    kernel: Callable[[torch.Tensor, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]], num_inputs: int
) -> None:
    scales_O = torch.rand(40, generator=torch.Generator().manual_seed(0))
    for name, (x, weight_OI) in adversaries(num_inputs).items():
        product, expected = in_parts(weight_OI, scales_O, kernel), exact(x, weight_OI, scales_O)
        assert torch.equal(product(x), expected), name
        assert torch.equal(product(x[:1]), expected[:1]), f"{name}, one row"
        assert torch.equal(product(x.view(3, 3, -1)), expected.view(3, 3, -1)), f"{name}, rows of any shape"


def test_what_does_not_fit_16_bits_is_multiplied_apart() -> None:
    rows: list[int] = []

    def counted(weight_OI: torch.Tensor, scales_O: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        pairs = weight_OI[:, : weight_OI.shape[1] // 2 * 2].int().unflatten(1, (-1, 2)).sum(2)
        assert pairs.abs().max() * 255 < 2**15
        product = fbgemm(weight_OI, scales_O)
        return lambda x: rows.append(len(x)) or product(x)

    for name, (x, weight_OI) in adversaries(512).items():
        rows.clear()
        in_parts(weight_OI, torch.ones(40), counted)(x)
        # One product where all fits or nearly all; two where much does not.
        assert rows == ([9] if name in ("full", "small", "one pair", "normal", "between") else [9, 9]), name


def bits_here() -> dict[str, Any]:
    """What a process with these instructions finds: which kernels are exact, and what int8 products give."""
    found, scales_O = dict[str, Any](), torch.rand(40, generator=torch.Generator().manual_seed(0))
    for num_inputs in (57, 2048, 5000):
        for name, (x, weight_OI) in adversaries(num_inputs).items():
            whole = exact(x, weight_OI, scales_O)
            for kernel in ("FBGEMM", *kernels_here()):
                same = torch.equal(INT8_KERNELS[kernel](weight_OI, scales_O)(x), whole)
                found[f"{kernel}: {name}, {num_inputs}"] = same
        x, weight, bias = values(num_inputs, 80)
        packed = quantizer(Quantize.INT8)(weight, bias)
        assert packed is not None
        found[f"product, {num_inputs}"] = packed.output(x).double().cumsum(0)[-1].tolist()
    return found | {"kernels": kernels_here()}


@pytest.mark.shows(175)
@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="not an x86 processor")
def test_a_processor_with_avx2_alone_gives_the_same_bits_where_fbgemm_itself_overflows() -> None:
    program = "import json; from tests.unit.model.test_quantized import bits_here; print(json.dumps(bits_here()))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=os.environ | INSTRUCTIONS[AVX2], capture_output=True, text=True, timeout=120, check=True
    )
    limited, whole = json.loads(done.stdout.splitlines()[-1]), bits_here()
    kernels = limited.pop("kernels")
    assert "FBGEMM" not in kernels and f"FBGEMM{IN_PARTS}" in kernels
    assert not limited["FBGEMM: largest, 2048"], "the limits hold: these sums are lost"
    for name, value in limited.items():
        if name.startswith("product"):
            assert value == whole[name], name
        elif not name.startswith("FBGEMM: "):
            assert value, name


def test_a_kernel_that_loses_large_sums_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(weight_OI: torch.Tensor, scales_O: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            pairs = ((x[:, None] + 128) * weight_OI).unflatten(-1, (-1, 2)).sum(-1)
            return pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weight_OI.sum(1)

        return product

    monkeypatch.setattr("penstock.model.cpu.quantized.INT8_KERNELS", {"saturating": saturating})
    monkeypatch.setattr("penstock.model.cpu.quantized.SHAPES", ((64, 32),))
    monkeypatch.setattr("penstock.model.cpu.quantized._measured", _measured.__wrapped__)
    with pytest.raises(ValueError, match=r"no exact product of 8-bit numbers.*int4 are possible"):
        quantizer(Quantize.INT8)


@pytest.mark.shows(175)
def test_kernels_are_chosen_by_shape_and_by_what_all_ranks_have_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def named(name: str, weight_OI: torch.Tensor, scales_O: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: used.append(name) or int_mm(weight_OI, scales_O)(x)

    monkeypatch.setattr("penstock.model.cpu.quantized.INT8_KERNELS", {name: partial(named, name) for name in "abc"})
    # The second rank has no c.
    views = [
        [{"fp32": [1.0, 2.0], "int8 by a": [1.0, 0.0], "int8 by b": [0.0, 2.0], "int8 by c": [0.1, 0.1]}] * 2,
        [
            {"fp32": [1.0, 2.0], "int8 by a": [0.0, 2.0], "int8 by b": [1.5, 0.0]},
            {"fp32": [1.0, 2.0], "int8 by a": [9.0, 0.0], "int8 by b": [1.0, 0.0]},
        ],
    ]
    agreed = seconds_of_all(views)
    assert agreed == seconds_of_all(views[::-1])
    pack = quantizer(Quantize.INT8, agreed)
    for num_inputs, num_outputs in ((64, 64), SHAPES[0], SHAPES[1], (2048, 8192)):
        packed = pack(torch.ones(num_outputs, num_inputs), None)
        assert packed is not None
        packed.output(torch.ones(1, num_inputs))
    assert used == ["a", "a", "b", "b"]
    assert times_as_slow(Quantize.AUTO, torch.float32, agreed) == 0.5
    assert times_as_slow(Quantize.INT8, torch.float32, agreed) == 0.5
    assert times_as_slow(Quantize.INT8, torch.float32, agreed, only_reads=True) == 0.5
    assert times_as_slow(Quantize.INT8, torch.float32, [{"fp32": [9.0, 1.0], "int8 by a": [1.0, 2.0]}] * 2, True) == 2


def test_a_product_that_is_disturbed_now_and_then_keeps_its_place() -> None:
    turns = iter(range(100))

    def act(seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            end = time.thread_time() + seconds * (20 if next(turns) % 5 == 0 else 1)
            while time.thread_time() < end:
                pass
            return x

        return product

    found = _medians({"slow": act(0.003), "fast": act(0.001)}, torch.ones(1), 5)
    assert found["fast"] < found["slow"] < 0.01


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

    joint_layers = (("a", "b"),)


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
        if kind in (Quantize.NONE, Quantize.AUTO):
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
