"""Norm, rotary positions, gate and loss against their formulas in double precision."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model import Sequences, cross_entropy_sum
from penstock.model.layers.dense import RMSNorm, gated, rotary, rotate
from penstock.model.loss import IGNORED
from penstock.settings import RopeScaling

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close_for_its_dtype(value: Tensor, exact: Tensor) -> None:
    """Within a few roundings of the dtype, relative to the largest value."""
    limit = 8 * torch.finfo(value.dtype).eps
    torch.testing.assert_close(value.double(), exact, rtol=limit, atol=limit * exact.abs().max().item())


@pytest.mark.parametrize(("dtype", "shape"), list(itertools.product(DTYPES, [(5, 16), (3, 4, 16)])), ids=str)
def test_norm_and_its_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = RMSNorm(16, 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(1 + randn(16, seed=1))
    x, grad = randn(*shape, dtype=dtype).requires_grad_(), randn(*shape, dtype=dtype, seed=2)
    exact_x, exact_weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    exact = exact_x / (exact_x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact_weight
    out = norm(x)
    assert out.dtype == dtype
    assert_close_for_its_dtype(out, exact)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), grad.double())
    for value, wanted in zip(torch.autograd.grad(out, (x, norm.weight), grad), expected, strict=True):
        assert value.dtype == dtype
        assert_close_for_its_dtype(value, wanted)


def test_norm_of_large_sixteen_bit_values_does_not_overflow() -> None:
    norm = RMSNorm(4, 1e-5).to(torch.float16)
    torch.nn.init.ones_(norm.weight)
    assert torch.equal(norm(torch.full((1, 4), 30000.0, dtype=torch.float16)), torch.ones(1, 4, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_turns_pairs_by_the_position(dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 7, 1000])
    sequences = Sequences.from_lengths((4,), positions=positions)
    x, grad = randn(4, 3, 8, dtype=dtype).requires_grad_(), randn(4, 3, 8, dtype=dtype, seed=1)
    out = rotate(x, rotary(8, 100.0, RopeScaling()).tables(sequences))
    assert out.dtype == dtype
    angles = positions[:, None].double() * 100.0 ** -(torch.arange(4).double() / 4)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def turned(value: Tensor, by: Tensor) -> Tensor:
        first, second = value.detach().double().chunk(2, -1)
        result = torch.complex(first, second) * by
        return torch.cat((result.real, result.imag), -1)

    # The tables are fp32 for every dtype: at position 1000 the angle's own rounding counts.
    limit = max(8 * torch.finfo(dtype).eps, 1000 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(out.double(), turned(x, turn), rtol=limit, atol=limit)
    (grad_x,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(grad_x.double(), turned(grad, turn.conj()), rtol=limit, atol=limit)


def test_tables_are_fp32_and_made_once_for_all_layers() -> None:
    sequences = Sequences.from_lengths((3,))
    tables = rotary(8, 1e4, RopeScaling()).tables(sequences)
    assert {table.dtype for table in tables} == {torch.float32}
    assert rotary(8, 1e4, RopeScaling()).tables(sequences) is tables
    assert rotary(8, 1e5, RopeScaling()).tables(sequences) is not tables


def test_gate_and_its_gradients() -> None:
    gate, up = randn(4, 6).requires_grad_(), randn(4, 6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(gated, (gate, up))
    assert torch.equal(gated(gate, up), F.silu(gate) * up)


class TestCrossEntropy:
    # More logits than one block holds in the last case.
    @pytest.mark.parametrize(("dtype", "shape"), list(itertools.product(DTYPES, [(1, 2), (9, 33), (5, 100_003)])))
    def test_sum_and_gradient(self, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        logits = (3 * randn(*shape)).to(dtype).requires_grad_()
        labels = torch.arange(shape[0]) * 7919 % shape[1]
        labels[1::3] = IGNORED
        exact_logits = logits.detach().double().requires_grad_()
        exact = F.cross_entropy(exact_logits, labels, reduction="sum")
        loss = cross_entropy_sum(logits, labels)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
        (grad,) = torch.autograd.grad(loss * 3, logits)
        (wanted,) = torch.autograd.grad(exact * 3, exact_logits)
        # A probability less one, times three: what cancels is of size three.
        limit = 3 * torch.finfo(dtype).eps
        # An exponent is rounded at the size of the normaliser's logarithm, and its rounding scales the probability.
        of_exponent = limit * max(1.0, exact_logits.logsumexp(1).max().item())
        torch.testing.assert_close(grad.double(), wanted, rtol=of_exponent, atol=limit)
        assert torch.equal(grad[labels == IGNORED], torch.zeros_like(grad[labels == IGNORED]))

    def test_all_ignored_gives_zero_and_no_gradient(self) -> None:
        logits = randn(4, 5).requires_grad_()
        loss = cross_entropy_sum(logits, torch.full((4,), IGNORED))
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros(4, 5, dtype=torch.float64))  # pyright: ignore[reportArgumentType]

    def test_keeps_only_the_logits(self) -> None:
        kept = []
        logits = randn(64, 50, dtype=torch.bfloat16).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            cross_entropy_sum(logits, torch.zeros(64, dtype=torch.int64))
        floats = [x for x in kept if x.is_floating_point()]
        assert [x.data_ptr() for x in floats] == [logits.data_ptr()]

    @pytest.mark.parametrize("shapes", [((4, 5), (3,)), ((2, 2, 5), (4,)), ((4, 5), (4, 1))])
    def test_shapes_that_do_not_fit_are_refused(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        with pytest.raises(ValueError, match="tokens, vocabulary"):
            cross_entropy_sum(torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64))
