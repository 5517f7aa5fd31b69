"""On a GPU one kernel for all experts gives what a loop over them gives, and overlapped pairs what plain turns give."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import WeightGradients, decoder_units, defer
from penstock.model.layers.grouped_linear import (
    GroupedLinear,
    GroupedMatmul,
    GroupedMatmulKernel,
    RowGroups,
)
from penstock.settings import ExpertConfig, LearningRate, ModelConfig, OptimizerConfig, Precision, ScheduleConfig

BF16_EPS = torch.finfo(torch.bfloat16).eps
NUM_OUTPUTS, NUM_INPUTS = 48, 64
# Full and empty groups at either end and in between, one row, and sizes that are no multiple of anything.
SIZES = [(16, 32, 8), (0, 33, 1, 0, 0, 90, 7, 0), (1,), (0, 0, 5)]


def operands(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, RowGroups]:
    """Rows, their gradients and the weights in bfloat16, and which rows belong to which expert."""
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = (sum(sizes), NUM_INPUTS), (sum(sizes), NUM_OUTPUTS), (len(sizes), NUM_OUTPUTS, NUM_INPUTS)
    x_NI, grad_NO, weight_EOI = (torch.randn(s, generator=generator).to("cuda", torch.bfloat16) for s in shapes)
    return x_NI, grad_NO, weight_EOI, RowGroups(torch.tensor(sizes, device="cuda"), sum(sizes))


def computed(products: GroupedMatmul, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output and its two gradients, the weights' added to ones."""
    x_NI, grad_NO, weight_EOI, groups = operands(sizes)
    x_NI, grad_NO, weight_EOI = x_NI.to(dtype), grad_NO.to(dtype), weight_EOI.to(dtype)
    total_EOI = torch.ones_like(weight_EOI, dtype=torch.promote_types(dtype, torch.float32))
    products.add_weight_gradient(total_EOI, grad_NO, x_NI, groups)
    return products.output(x_NI, weight_EOI, groups), products.input_gradient(grad_NO, weight_EOI, groups), total_EOI


@contextmanager
def leftovers_of_nan(num_bytes: int = 1 << 22) -> Iterator[None]:
    """New tensors may find NaNs in the memory that they are given: what a kernel does not write is seen."""
    held = [torch.full((size // 4,), torch.nan, device="cuda") for size in (num_bytes, num_bytes // 16, 1 << 12) * 4]
    del held
    yield


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_kernel_for_all_experts_gives_what_a_loop_gives(sizes: tuple[int, ...]) -> None:
    x_NI, _, weight_EOI, _ = operands(sizes)
    assert GroupedMatmulKernel.takes(x_NI, weight_EOI)
    exact = computed(GroupedMatmul(), sizes, torch.float64)
    with leftovers_of_nan():
        at_once = computed(GroupedMatmulKernel(), sizes, torch.bfloat16)
    for found, wanted in zip(at_once, exact, strict=True):
        # Sums are fp32 and rounded once; the largest element bounds what cancels in a smaller one.
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2 * BF16_EPS * scale)
    empty = [expert for expert, size in enumerate(sizes) if not size]
    assert torch.equal(at_once[2][empty], torch.ones_like(at_once[2][empty])), "nobody went there"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weight_gradients_that_wait_are_those_that_do_not(sizes: tuple[int, ...]) -> None:
    x_NI, grad_NO, weight_EOI, groups = operands(sizes)
    found = []
    for waits in (False, True):
        stack = GroupedLinear(len(sizes), NUM_INPUTS, NUM_OUTPUTS, GroupedMatmulKernel()).cuda()
        stack.weight.data.copy_(weight_EOI)
        owner, queue = WeightGradients(), []
        defer(stack, owner)
        rows_NI = x_NI.clone().requires_grad_()
        out_NO = stack(rows_NI, groups)
        if waits:
            with owner.deferred_to(queue):
                out_NO.backward(grad_NO)
            assert len(queue) == 1 and stack.weight.grad is None
            WeightGradients.drain(queue)
        else:
            out_NO.backward(grad_NO)
        assert stack.weight.grad is not None and rows_NI.grad is not None
        found.append((out_NO.detach(), rows_NI.grad, stack.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.gpu
def test_rows_that_the_kernel_cannot_take_go_through_the_loop() -> None:
    x_NI, _, weight_EOI, groups = operands((3, 4))
    for rows, weight in ((x_NI.float(), weight_EOI.float()), (x_NI[:, :60], weight_EOI[..., :60])):
        assert not GroupedMatmulKernel.takes(rows, weight)
        rows, weight = rows.contiguous(), weight.contiguous()
        assert torch.equal(
            GroupedMatmulKernel().output(rows, weight, groups), GroupedMatmul().output(rows, weight, groups)
        )
    assert not GroupedMatmulKernel.takes(x_NI[:0], weight_EOI), "nobody came"
    assert GroupedMatmulKernel().output(
        x_NI[:0], weight_EOI, RowGroups(torch.zeros(2, dtype=torch.int64, device="cuda"), 0)
    ).shape == (0, NUM_OUTPUTS)


def trained(schedule: ScheduleConfig, precision: Precision) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of three steps of a small model with experts, and its weights after them."""
    experts = ExpertConfig(8, 2, 64, shared_size=64, num_dense_first=1, microbatch_loss=0.01)
    model = ModelConfig(128, 64, 128, 3, 2, experts=experts)
    options = EngineOptions(schedule, precision=precision, optimizer=OptimizerConfig(LearningRate(1e-3)), device="cuda")
    engine = Engine(decoder_units(model), model.hidden_size, options=options)
    generator = torch.Generator().manual_seed(0)
    batch = PackedBatch.from_documents([torch.randint(0, 128, (n,), generator=generator) for n in (33, 70, 12, 5, 41)])
    losses = [engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4)).loss for _ in range(3)]
    weights = {name: parameter.detach().clone() for name, parameter in engine.parameters().items()}
    engine.close()
    return losses, weights


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.BF16_AUTOCAST])
def test_overlapped_pairs_give_the_bits_of_plain_turns(precision: Precision) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        losses, weights = trained(ScheduleConfig("1f1b"), precision)
        combined = ScheduleConfig("combined")
        for pairs in (combined, replace(combined, overlap=False), replace(combined, early_release=True)):
            other_losses, other_weights = trained(pairs, precision)
            assert other_losses == losses
            assert len(weights) > 10
            assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    finally:
        torch.use_deterministic_algorithms(before)
