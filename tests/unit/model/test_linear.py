"""Weight gradients that wait are bit for bit those that do not."""

import itertools
import re
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from penstock import Engine, PackedBatch
from penstock.model import (
    Driven,
    Linear,
    PendingGradient,
    WeightCasts,
    WeightGradients,
    defer,
    share_casts,
)
from penstock.model.cpu import onednn
from penstock.model.cpu.onednn import OneDnnMatmul, PaddedMatmul, fastest_matmul
from penstock.model.linear import TORCH, Matmul, switch_linears


class Foreign(nn.Module):
    """Somebody else's layers, which know nothing of Penstock; one of them is used twice."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 24, bias), nn.GELU(), nn.Linear(24, 8, bias))
        self.twice = nn.Linear(8, 8, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(x + self.inner(self.twice(x)))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert len(found) == len(list(module.parameters()))
    return found


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert left
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(("bias", "shape"), list(itertools.product([False, True], [(7, 8), (2, 5, 8), (3, 2, 5, 8)])))
@pytest.mark.parametrize("turned", [False, True])
def test_switched_linears_of_a_foreign_module_keep_their_bits(bias: bool, shape: tuple[int, ...], turned: bool) -> None:
    torch.manual_seed(0)
    module = Foreign(bias)
    batches = [torch.randn(shape) for _ in range(3)]
    if turned:
        batches = [x.transpose(0, -2) for x in batches]
    for x in batches:
        module(x).square().sum().backward()
    plain = gradients(module)
    module.zero_grad()

    owner = WeightGradients()
    assert switch_linears(module) == 3
    assert defer(module, owner) == 3
    queues: list[list[PendingGradient]] = [[] for _ in batches]
    for x, queue in zip(batches, queues, strict=True):
        loss = module(x).square().sum()
        with owner.deferred_to(queue):
            loss.backward()
    assert all(p.grad is None for p in module.parameters())
    for queue in queues:
        assert len(queue) == 4
        owner.drain(queue)
        assert not queue
    # A gradient that waits is added use by use to a sum of its own: the same order as autograd's.
    assert_same_bits(gradients(module), plain)


def test_nothing_is_kept_of_weights_that_are_computed() -> None:
    layer = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
    switch_linears(layer)
    defer(layer, WeightGradients())
    casts, weights = WeightCasts(), []
    assert share_casts(layer, casts) == 1
    with casts.kept(), torch.inference_mode():
        casts.pack(layer, torch.float32)
        for is_cast in (False, True):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                    layer(torch.randn(3, 8))
                weights.append(weakref.ref(layer.weight))
        layer(torch.randn(3, 8))
        assert [weight() for weight in weights] == [None] * 4


@pytest.mark.parametrize("layer_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_inputs_of_another_dtype_are_refused_as_torch_does(dtype: torch.dtype, layer_dtype: torch.dtype) -> None:
    plain, x = nn.Linear(8, 8).to(layer_dtype), torch.randn(3, 8, dtype=dtype, requires_grad=True)
    try:
        expected = plain(x)
    except RuntimeError as error:
        expected = str(error)
    switch_linears(plain)
    defer(plain, WeightGradients())
    if isinstance(expected, Tensor):
        assert torch.equal(plain(x), expected)
    else:
        for is_training in (True, False):
            with pytest.raises(RuntimeError) as refused, torch.set_grad_enabled(is_training):
                plain(x)
            assert str(refused.value) == expected
        engine = Engine.from_layers([nn.Embedding(8, 8, dtype=dtype), plain], hidden_size=8)
        with pytest.raises(RuntimeError, match=re.escape(expected)):
            engine.train_batch(PackedBatch.from_documents([torch.arange(3)]))


def test_an_owner_that_does_not_defer_changes_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, requires_grad=True)
    layer, reference = Linear(8, 5, bias=True), nn.Linear(8, 5)
    layer.load_state_dict(reference.state_dict())
    defer(layer, WeightGradients())
    (expected_x,) = torch.autograd.grad(reference(x).exp().sum(), x)
    reference(x).exp().sum().backward()
    assert torch.equal(layer(x), reference(x))
    assert torch.equal(torch.autograd.grad(layer(x).exp().sum(), x)[0], expected_x)
    layer(x).exp().sum().backward()
    assert_same_bits(gradients(layer), gradients(reference))


def test_frozen_parameters_get_no_gradient_and_a_needless_input_gradient_is_not_computed() -> None:
    layer, owner, queue = Linear(4, 3, bias=True), WeightGradients(), []
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.weight.requires_grad_(False)
    defer(layer, owner)
    y = layer(torch.randn(5, 4))
    with owner.deferred_to(queue):
        y.sum().backward()
    owner.drain(queue)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((3,), 5.0))


def test_sixteen_bit_parameters_accumulate_in_fp32_where_they_have_a_view() -> None:
    torch.manual_seed(0)
    layer, owner, queue = Linear(8, 8).to(torch.bfloat16), WeightGradients(), []
    nn.init.normal_(layer.weight)
    batches = [torch.randn(16, 8, dtype=torch.bfloat16) for _ in range(5)]
    expected = torch.zeros(8, 8)
    for x in batches:
        layer(x).sum().backward()
        assert layer.weight.grad is not None
        expected += layer.weight.grad
        layer.weight.grad = None
    total = torch.zeros(8, 8)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = total
    defer(layer, owner)
    for x in batches:
        y = layer(x)
        with owner.deferred_to(queue):
            y.sum().backward()
        owner.drain(queue)
    assert torch.equal(total, expected)
    assert layer.weight.grad is total


class Computed(nn.Module):
    """A linear layer that is called with weights and biases which other parameters give."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
        self.other, self.gain = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.own = nn.ParameterDict({"weight": torch.randn(8, 8), "bias": torch.randn(8)})

    def forward(self, x: Tensor) -> Tensor:
        own = {"weight": self.other.weight * self.gain, "bias": self.other.bias * self.gain}
        x = torch.func.functional_call(self.other, own, (self.linear(x),))
        return torch.func.functional_call(self.other, dict(self.own), (x,)).tanh()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hooked(kind: str) -> nn.Module:
    module = nn.Linear(8, 8)
    for parameter in module.parameters():
        if kind == "before":
            parameter.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        else:
            parameter.register_post_accumulate_grad_hook(halve)
    return module


@pytest.mark.parametrize("make", [Computed, partial(hooked, "before"), partial(hooked, "after")])
@pytest.mark.parametrize("late", [False, True], ids=["each in turn", "all forwards first"])
def test_what_autograd_alone_can_place_does_not_wait(make, late: bool) -> None:
    torch.manual_seed(0)
    first, module = nn.Linear(8, 8), make()
    whole = nn.Sequential(first, module)
    batches = [torch.randn(5, 8) for _ in range(3)]
    for x in batches:
        whole(x).square().sum().backward()
    plain = gradients(whole)
    whole.zero_grad()

    owner = WeightGradients()
    switch_linears(whole)
    defer(whole, owner)
    losses = [whole(x).square().sum() for x in batches] if late else [None for _ in batches]
    for x, loss in zip(batches, losses, strict=True):
        queue: list[PendingGradient] = []
        loss = whole(x).square().sum() if loss is None else loss
        with owner.deferred_to(queue):
            loss.backward()
        assert any(pending.weight is first.weight for pending in queue)
        owner.drain(queue)
    assert_same_bits(gradients(whole), plain)


def test_only_what_runs_inside_the_lane_waits() -> None:
    layer, owner, queue = Linear(2, 2), WeightGradients(), []
    nn.init.ones_(layer.weight)
    defer(layer, owner)

    def lane():
        loss = layer(torch.ones(1, 2)).sum()
        yield
        loss.backward()
        yield
        return "done"

    collected = Driven(lane(), partial(owner.deferred_to, queue))
    next(collected)
    assert owner.queue is None
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    next(collected)
    assert len(queue) == 1
    with pytest.raises(StopIteration) as stop:
        next(collected)
    assert stop.value.value == "done"


@pytest.mark.parametrize("fast", [fastest_matmul(), PaddedMatmul()])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 64])
def test_the_fastest_products_agree_with_double_precision(num_tokens: int, fast: Matmul) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(num_tokens, 48), torch.randn(32, 48), torch.randn(num_tokens, 32)
    for name, operands in {
        "output": (x, weight, torch.randn(32)),
        "input_gradient": (grad, weight),
        "weight_gradient": (grad, x),
    }.items():
        exact = getattr(TORCH, name)(*(operand.double() for operand in operands))
        torch.testing.assert_close(getattr(fast, name)(*operands).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_row_of_an_output_has_the_same_bits_among_any_number_of_rows() -> None:
    layer = Linear(96, 33, True, fastest_matmul())
    assert layer.has_apart_rows
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(70, 96)
    whole = layer(x)
    assert all(
        torch.equal(layer(x[first : first + n]), whole[first : first + n]) for n in range(71) for first in (0, 3)
    )


def test_where_onednn_adds_up_by_the_number_of_rows_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(self: OneDnnMatmul, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x, weight_OI, bias_O) * (1 + 1e-6 * len(x))

    monkeypatch.setattr(OneDnnMatmul, "output", by_rows)
    onednn._rows_are_apart.cache_clear()
    try:
        chosen = fastest_matmul()
        assert isinstance(chosen, PaddedMatmul) or not onednn._rows_are_apart(PaddedMatmul(), torch.float32)
        assert Linear(8, 8, matmul=chosen).has_apart_rows == isinstance(chosen, PaddedMatmul)
        assert not Linear(8, 8, matmul=OneDnnMatmul()).has_apart_rows
    finally:
        onednn._rows_are_apart.cache_clear()


@pytest.mark.parametrize("products", [TORCH, fastest_matmul()])
@pytest.mark.parametrize("waits", [False, True])
def test_autocast_computes_in_bf16_and_gives_fp32_gradients(products, waits: bool) -> None:
    torch.manual_seed(0)
    layer, owner, queue = Linear(16, 8, bias=True, matmul=products), WeightGradients(), []
    reference = nn.Linear(16, 8)
    layer.load_state_dict(reference.state_dict())
    if waits:
        defer(layer, owner)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), reference(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    F.mse_loss(expected.float(), torch.zeros(4, 8)).backward()
    with owner.deferred_to(queue):
        F.mse_loss(y.float(), torch.zeros(4, 8)).backward()
    owner.drain(queue)
    assert_same_bits(gradients(layer), gradients(reference))
