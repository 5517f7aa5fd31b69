"""Layers, losses and optimizers as users bring them, each a case of `test_what_users_bring.py`.

A case holds calls alone: each run makes all of it anew, so that nothing made by one is there in another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import (
    NO_LABEL,
    Metric,
    OptimizerConfig,
    PackedBatch,
    ParameterGroup,
    num_loss_tokens,
    token_cross_entropy,
)

WIDTH, VOCAB, LENGTH = 8, 16, 9
Factory = Callable[[Any], torch.optim.Optimizer]
Edit = Callable[[Mapping[str, Tensor], int], None]


def documents(step: int) -> PackedBatch:
    """Eight documents of nine tokens: 64 targets, by which a division is exact."""
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(8)])


def unequal(step: int) -> PackedBatch:
    """Eight documents of unequal lengths, with 64 targets."""
    generator = torch.Generator().manual_seed(step)
    lengths = (5, 3, 12, 9, 14, 6, 10, 13)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])


@dataclass(frozen=True)
class Case:
    """What a user brings."""

    layers: Callable[[], list[nn.Module]]
    loss: Callable[[], Callable[..., Any]] = lambda: token_cross_entropy
    weight: Callable[[PackedBatch], float] = num_loss_tokens
    optimizer: Factory = partial(torch.optim.SGD, lr=0.1)
    #: the settings that hold the factory, where a plain one does not do
    config: Callable[[], OptimizerConfig] | None = None
    #: what torch's optimizer is given, from the parameters by name
    groups: Callable[[dict[str, nn.Parameter]], list[Any]] = lambda named: list(named.values())
    scheduler: Callable[[Any], Any] | None = None
    batch: Callable[[int], PackedBatch] = documents
    precision: str = "fp32"
    num_steps: int = 2
    #: it is saved after two steps, and another engine goes on
    resumes: bool = False
    #: what the user does with the parameters between steps
    between: Callable[[], Edit] = lambda: lambda parameters, step: None
    options: Mapping[str, Any] = field(default_factory=dict)
    #: words of the sentence that refuses it, "" where it trains, in at least so many stages
    refused: str = ""
    refused_from: int = 1
    #: by how much it may differ from the plain loop, where the documentation promises no equal bits
    tolerance: float = 0.0


CASES: dict[str, Case] = {}

Make = Callable[[], nn.Module]


def model(*middle: Make) -> Callable[[], list[nn.Module]]:
    """Calls that make an embedding, the layers in the middle, and a head."""
    return lambda: [embedding(), *(make() for make in middle), head()]


def embedding() -> nn.Module:
    return nn.Embedding(VOCAB, WIDTH)


def head() -> nn.Module:
    return nn.Linear(WIDTH, VOCAB)


def square() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def in_rows(x: Tensor) -> Tensor:
    """[T, W] -> [sequences, LENGTH, W]."""
    return x.view(-1, LENGTH, x.shape[-1])


class Block(nn.Module):
    """A residual block of two linear layers, for others to change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


# ---- layers: state of their own


class ActNorm(nn.Module):
    """Scales and shifts that the first microbatch sets, as a flag of Python's remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.initialized: Any = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 0.1))
            self.mark()
        return (x + self.shift) * self.scale

    def mark(self) -> None:
        self.initialized = True


class ActNormBuffer(ActNorm):
    def __init__(self) -> None:
        super().__init__()
        del self.initialized
        self.register_buffer("initialized", torch.tensor(False))

    def mark(self) -> None:
        self.initialized.fill_(True)


CASES["ActNorm with a Python flag"] = Case(model(ActNorm, square, ActNorm))
CASES["ActNorm with a flag in a buffer"] = Case(model(ActNormBuffer, square, ActNormBuffer))


class RunningMean(nn.Module):
    """Takes away a running mean, which it keeps in a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class AssignedMean(RunningMean):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Warming(nn.Module):
    """A scale by a number of calls that a buffer counts and no checkpoint keeps."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (self.calls / 12).clamp(max=1)


CASES["a running mean in a buffer"] = Case(model(RunningMean, square, RunningMean))
CASES["a running mean that is assigned anew"] = Case(model(AssignedMean, square, AssignedMean))
CASES["a counting buffer that is not persistent"] = Case(model(Warming, Warming, Warming))
CASES["BatchNorm1d and GroupNorm"] = Case(
    model(lambda: nn.BatchNorm1d(WIDTH), square, lambda: nn.GroupNorm(2, WIDTH)), batch=unequal
)


class Counted(nn.Module):
    """A scale that grows with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = square(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (1 + 0.01 * self.calls)


class Rotary(nn.Module):
    """Attention whose tables are made when they are first needed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), square()
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table[0]) < len(x):
            angles = torch.outer(torch.arange(len(x)), 0.1 ** torch.arange(WIDTH // 2))
            self.table = angles.cos(), angles.sin()
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (self.turned(one, *(table[: len(x)] for table in self.table)) for one in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class PlainTensor(nn.Module):
    """A tensor in a plain attribute, which each call moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ema = square(), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.detach().mean(0)
        return self.linear(x - self.ema)


class Cached(nn.Module):
    """Positions from a table that lru_cache keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

        @lru_cache
        def table(length: int) -> Tensor:
            return torch.sin(torch.arange(length)[:, None] / 2.0 ** torch.arange(WIDTH))

        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table(len(x))


class Recurrent(nn.Module):
    """A GRU that begins where the microbatch before it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.gru(x[:, None], self.state)
        self.state = state.detach()
        return out[:, 0]


class MaskDictionary(nn.Module):
    """Attention with masks by length in a dictionary of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.masks = nn.MultiheadAttention(WIDTH, 2, batch_first=True), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if n not in self.masks:
            self.masks[n] = torch.full((n, n), float("-inf")).triu(1)
        rows = x[None]
        return x + self.attention(rows, rows, rows, attn_mask=self.masks[n], need_weights=False)[0][0]


class Keeps(Counted):
    """A counter that torch's state_dict keeps."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


CASES["a counter of calls"] = Case(model(Counted, Counted, Counted))
CASES["rotary tables made on first use"] = Case(model(Rotary, Rotary, Rotary))
CASES["a tensor in a plain attribute"] = Case(model(PlainTensor, PlainTensor, PlainTensor))
CASES["a table in an lru_cache"] = Case(model(Cached, Cached, Cached))
CASES["a recurrent state in a plain attribute"] = Case(model(Recurrent, Recurrent, Recurrent))
CASES["masks in a dictionary"] = Case(model(MaskDictionary, MaskDictionary, MaskDictionary))


class Remembers(nn.Module):
    """Mixes the mean of the last microbatches, in a list, into this one's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.queue = square(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.queue:
            y = y + 0.1 * torch.stack(self.queue).mean(0)
        self.queue = [*self.queue[-2:], x.detach().mean(0)]
        return y


CASES["a queue of tensors in a list"] = Case(model(Remembers, Remembers, Remembers))


class Codebook(nn.Module):
    """A vector quantizer: the nearest of some vectors, which move by running sums; gradients pass straight through."""

    book: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()
        self.register_buffer("book", torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y.detach(), self.book).argmin(-1)
        chosen = self.book[nearest]
        if self.training:
            with torch.no_grad():
                self.book[nearest[0]] = 0.9 * self.book[nearest[0]] + 0.1 * y[0]
        return y + (chosen - y).detach()


CASES["a codebook with running sums"] = Case(model(Codebook, square, Codebook))

# ---- layers: weights in forms of their own

OLD_WEIGHT_NORM = lambda: nn.utils.weight_norm(square())  # noqa: E731
NEW_WEIGHT_NORM = lambda: nn.utils.parametrizations.weight_norm(square())  # noqa: E731
OLD_SPECTRAL_NORM = lambda: nn.utils.spectral_norm(square())  # noqa: E731
NEW_SPECTRAL_NORM = lambda: nn.utils.parametrizations.spectral_norm(square())  # noqa: E731
ORTHOGONAL = lambda: nn.utils.parametrizations.orthogonal(square())  # noqa: E731
CASES["weight norm, old"] = Case(model(*[OLD_WEIGHT_NORM] * 3))
CASES["weight norm, parametrized"] = Case(model(*[NEW_WEIGHT_NORM] * 3))
CASES["spectral norm, old"] = Case(model(*[OLD_SPECTRAL_NORM] * 3))
CASES["spectral norm, parametrized"] = Case(model(*[NEW_SPECTRAL_NORM] * 3))
CASES["orthogonal weights"] = Case(model(*[ORTHOGONAL] * 3))


def pruned() -> nn.Module:
    import torch.nn.utils.prune as prune

    return prune.l1_unstructured(square(), "weight", amount=0.5)


CASES["pruned weights"] = Case(model(pruned, pruned, pruned))


class Rounded(torch.autograd.Function):
    """Rounds to quarters; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantized(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, Rounded.apply(self.weight), self.bias)  # type: ignore[arg-type]


class Standardized(nn.Linear):
    """Weight standardization, as in a subclass of torch's layer."""

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / (self.weight.std(1, keepdim=True) + 1e-5)
        return F.linear(input, weight, self.bias)


CASES["weights rounded by an autograd function"] = Case(model(*[partial(Quantized, WIDTH, WIDTH)] * 3))


class Twice(nn.Module):
    """Uses one linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh())


class Hyper(nn.Module):
    """A linear layer that functional_call gives the product of its weight and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.linear, {"weight": self.linear.weight * self.gain}, (x,))


CASES["a linear layer used twice"] = Case(model(Twice, Twice, Twice))
CASES["a linear layer called with another weight"] = Case(model(Hyper, Hyper, Hyper))
CASES["standardized weights"] = Case(model(*[partial(Standardized, WIDTH, WIDTH)] * 3))


class Filter(nn.Module):
    """A filter of complex parameters over the frequencies of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(in_rows(x), dim=1) * self.weight
        return x + torch.fft.irfft(waves, n=LENGTH, dim=1).reshape(x.shape)


class Double(nn.Module):
    """A layer of fp64 in a model of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.double()).tanh().to(x.dtype)


class Half(nn.Module):
    """A layer of bf16 in a model of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.bfloat16()).to(x.dtype)


class Narrow(nn.Module):
    """Hands bf16 to the next layer, which makes fp32 of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.float()).bfloat16()


class Widen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


CASES["complex parameters"] = Case(model(Filter, square, Filter))
CASES["a layer in fp64"] = Case(model(Double, square, Double))
CASES["a layer in bf16"] = Case(model(Half, square, Half))
CASES["bf16 between layers of fp32"] = Case(model(Narrow, Narrow, Widen))


def tied() -> list[nn.Module]:
    layers = model(square, square, square)()
    layers[-1].weight = layers[0].weight  # type: ignore[assignment]
    return layers


def one_layer_thrice() -> list[nn.Module]:
    block = Block()
    return [embedding(), block, block, block, head()]


CASES["tied weights"] = Case(tied)
CASES["one layer at three places"] = Case(one_layer_thrice, refused="is shared by layers on the ranks", refused_from=2)


class Shared(nn.Module):
    """A skip over several layers, by way of a dictionary that they share."""

    def __init__(self, shared: dict[str, Tensor], writes: bool) -> None:
        super().__init__()
        self.linear, self.shared, self.writes = square(), shared, writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.shared["x"] = x
            return self.linear(x)
        return self.linear(x) + self.shared["x"]


def skipping() -> list[nn.Module]:
    shared: dict[str, Tensor] = {}
    return [embedding(), Shared(shared, True), square(), Shared(shared, False), head()]


CASES["a skip by way of a shared dictionary"] = Case(skipping, refused="layers.3", refused_from=2)

# ---- layers: in place


class AddsInPlace(nn.Module):
    """A residual that changes the layer's very input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = square(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x += self.bias
        return self.linear(x)


class ScalesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5).clamp_(-1, 1))


CASES["activations in place"] = Case(
    model(square, partial(nn.ReLU, inplace=True), square, partial(nn.SiLU, inplace=True))
)
CASES["a residual added in place"] = Case(model(AddsInPlace, AddsInPlace, AddsInPlace))
CASES["an input scaled in place"] = Case(model(ScalesInPlace, ScalesInPlace, ScalesInPlace))


class WritesRows(nn.Module):
    """Writes into rows of its input's copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[::2] = y[::2].detach() * 0.5 + y[1::2][: len(y[::2])].mean(0)
        return y


CASES["rows written by index"] = Case(model(WritesRows, WritesRows, WritesRows))


class Turned(nn.Module):
    """Gives a transposed view, and takes an expanded gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T


class Averaged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand_as(x)


# Stages are handed tensors in rows, and other orders of memory are multiplied in another order.
CASES["transposed and expanded views between layers"] = Case(model(Turned, Averaged, Turned), tolerance=1e-6)
CASES["transposed and expanded views within a stage"] = Case(
    lambda: [nn.Sequential(embedding(), Turned(), Averaged(), Turned(), square()), nn.Tanh(), nn.Tanh(), head()]
)

# ---- layers: autograd, hooks, checkpoints, compilers


class Reversed(torch.autograd.Function):
    """The gradient is turned round and halved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -0.5 * gradients[0] * ctx.saved_tensors[0].sign()


class Reverses(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Reversed.apply(x))  # type: ignore[arg-type]


CASES["an autograd function"] = Case(model(Reverses, Reverses, Reverses))


class Checkpointed(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedOldWay(Checkpointed):
    reentrant = True


class CheckpointedDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(square(), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


CASES["checkpointed blocks"] = Case(model(Checkpointed, Checkpointed, Checkpointed))
CASES["checkpointed blocks, reentrant"] = Case(model(*[CheckpointedOldWay] * 3))
CASES["checkpointed dropout"] = Case(model(*[CheckpointedDropout] * 3))


def hooked(of: Callable[[nn.Module], object]) -> Make:
    """A block on which something has been hooked."""

    def make() -> nn.Module:
        block = Block()
        of(block)
        return block

    return make


def output_hook(block: Any) -> None:
    block.register_forward_hook(lambda module, args, out: out.mul(0.5))
    block.register_forward_pre_hook(lambda module, args: (args[0].add(0.1),))


def backward_hook(block: Any) -> None:
    block.register_full_backward_hook(lambda module, given, got: (given[0] * 0.5,))
    block.up.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))


def backward_pre_hook(block: Any) -> None:
    block.register_full_backward_pre_hook(lambda module, got: (got[0] * 0.5,))


def gradient_hook(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def accumulated_hook(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.register_post_accumulate_grad_hook(halve)


class HooksInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


CASES["hooks that change inputs and outputs"] = Case(model(*[hooked(output_hook)] * 3))
CASES["full backward hooks"] = Case(model(*[hooked(backward_hook)] * 3))
CASES["full backward hooks before"] = Case(model(*[hooked(backward_pre_hook)] * 3))
CASES["hooks on parameters' gradients"] = Case(model(*[hooked(gradient_hook)] * 3))
CASES["hooks after gradients are accumulated"] = Case(model(*[hooked(accumulated_hook)] * 3))
CASES["a hook on an output, made in forward"] = Case(model(HooksInside, HooksInside, HooksInside))
CASES["hooks on gradients with a split backward"] = Case(
    model(*[hooked(gradient_hook)] * 3), options={"schedule": "zb-h1"}
)
CASES["weight norm with a split backward"] = Case(model(*[NEW_WEIGHT_NORM] * 3), options={"schedule": "zb-h1"})
CASES["a counter with recomputation"] = Case(model(RunningMean, Block, RunningMean), options={"recompute": "full"})


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Block(), backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


CASES["a compiled layer"] = Case(model(Compiled, square))


class Ensemble(nn.Module):
    """The mean of three networks, whose stacked weights vmap runs at once."""

    def __init__(self) -> None:
        super().__init__()
        stacked, _ = torch.func.stack_module_state([square() for _ in range(3)])
        self.names = list(stacked)
        self.stacked = nn.ParameterList([nn.Parameter(p.detach()) for p in stacked.values()])
        self.base = [square().to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        def one(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.base[0], parameters, (x,))

        return torch.vmap(one)(dict(zip(self.names, self.stacked))).mean(0)


class Adapts(nn.Module):
    """One step of learning within forward (test-time training), by torch.func.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        step = torch.func.grad(lambda weight: F.mse_loss(x @ weight, x.flip(0)))(self.weight)
        return x @ (self.weight - 0.1 * step)


class InnerGradient(nn.Module):
    """A field that is the gradient of an energy, by torch.autograd.grad with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.linear(at).tanh().pow(2).sum()
            (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        return x - 0.1 * slope


class Equilibrium(nn.Module):
    """A fixed point, whose gradient a hook finds by more of autograd within the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(3):
                z = self.one(z, x)
        at = z.requires_grad_()
        again, z = self.one(at, x.detach()), self.one(z.detach(), x)

        def solved(gradient: Tensor) -> Tensor:
            total = gradient
            for _ in range(3):
                total = gradient + torch.autograd.grad(again, at, total, retain_graph=True)[0]
            return total

        z.register_hook(solved)
        return z

    def one(self, z: Tensor, x: Tensor) -> Tensor:
        return (0.5 * self.linear(z) + x).tanh()


class Divergence(nn.Module):
    """Adds the diagonal of a field's Jacobian for each token, by torch.func, as flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> Tensor:
        jacobian = torch.vmap(torch.func.jacrev(lambda one: self.linear(one).tanh()))(x)
        return x + jacobian.diagonal(dim1=-2, dim2=-1)


CASES["a Jacobian by vmap and jacrev"] = Case(model(Divergence, Divergence, Divergence))
CASES["a deep equilibrium"] = Case(model(Equilibrium, Equilibrium, Equilibrium))
CASES["an ensemble by vmap and functional_call"] = Case(model(Ensemble, Ensemble))
CASES["a step of learning within forward"] = Case(model(Adapts, Adapts))
# The two gradients of a weight are added to the sum one after the other.
CASES["the gradient of an energy as a layer"] = Case(model(*[InnerGradient] * 3), tolerance=1e-6)

# ---- layers: frozen, unused, random


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def half_frozen() -> nn.Module:
    block = Block()
    block.up.requires_grad_(False)
    return block


class Detached(Block):
    """A layer under no_grad, as of a frozen backbone."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


CASES["a frozen embedding and first layers"] = Case(
    lambda: [frozen(embedding()), frozen(Block()), half_frozen(), Block(), head()]
)
CASES["frozen layers at the end"] = Case(lambda: [embedding(), Block(), half_frozen(), frozen(Block()), frozen(head())])


class StopsGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


CASES["a layer that detaches its input"] = Case(model(Block, StopsGradient, Block))
CASES["a backbone under no_grad"] = Case(
    lambda: [frozen(embedding()), frozen(Detached()), frozen(Detached()), Block(), head()]
)


class LayerDrop(Block):
    """Leaves itself out at random."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else super().forward(x)


class OwnGenerator(Block):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


CASES["dropout"] = Case(model(Block, lambda: nn.Dropout(0.3), Block, lambda: nn.Dropout(0.3)))
CASES["LayerDrop by torch's numbers"] = Case(model(LayerDrop, LayerDrop, LayerDrop))
CASES["noise from a generator of the layer's own"] = Case(model(OwnGenerator, OwnGenerator, OwnGenerator))


class Experts(nn.Module):
    """Each token goes to the best of four experts, by a routing of the layer's own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList([square() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


class BalancedExperts(Experts):
    """Its balancing loss travels beside the tokens."""

    def forward(self, x: Tensor, balance: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        share = self.router(x).softmax(-1).pow(2).sum(-1)
        return super().forward(x), share if balance is None else balance + share


class HeadBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), balance


def balanced(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Any:
    logits, balance = output
    return token_cross_entropy(logits, microbatch) + 0.01 * balance.sum()


CASES["experts with a routing of their own"] = Case(model(Experts, Experts, Experts), batch=unequal)
CASES["experts whose balancing loss travels beside the tokens"] = Case(
    lambda: [embedding(), BalancedExperts(), BalancedExperts(), HeadBeside()], loss=lambda: balanced
)

# ---- layers: streams and structures


class Scalar(nn.Module):
    """Passes a number without a dimension on, beside the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor, size: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.pow(2).mean() + (0 if size is None else size)


CASES["a number without a dimension beside the tokens"] = Case(
    lambda: [embedding(), Scalar(), Scalar(), HeadBeside()], loss=lambda: balanced
)


class IntoDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": self.linear(x), "first": x}


class InDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor, first: Tensor) -> dict[str, Tensor]:
        return {"x": self.linear(x) + 0.5 * first, "first": first}


class OutOfDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return self.head(x + first)


CASES["a dictionary between layers"] = Case(
    lambda: [embedding(), IntoDictionary(), InDictionary(), InDictionary(), OutOfDictionary()]
)


class FirstWithIds(nn.Embedding):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), input


class LaterWithIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.linear = embedding(), square()

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + self.again(ids), ids


class LastWithIds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.head(x)


CASES["token ids beside the stream"] = Case(
    lambda: [FirstWithIds(VOCAB, WIDTH), LaterWithIds(), LaterWithIds(), LastWithIds()]
)


class WithNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor, cache: None = None) -> tuple[Tensor, None]:
        return self.linear(x), cache


CASES["None between layers"] = Case(lambda: [embedding(), WithNone(), WithNone(), LastWithIds()], refused="None")


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = square()

    def forward(self, x: Tensor, skips: tuple[Tensor, ...] = ()) -> tuple[Tensor, tuple[Tensor, ...]]:
        y = self.linear(x)
        return y, (*skips, y)


class JoinsNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def forward(self, x: Tensor, skips: tuple[Tensor, ...]) -> Tensor:
        return self.head(x + sum(skips))


CASES["a tuple within a tuple between layers"] = Case(
    lambda: [embedding(), Nested(), Nested(), JoinsNested()], refused="tuple"
)


class Trees(nn.Module):
    """Lists, dictionaries and parameters within each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([square(), nn.PReLU()]) for _ in range(2)])
        self.named = nn.ModuleDict({"a": nn.LayerNorm(WIDTH), "b": nn.RMSNorm(WIDTH)})
        self.gains = nn.ParameterList([torch.ones(WIDTH), torch.ones(1)])
        self.more = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(WIDTH))})

    def forward(self, x: Tensor, *, factor: float = 0.5) -> Tensor:
        for linear, activation in self.layers:  # type: ignore[misc]
            x = x + factor * activation(linear(self.named["a"](x)))
        return self.named["b"](x) * self.gains[0] * self.gains[1] + self.more["bias"]


CASES["lists and dictionaries of modules and parameters"] = Case(model(Trees, Trees))


class ByKey(Block):
    """Asks for a key of the batch."""

    def forward(self, x: Tensor, ages: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * ages[:, None]


def with_ages(step: int) -> PackedBatch:
    batch = documents(step)
    return batch.with_key("ages", torch.linspace(0.5, 1.5, batch.num_tokens))


CASES["a key of the batch in each layer"] = Case(model(ByKey, ByKey, ByKey), batch=with_ages)

# ---- layers: torch's own


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.layer(in_rows(x), src_mask=mask, is_causal=True).reshape(x.shape)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.2)
        self.memory = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = in_rows(x)
        return self.layer(rows, self.memory.expand(len(rows), -1, -1)).reshape(x.shape)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(in_rows(x))[0].reshape(x.shape)


class CausalConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)
        self.pointwise = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(in_rows(x).transpose(1, 2), (2, 0))
        return x + self.pointwise(self.depthwise(rows)).transpose(1, 2).reshape(x.shape)


class Patches(nn.Module):
    """Images [T, 3, 4, 4] to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, WIDTH, 2, stride=2), nn.BatchNorm2d(WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.conv(images)).relu().mean((2, 3))


def images(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    pictures = [torch.randn(4, 3, 4, 4, generator=generator) for _ in range(8)]
    labels = [torch.randint(0, VOCAB, (4,), generator=generator) for _ in range(8)]
    return PackedBatch.from_sequences({"tokens": pictures, "labels": labels})


CASES["nn.TransformerEncoderLayer"] = Case(model(EncoderLayer, EncoderLayer, EncoderLayer))
CASES["nn.TransformerDecoderLayer with dropout"] = Case(model(DecoderLayer, DecoderLayer))
CASES["nn.LSTM"] = Case(model(Lstm, Lstm))
CASES["convolutions over each sequence"] = Case(model(CausalConv, CausalConv, CausalConv))
CASES["images"] = Case(lambda: [Patches(), Block(), Block(), head()], batch=images)
CASES["lazy layers"] = Case(model(lambda: nn.LazyLinear(WIDTH), square), refused="layer 1 has 'weight' without a shape")


# ---- layers: weights and state in unusual hands


class Adapted(nn.Linear):
    """A subclass of torch's layer with a low-rank term beside it (LoRA by hand)."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.a.T @ self.b.T


class WeightBeside(nn.Module):
    """Uses a linear layer, and its weight once more by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.linear.weight


class TiedWithin(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


class Renormed(nn.Module):
    """Keeps its weight's rows short, within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.copy_(self.linear.weight.renorm(2, 0, 0.5))
        return self.linear(x)


class Followed(nn.Module):
    """A teacher that follows its student at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) + 0.1 * self.teacher(x)


class Table(nn.Module):
    """Positions that are computed when they are first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, n: int) -> Tensor:
        if len(self.table) < n:
            self.table = torch.sin(torch.arange(n)[:, None] / 2.0 ** torch.arange(WIDTH))
        return self.table[:n]


class SharesTable(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.linear, self.table = square(), table

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table(len(x)))


def sharing_a_table() -> list[nn.Module]:
    table = Table()
    return [embedding(), SharesTable(table), SharesTable(table), SharesTable(table), head()]


class LossWithin(nn.Module):
    """A head that computes the tokens' losses itself, from labels that it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.head = head()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels, reduction="none", ignore_index=NO_LABEL)


def summed(output: Tensor, microbatch: PackedBatch) -> Tensor:
    return output.sum()


CASES["a low-rank term in a subclass of nn.Linear"] = Case(model(Adapted, Adapted, Adapted))
CASES["a linear layer's weight beside it"] = Case(model(*[WeightBeside] * 3), tolerance=1e-6)
CASES["one weight in two linear layers of a layer"] = Case(model(TiedWithin, TiedWithin, TiedWithin))
CASES["weights kept short within forward"] = Case(
    model(Renormed, Renormed, Renormed), refused="changes in place what a backward needs", refused_from=2
)
CASES["a teacher that follows its student"] = Case(
    model(Followed, Followed, Followed), refused="changes in place what a backward needs", refused_from=2
)
CASES["an embedding with max_norm and padding"] = Case(
    lambda: [nn.Embedding(VOCAB, WIDTH, padding_idx=0, max_norm=1.0), Block(), Block(), head()]
)
# They are summed as dense ones.
CASES["sparse gradients"] = Case(
    lambda: [nn.Embedding(VOCAB, WIDTH, sparse=True), Block(), Block(), head()], tolerance=1e-6
)
CASES["a module that layers share, with a table made on first use"] = Case(sharing_a_table)
CASES["a loss within the head"] = Case(lambda: [embedding(), Block(), Block(), LossWithin()], loss=lambda: summed)
CASES["layers without parameters"] = Case(lambda: [embedding(), nn.Tanh(), nn.Identity(), nn.Tanh(), head()])


# ---- losses


class HeadWithTemperature(nn.Module):
    """A head that gives the loss a temperature beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.temperature = head(), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x), self.temperature


def tempered(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Tensor:
    return token_cross_entropy(output[0] / output[1], microbatch)


CASES["a parameter of the loss in the last layer"] = Case(
    lambda: [embedding(), Block(), Block(), HeadWithTemperature()], loss=lambda: tempered
)


class Centered(nn.Module):
    """A loss with a running center of the logits in a buffer."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(VOCAB))

    def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        loss = token_cross_entropy(logits - self.center, microbatch)
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean(0)
        return loss


class Smoothed(nn.Module):
    """torch's own module with label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.1, ignore_index=NO_LABEL)

    def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return self.loss(logits, microbatch["labels"])


CASES["a loss with a running buffer"] = Case(model(Block, Block), loss=Centered)
CASES["a loss as a module with label smoothing"] = Case(model(Block, Block), loss=Smoothed)


def with_z_loss(logits: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    labels = microbatch["labels"]
    seen = logits[labels != NO_LABEL]
    z = seen.logsumexp(-1)
    hits = (seen.argmax(-1) == labels[labels != NO_LABEL]).float()
    metrics = {"z": Metric(z.max(), "max"), "accuracy": Metric(hits.mean(), "mean", len(hits))}
    return token_cross_entropy(logits, microbatch) + 1e-2 * z.pow(2).sum(), metrics


def focal(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    one = F.cross_entropy(logits, microbatch["labels"], reduction="none", ignore_index=NO_LABEL)
    return ((1 - (-one).exp()) ** 2 * one).sum()


def masked(step: int) -> PackedBatch:
    """Half of the positions count."""
    batch = documents(step)
    return batch.with_key("mask", (torch.arange(batch.num_tokens) % LENGTH < 4).float())


def over_mask(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    one = F.cross_entropy(logits, microbatch["labels"], reduction="none", ignore_index=NO_LABEL)
    return (one * microbatch["mask"]).sum()


def mask_weight(microbatch: PackedBatch) -> float:
    return float(microbatch["mask"].sum())


CASES["a z-loss that reports numbers"] = Case(model(Block, Block), loss=lambda: with_z_loss)
CASES["a focal loss"] = Case(model(Block, Block), loss=lambda: focal, batch=unequal)
CASES["a loss over the positions of a mask"] = Case(
    model(Block, Block), loss=lambda: over_mask, weight=mask_weight, batch=masked
)


def contrastive(output: Tensor, microbatch: PackedBatch) -> Tensor:
    """Both halves of each sequence belong together, among all of the microbatch."""
    rows = F.normalize(in_rows(output), dim=-1)
    one, other = rows[:, :4].mean(1), rows[:, 4:].mean(1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)), reduction="sum")


def num_sequences(microbatch: PackedBatch) -> float:
    return float(len(microbatch.sequence_lengths()))


def preferences(output: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    """Pairs in turn, chosen and rejected, against the reference's log-probabilities in the batch."""
    labels = microbatch["labels"].clamp(min=0)
    taken = output.log_softmax(-1).gather(-1, labels[:, None])[:, 0] * (microbatch["labels"] != NO_LABEL)
    gain = (taken - microbatch["reference"]).view(-1, 2, LENGTH).sum(-1)
    margin = 0.5 * (gain[:, 0] - gain[:, 1])
    return -F.logsigmoid(margin).sum(), {"margin": Metric(margin.detach().sum())}


def pairs(step: int) -> PackedBatch:
    """Four items of two sequences each."""
    generator = torch.Generator().manual_seed(step)
    sequences = [[torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(2)] for _ in range(4)]
    batch = PackedBatch.from_documents(sequences)
    return batch.with_key("reference", torch.randn(batch.num_tokens, generator=generator) - 3)


def num_pairs(microbatch: PackedBatch) -> float:
    return float(microbatch.num_items)


CASES["a contrastive loss"] = Case(model(Block, Block), loss=lambda: contrastive, weight=num_sequences)
CASES["preferences between pairs"] = Case(model(Rotary, Block), loss=lambda: preferences, weight=num_pairs, batch=pairs)


def regression(output: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.huber_loss(output[:, 0], microbatch["target"], reduction="sum")


def targets(step: int) -> PackedBatch:
    batch = documents(step)
    return batch.with_key("target", torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(step)))


def in_double(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return token_cross_entropy(logits.double(), microbatch)


def of_one_element(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return token_cross_entropy(logits, microbatch)[None]


def without_sum(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.cross_entropy(logits, microbatch["labels"], reduction="none", ignore_index=NO_LABEL)


def distilled(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    teacher = microbatch["teacher"].softmax(-1)
    return F.kl_div(logits.log_softmax(-1), teacher, reduction="sum")


def with_teacher(step: int) -> PackedBatch:
    batch = documents(step)
    return batch.with_key(
        "teacher", torch.randn(batch.num_tokens, VOCAB, generator=torch.Generator().manual_seed(step))
    )


CASES["a regression"] = Case(model(Block, Block), loss=lambda: regression, batch=targets)
CASES["a distillation from the batch"] = Case(model(Block, Block), loss=lambda: distilled, batch=with_teacher)
CASES["a loss in fp64"] = Case(model(Block, Block), loss=lambda: in_double)
CASES["a loss of one element"] = Case(model(Block, Block), loss=lambda: of_one_element)


CASES["a loss for each token"] = Case(model(Block, Block), loss=lambda: without_sum, refused="shape")


class Curriculum:
    """A loss that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        self.calls += 1
        return token_cross_entropy(logits, microbatch) * (1 + 0.01 * self.calls)


CASES["a loss that counts its calls"] = Case(model(Block, Block), loss=Curriculum)

# ---- optimizers of torch

THREE = model(Block, Block)
MATRICES = lambda: [  # noqa: E731
    embedding(),
    *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)),
    nn.Linear(WIDTH, VOCAB, bias=False),
]
TORCH: dict[str, Factory] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "Adam with amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.05, t0=2),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "SGD that maximizes": partial(torch.optim.SGD, lr=0.01, maximize=True),
}
CASES |= {f"torch's {name}": Case(THREE, optimizer=factory) for name, factory in TORCH.items()}
CASES["torch's Muon"] = Case(MATRICES, optimizer=partial(torch.optim.Muon, lr=0.02))
CASES["torch's AdamW with a tensor as rate"] = Case(
    THREE, optimizer=lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)
)
CASES["torch's AdamW in bf16"] = Case(THREE, optimizer=TORCH["AdamW"], precision="bf16")
CASES["torch's AdamW in fp64"] = Case(
    lambda: [layer.double() for layer in THREE()], optimizer=TORCH["AdamW"], precision="fp64"
)
CASES["torch's SGD in bf16"] = Case(THREE, optimizer=TORCH["SGD with momentum"], precision="bf16")
CASES["torch's LBFGS"] = Case(THREE, optimizer=torch.optim.LBFGS, refused="closure")
CASES["torch's SparseAdam on sparse gradients"] = Case(
    lambda: [nn.Embedding(VOCAB, WIDTH, sparse=True), square().requires_grad_(False), head().requires_grad_(False)],
    optimizer=partial(torch.optim.SparseAdam, lr=0.01),
    refused="sparse",
)

# ---- optimizers of others, as they are pasted into a script


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (one, two) = state["exp_avg"], group["betas"]
                p.add_((average * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"])
                average.mul_(two).add_(p.grad, alpha=1 - two)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW: steps and sums of weights run in param_groups."""

    def __init__(self, params: Any, lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, warmup: int = 2):
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "warmup": warmup,
            "k": 0,
            "weight_sum": 0.0,
            "lr_max": -1.0,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            k, beta1, beta2 = group["k"], group["beta1"], group["beta2"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup"])
            group["lr_max"] = lr_max = max(lr, group["lr_max"])
            group["weight_sum"] = weight_sum = group["weight_sum"] + lr_max**2
            share = lr_max**2 / weight_sum
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"], state["v"] = p.clone(), torch.zeros_like(p)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                gradient = p.grad / (state["v"] / (1 - beta2 ** (k + 1))).sqrt().add_(1e-8)
                p.lerp_(state["z"], share).add_(gradient, alpha=lr * (beta1 * (1 - share) - 1))
                state["z"].sub_(gradient, alpha=lr)
            group["k"] = k + 1


class Prodigy(torch.optim.Optimizer):
    """Its rate d, in param_groups, is estimated from all parameters together."""

    divides = "model"

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-3):
        super().__init__(params, {"lr": lr, "d": d0, "d_numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        numerator, denominator = self.param_groups[0]["d_numerator"], 0.0
        d = self.param_groups[0]["d"]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["s"], state["p0"] = torch.zeros_like(p), p.clone()
                numerator += d * d * float((p.grad * (state["p0"] - p)).sum())
                state["s"].add_(p.grad, alpha=d * d)
                denominator += float(state["s"].abs().sum())
                p.add_(p.grad.sign(), alpha=-group["lr"] * d)
        for group in self.param_groups:
            group["d_numerator"] = numerator
            group["d"] = max(d, 1.5 * d, numerator / denominator) if denominator else d


class Shampoo(torch.optim.Optimizer):
    """Preconditioners of shapes of their own, and a count of steps in each group."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad
                if p.ndim == 2:
                    if not state:
                        state["left"], state["right"] = torch.eye(len(p)) * 0.1, torch.eye(p.shape[1]) * 0.1
                    state["left"] += gradient @ gradient.T
                    state["right"] += gradient.T @ gradient
                    gradient = self.root(state["left"]) @ gradient @ self.root(state["right"])
                p.add_(gradient, alpha=-group["lr"] / group["steps"] ** 0.5)

    @staticmethod
    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class EightBit(torch.optim.Optimizer):
    """Momentum in 8 bits, in blocks with a scale for each."""

    def __init__(self, params: Any, lr: float = 0.05, block: int = 16):
        super().__init__(params, {"lr": lr, "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, block = self.state[p], group["block"]
                blocks = -(-p.numel() // block)
                if not state:
                    state["codes"] = torch.zeros(blocks, block, dtype=torch.int8)
                    state["scales"] = torch.zeros(blocks, 1)
                flat = F.pad(p.grad.flatten(), (0, blocks * block - p.numel())).view(blocks, block)
                momentum = 0.9 * state["codes"].float() * state["scales"] + flat
                state["scales"].copy_(momentum.abs().amax(1, keepdim=True) / 127)
                state["codes"].copy_((momentum / state["scales"].clamp(min=1e-12)).round())
                update = (state["codes"].float() * state["scales"]).flatten()[: p.numel()].view_as(p)
                p.sub_(update, alpha=group["lr"])


class History(torch.optim.Optimizer):
    """Keeps the last gradients in a list."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", [])
                    last.append(p.grad.clone())
                    del last[:-2]
                    p.sub_(sum(last) / len(last), alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and goes back half of the way after every second step."""

    def __init__(self, params: Any, make: Factory, every: int = 2):
        self.inner = make(params)
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.every, self.count = self.inner.param_groups, every, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s.lerp_(p, 0.5)
                    p.copy_(s)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, whose step needs a closure."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "Sam needs a closure"


class NormClipped(torch.optim.SGD):
    """Scales its step by the norm of all gradients that it sees."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(everything, 0.1)
        super().step(closure)


CASES["Lion"] = Case(THREE, optimizer=Lion)
CASES["schedule-free AdamW"] = Case(THREE, optimizer=ScheduleFree, num_steps=5)
CASES["Prodigy"] = Case(THREE, optimizer=Prodigy, num_steps=4, refused="steps all parameters together", refused_from=2)
CASES["Shampoo"] = Case(THREE, optimizer=Shampoo)
CASES["momentum in 8 bits"] = Case(THREE, optimizer=EightBit)
CASES["a list of gradients in the state"] = Case(THREE, optimizer=History)
AHEAD = partial(Lookahead, make=partial(torch.optim.AdamW, lr=0.01))
CASES["Lookahead around AdamW"] = Case(THREE, optimizer=AHEAD, num_steps=4)
CASES["SAM with its closure"] = Case(THREE, optimizer=Sam, refused="closure")


class Both(torch.optim.Optimizer):
    """Muon for matrices and AdamW for the rest, as one optimizer."""

    def __init__(self, params: Any):
        everything = [p for group in params for p in group["params"]] if isinstance(params[0], dict) else list(params)
        matrices, rest = ([p for p in everything if (p.ndim == 2) == wanted] for wanted in (True, False))
        self.inner = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
        self.inner += [torch.optim.AdamW(rest, lr=0.01)] if rest else []
        super().__init__([group for one in self.inner for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner:
            one.step()


class Scaled(torch.optim.SGD):
    """Reads a factor of its rate from an attribute of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * getattr(p, "rate_factor", 1.0))


def with_factors(layers: Callable[[], list[nn.Module]] = THREE) -> list[nn.Module]:
    made = layers()
    for p in (*made[0].parameters(), *made[1].parameters()):
        p.rate_factor = 0.1  # type: ignore[attr-defined]
    return made


class NoisyByName(torch.optim.SGD):
    """Langevin dynamics: noise on each step, drawn from a seed of the parameter's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
                generator = torch.Generator().manual_seed(1000 * p.number + step)
                p.add_(torch.randn(p.shape, generator=generator), alpha=1e-3)


def with_numbers() -> list[nn.Module]:
    layers = THREE()
    for number, p in enumerate(p for layer in layers for p in layer.parameters()):
        p.number = number  # type: ignore[attr-defined]
    return layers


CASES["Muon and AdamW in one optimizer"] = Case(
    THREE, optimizer=Both, refused="ConfigError: the optimizer Both made 2 parameter groups"
)
CASES["factors in attributes of parameters"] = Case(with_factors, optimizer=partial(Scaled, lr=0.1))
CASES["factors of tied parameters"] = Case(partial(with_factors, tied), optimizer=partial(Scaled, lr=0.1))
CASES["noise from a parameter's own seed in the optimizer's step"] = Case(
    with_numbers, optimizer=partial(NoisyByName, lr=0.1)
)


class StepHook:
    """AdamW whose hook before each step adds noise to gradients by a count of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        optimizer.register_step_pre_hook(self.before)
        return optimizer

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(1 + 0.5 * self.steps)


CASES["a hook before each step"] = Case(THREE, optimizer=lambda groups: StepHook()(groups))


class Each(torch.optim.Optimizer):
    """Steps each parameter by `one`, by default as SGD."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            self.one(p, self.state[p])

    def one(self, p: Any, state: dict[Any, Any]) -> None:
        p.sub_(0.1 * p.grad)


class NewMemory(Each):
    def one(self, p: Any, state: dict[Any, Any]) -> None:
        p.grad = 2 * p.grad
        p.data = p.data - 0.05 * p.grad


class NewGradient(Each):
    def one(self, p: Any, state: dict[Any, Any]) -> None:
        p.grad = p.grad + 0.01 * p
        p.sub_(0.1 * p.grad)


class NoGradient(Each):
    def one(self, p: Any, state: dict[Any, Any]) -> None:
        super().one(p, state)
        p.grad.zero_()
        p.grad = None


class KeepsGradients(Each):
    """Keeps gradients themselves, and steps by those of the step before."""

    def one(self, p: Any, state: dict[Any, Any]) -> None:
        state["last"], state["now"] = state.get("now"), p.grad
        if state["last"] is not None:
            p.sub_(0.1 * state["last"])


class Wide(Each):
    """Keeps its values in another type than the parameter's."""

    def one(self, p: Any, state: dict[Any, Any]) -> None:
        if not state:
            state["momentum"], state["wide"] = torch.zeros_like(p), p.double()
        assert state["wide"].dtype is torch.float64
        state["momentum"].mul_(0.9).add_(p.grad)
        state["wide"].sub_(state["momentum"].double(), alpha=0.1)
        p.copy_(state["wide"])


def with_hook(groups: Any, hook: Callable[[torch.optim.Optimizer], None]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.register_step_pre_hook(lambda own, args, kwargs: hook(own))
    return optimizer


def fading(optimizer: Any) -> None:
    """Scales gradients by a count that it keeps in the groups."""
    for group in optimizer.param_groups:
        group["count"] = group.get("count", 0) + 1
        for p in group["params"]:
            p.grad.div_(group["count"])


KEEPING = {
    "parameters given other memory by the optimizer": NewMemory,
    "gradients replaced by the optimizer": NewGradient,
    "gradients removed by the optimizer": NoGradient,
    "gradients themselves in the state": KeepsGradients,
    "state in fp64": Wide,
    "a count that a hook keeps in the groups": partial(with_hook, hook=fading),
}
CASES |= {name: Case(THREE, optimizer=made, num_steps=4, resumes=True) for name, made in KEEPING.items()}

# ---- rates, groups, and what a user does between steps

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    "OneCycleLR": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=5),
    "LambdaLR": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        [2],
    ),
}
CASES |= {
    f"{name} on AdamW": Case(THREE, optimizer=partial(torch.optim.AdamW, lr=0.01), scheduler=scheduler, num_steps=4)
    for name, scheduler in SCHEDULERS.items()
}


def decayed_apart(named: dict[str, nn.Parameter]) -> list[Any]:
    """The embedding slowly, norms and biases without decay, the rest with."""
    first = [p for name, p in named.items() if name.startswith("layers.0.")]
    small = [p for name, p in named.items() if p.ndim < 2]
    rest = [p for name, p in named.items() if p.ndim >= 2 and not name.startswith("layers.0.")]
    return [
        {"params": first, "lr": 0.001, "weight_decay": 0.0},
        {"params": small, "weight_decay": 0.0},
        {"params": rest},
    ]


ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
CASES["groups with rates of their own"] = Case(
    THREE,
    optimizer=ADAMW,
    groups=decayed_apart,
    config=lambda: OptimizerConfig(
        factory=ADAMW,
        clip_norm=0.0,
        groups=(
            ParameterGroup("layers.0.*", learning_rate=0.001, weight_decay=0.0),
            ParameterGroup("*.bias", weight_decay=0.0),
            ParameterGroup("*.norm.weight", weight_decay=0.0),
        ),
    ),
)


def average() -> Edit:
    """Weights are exchanged for their running means after the second step."""
    means: dict[str, Tensor] = {}

    def edit(parameters: Mapping[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for name, p in parameters.items():
                mean = means.setdefault(name, p.float().clone())
                mean.lerp_(p.float(), 0.5)
                if step == 1:
                    p.copy_(mean)

    return edit


def clamp() -> Edit:
    def edit(parameters: Mapping[str, Tensor], step: int) -> None:
        with torch.no_grad():
            for p in parameters.values():
                p.clamp_(-0.2, 0.2)

    return edit


def begin_anew() -> Edit:
    """Weights of the head are drawn again after the first step."""

    def edit(parameters: Mapping[str, Tensor], step: int) -> None:
        for name, p in parameters.items():
            if step == 0 and name.endswith("down.weight"):
                p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)

    return edit


def thaw() -> Edit:
    """Blocks rest for one step, and go on with the moments they had."""

    def edit(parameters: Mapping[str, Tensor], step: int) -> None:
        for name, p in parameters.items():
            if ".up." in name:
                p.requires_grad_(step != 1)

    return edit


for precision in ("fp32", "bf16"):
    for name, between in (
        ("a swap of weights for their means", average),
        ("a clamp", clamp),
        ("weights drawn anew", begin_anew),
    ):
        CASES[f"{name} between steps, {precision}"] = Case(
            THREE, optimizer=partial(torch.optim.AdamW, lr=0.05), between=between, precision=precision, num_steps=4
        )
CASES["layers that rest for a step"] = Case(
    THREE, optimizer=partial(torch.optim.AdamW, lr=0.01), between=thaw, num_steps=4
)
CASES["clipping by the norm of all gradients"] = Case(
    THREE,
    optimizer=partial(NormClipped, lr=0.5),
    config=lambda: OptimizerConfig(factory=partial(torch.optim.SGD, lr=0.5), clip_norm=0.1),
    tolerance=1e-6,
)
CASES["forwards under autocast"] = Case(THREE, precision="bf16-autocast")
RESUMED = {
    "torch's AdamW": TORCH["AdamW"],
    "schedule-free AdamW": ScheduleFree,
    "Shampoo": Shampoo,
    "momentum in 8 bits": EightBit,
    "a list of gradients in the state": History,
}
CASES |= {
    f"{name}, saved and resumed": Case(THREE, optimizer=made, num_steps=4, resumes=True)
    for name, made in RESUMED.items()
}
CASES["layers with buffers, saved and resumed"] = Case(model(RunningMean, RunningMean), num_steps=4, resumes=True)
CASES["layers with extra state, saved and resumed"] = Case(model(Keeps, Keeps), num_steps=4, resumes=True)


# ---- layers that are called once more, to recompute them


RECOMPUTED: dict[str, Make] = {
    "dropout": lambda: nn.Sequential(square(), nn.Dropout(0.3)),
    "a counting buffer that is not persistent": Warming,
    "a running mean that is assigned anew": AssignedMean,
    "BatchNorm1d": lambda: nn.Sequential(square(), nn.BatchNorm1d(WIDTH)),
    "spectral norm": NEW_SPECTRAL_NORM,
    "spectral norm of the older kind": OLD_SPECTRAL_NORM,
    "a flag and weights from the first microbatch": ActNorm,
    "rotary tables made on first use": Rotary,
    "masks in a dictionary": MaskDictionary,
    "weights that forward keeps short": Renormed,
}
for number, (name, make) in enumerate(RECOMPUTED.items()):
    # Every other with two stages a rank.
    options = {"recompute": "full"} | ({"schedule": "zb-v"} if number % 2 else {})
    CASES[f"{name}, recomputed"] = Case(model(make, make, make, make), options=options)
# ---- weights that are computed from parameters, in other schedules

COMPUTED = model(OLD_WEIGHT_NORM, pruned, Hyper, Hyper)
CASES |= {
    f"computed weights, {schedule}": Case(COMPUTED, options={"schedule": schedule})
    for schedule in ("zb-h1", "zb-v", "combined-1f1b")
}
CASES["computed weights, recomputed"] = Case(COMPUTED, options={"recompute": "full"})


# ---- parameters that are given other memory or another form


class Rebinds(Block):
    """Gives its scale other memory in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data = self.scale.data.clamp(max=0.9)
        return super().forward(x) * self.scale


class Widens(Rebinds):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.data = self.scale.data.double()
        return Block.forward(self, x) * self.scale.float()


def rebind(change: Callable[[Tensor], Tensor]) -> Edit:
    """Weights are given other memory after the first step."""

    def edit(parameters: Mapping[str, Tensor], step: int) -> None:
        for name, p in parameters.items():
            if step == 0 and name.endswith("up.weight"):
                p.data = change(p.data)

    return edit


REBOUND = {
    "with other memory in forward": Case(model(*[Rebinds] * 4), num_steps=3),
    "with other memory between steps": Case(
        model(*[Block] * 4), num_steps=3, between=partial(rebind, lambda own: own * 0.9)
    ),
    "of another dtype between steps": Case(
        model(*[Block] * 4),
        between=partial(rebind, lambda own: own.double()),
        refused="up.weight was given the form [16, 8] of torch.float64, but is trained as [16, 8] of torch.float32",
    ),
    "of another shape between steps": Case(
        model(*[Block] * 4),
        between=partial(rebind, lambda own: own[:4].clone()),
        refused="up.weight was given the form [4, 8] of torch.float32, but is trained as [16, 8] of torch.float32",
    ),
    "of another dtype in forward": Case(
        model(*[Widens] * 4), refused="scale was given the form [8] of torch.float64, but is trained as [8]"
    ),
}
CASES |= {
    f"a parameter {name}, {schedule}": replace(case, options={"schedule": schedule})
    for name, case in REBOUND.items()
    for schedule in ("1f1b", "zb-v")
}


# ---- a module in two layers


class Around(nn.Module):
    """Adds what a module gives, scaled by a constant."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.scale


def in_two_layers(make: Make, *more: int) -> list[nn.Module]:
    """Two layers, neither of which is the other, hold a module: one of them deep within, at several places.

    Of three stages they are in the first and the last.
    """
    held = make()
    within = nn.Sequential(held, nn.Tanh(), *(held for _ in more))
    return [embedding(), Around(held), *(square() for _ in range(5)), Around(within), head()]


CASES["a linear layer in two layers"] = Case(lambda: in_two_layers(square, 1))
CASES["a module with a constant in two layers"] = Case(lambda: in_two_layers(lambda: Around(square())))
CASES["a parametrized layer in two layers"] = Case(lambda: in_two_layers(NEW_WEIGHT_NORM, 1), resumes=True, num_steps=4)

# ---- complex tensors that torch conjugates by a mark


class Conjugated(nn.Module):
    """Keeps complex numbers that bear the mark from the first step on."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("kept", torch.randn(WIDTH, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        self.kept = (self.kept * (0.9 + 0.3j)).conj()
        y = x * self.weight + self.kept
        return y.real + 2.0 * y.imag


class ConjugatedMomentum(torch.optim.SGD):
    """Its momentum bears the mark."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            state["momentum"] = (0.9 * state["momentum"] + gradient if state else gradient.clone()).conj()
            parameter.sub_(0.1 * state["momentum"])


MARKED: dict[str, Case] = {
    "a buffer": Case(model(*[Conjugated] * 4), num_steps=4, resumes=True),
    "the optimizer": Case(
        model(*[Filter] * 4), num_steps=4, resumes=True, optimizer=partial(ConjugatedMomentum, lr=0.1)
    ),
}
CASES |= {
    f"{place} conjugated by a mark, {schedule}": replace(case, options={"schedule": schedule})
    for place, case in MARKED.items()
    for schedule in ("1f1b", "zb-v")
}
