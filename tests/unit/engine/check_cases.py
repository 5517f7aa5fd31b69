"""Layers, losses and optimizers that `penstock.check` is asked about: some break a contract, the others are right.

They are written from docs/guides/check.md, not from the engine.
"""

from __future__ import annotations

import itertools
import random
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock import Metric, OptimizerConfig, PackedBatch, ParameterGroup
from penstock.engine.comparison import Cause

WIDTH, VOCAB = 8, 16
Model = list[nn.Module]


def batch() -> PackedBatch:
    """Six documents of unequal lengths, with a number for each token and each document."""
    draw = torch.Generator().manual_seed(3)
    found = PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=draw) for n in (5, 3, 7, 4, 6, 2)])
    found = found.with_key("weight", torch.rand(found.num_tokens, generator=draw), "token")
    return found.with_key("reward", torch.rand(6, generator=draw), "item")


class Block(nn.Module):
    """A layer of two products, whose `change` each case replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x + self.down(torch.tanh(self.up(x))))

    def change(self, x: Tensor) -> Tensor:
        return x


def model(first: nn.Module | None = None, second: nn.Module | None = None) -> Model:
    """An embedding and a block in one stage, a block and a head in the other."""
    torch.manual_seed(5)
    blocks = [Block(), Block()]
    return [nn.Embedding(VOCAB, WIDTH), first or blocks[0], second or blocks[1], nn.Linear(WIDTH, VOCAB)]


def nats(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.cross_entropy(logits, microbatch["labels"], reduction="sum")


@dataclass(frozen=True)
class Case:
    """What is given to `penstock.check`, and what it is to name."""

    name: str
    #: makes the layers, and the other arguments
    make: Callable[[], tuple[Model, dict[str, Any]]]
    #: the causes of which the report is to name one; none for parts that are right
    causes: tuple[Cause, ...] = ()


BREACHES: list[Case] = []
RIGHT: list[Case] = []


def breach(*causes: Cause) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def enter(make: Callable[[], Any]) -> Callable[[], Any]:
        BREACHES.append(Case(make.__name__.replace("_", " "), partial(_given, make), causes))
        return make

    return enter


def right(make: Callable[[], Any]) -> Callable[[], Any]:
    RIGHT.append(Case(make.__name__.replace("_", " "), partial(_given, make)))
    return make


def _given(make: Callable[[], Any]) -> tuple[Model, dict[str, Any]]:
    torch.manual_seed(7)
    made = make()
    return made if isinstance(made, tuple) else (made, {})


# ---- Breaches: what a layer keeps without declaring it


@breach(Cause.UNDECLARED, Cause.CALLS)
def a_layer_counts_its_calls() -> Model:
    class Counts(Block):
        calls = 0

        def change(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / self.calls

    return model(Counts())


@breach(Cause.UNDECLARED)
def a_running_mean_in_an_attribute() -> Model:
    class Running(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.zeros(WIDTH)

        def change(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    return model(second=Running())


@breach(Cause.UNDECLARED)
def a_scale_set_by_the_first_rows_seen() -> tuple[Model, dict[str, Any]]:
    class Starts(Block):
        scale: Tensor | None = None

        def change(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = x.detach().std()
            return x / self.scale

    # Weights move on, so that rows seen later have another scale.
    return model(Starts()), {"optimizer": partial(torch.optim.SGD, lr=0.5)}


@breach(Cause.UNDECLARED)
def a_buffer_that_is_not_persistent_but_changes() -> Model:
    class Steps(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def change(self, x: Tensor) -> Tensor:
            self.seen += len(x)
            return x * (1 + 0.01 * self.seen)

    return model(Steps())


@breach(Cause.UNDECLARED)
def a_list_of_what_was_seen() -> Model:
    class Remembers(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def change(self, x: Tensor) -> Tensor:
            self.seen.append(x.detach().mean(0))
            return x + torch.stack(self.seen).mean(0)

    return model(second=Remembers())


@breach(Cause.UNDECLARED)
def a_generator_of_torch_of_its_own() -> Model:
    class Noise(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def change(self, x: Tensor) -> Tensor:
            return x + torch.randn(x.shape, generator=self.generator)

    return model(Noise())


@breach(Cause.UNDECLARED)
def a_generator_of_python_of_its_own() -> Model:
    class Skips(Block):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(1)

        def change(self, x: Tensor) -> Tensor:
            return x * self.random.random()

    return model(second=Skips())


@breach(Cause.UNDECLARED)
def a_generator_of_numpy_of_its_own() -> Model:
    class Skips(Block):
        def __init__(self) -> None:
            super().__init__()
            self.random = np.random.default_rng(1)

        def change(self, x: Tensor) -> Tensor:
            return x * self.random.random()

    return model(Skips())


@breach(Cause.UNDECLARED, Cause.CALLS)
def a_loss_that_counts_its_calls() -> tuple[Model, dict[str, Any]]:
    class Warms(nn.Module):
        calls = 0

        def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
            self.calls += self.training
            return nats(logits, microbatch) * min(1.0, self.calls / 6)

    return model(), {"loss_fn": Warms()}


@breach(Cause.UNDECLARED)
def a_baseline_kept_by_the_loss() -> tuple[Model, dict[str, Any]]:
    kept = {"baseline": 0.0}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        loss = F.cross_entropy(logits, microbatch["labels"], reduction="none")
        if torch.is_grad_enabled():
            kept["baseline"] = 0.5 * kept["baseline"] + 0.5 * float(loss.detach().mean())
        return (loss * (loss.detach() - kept["baseline"])).sum()

    return model(), {"loss_fn": loss_fn}


@breach(Cause.UNDECLARED, Cause.REFUSED)
def an_extra_state_that_cannot_be_set() -> Model:
    class Counts(Block):
        calls = 0

        def change(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x / self.calls

        def get_extra_state(self) -> int:
            return self.calls

    return model(Counts())


# ---- Breaches: what one run leaves for the next, and chance


@breach(Cause.CHANCE)
def a_counter_of_the_class() -> Model:
    class Counts(Block):
        calls: ClassVar[int] = 0

        def change(self, x: Tensor) -> Tensor:
            Counts.calls += 1
            return x * (1 + 0.01 * Counts.calls)

    return model(Counts())


_COUNT = itertools.count(1)


@breach(Cause.CHANCE)
def a_counter_of_the_script() -> Model:
    class Counts(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * (1 + 0.01 * next(_COUNT))

    return model(second=Counts())


@breach(Cause.CHANCE)
def numbers_of_the_system() -> Model:
    class Skips(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * random.SystemRandom().random()

    return model(Skips())


@breach(Cause.CHANCE)
def a_new_generator_of_numpy_at_each_call() -> Model:
    class Skips(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * np.random.default_rng().random()

    return model(Skips())


@breach(Cause.CHANCE)
def the_time_of_day() -> Model:
    class Late(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * (time.perf_counter_ns() % 1000)

    return model(Late())


# ---- Breaches: what layers leave for others


class Leaves(Block):
    """Leaves what it makes in a place."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.place = place

    def change(self, x: Tensor) -> Tensor:
        self.place["x"] = x
        return x


class Takes(Leaves):
    """Takes what another has left."""

    def change(self, x: Tensor) -> Tensor:
        return x + self.place["x"]


@breach(Cause.LEFT_BEHIND)
def a_skip_connection_by_a_shared_dict() -> Model:
    place: dict[str, Any] = {}
    return model(Leaves(place), Takes(place))


@breach(Cause.LEFT_BEHIND)
def a_mask_by_a_shared_dict() -> Model:
    class Masks(Leaves):
        def change(self, x: Tensor) -> Tensor:
            self.place["x"] = (x.detach() > 0).float()
            return x

    place: dict[str, Any] = {}
    return model(Masks(place), Takes(place))


_PLACE: dict[str, Any] = {}


@breach(Cause.LEFT_BEHIND)
def a_mask_by_a_global_name() -> Model:
    class Masks(Block):
        def change(self, x: Tensor) -> Tensor:
            _PLACE["mask"] = x.detach().mean(1, keepdim=True)
            return x

    class Reads(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * _PLACE["mask"]

    return model(Masks(), Reads())


@breach(Cause.LEFT_BEHIND)
def a_mask_by_an_attribute_of_a_class() -> Model:
    class Masks(Block):
        mask: ClassVar[Any] = None

        def change(self, x: Tensor) -> Tensor:
            Masks.mask = x.detach().mean(1, keepdim=True)
            return x

    class Reads(Block):
        def change(self, x: Tensor) -> Tensor:
            return x * Masks.mask

    return model(Masks(), Reads())


@breach(Cause.LEFT_BEHIND)
def a_skip_connection_by_a_closure() -> Model:
    place: list[Tensor] = []
    first, second = Block(), Block()

    def leave(module: nn.Module, given: Any, output: Any) -> None:
        place.append(output)

    def take(module: nn.Module, given: Any, output: Any) -> Tensor:
        return output + place.pop()

    first.register_forward_hook(leave)
    second.register_forward_hook(take)
    return model(first, second)


@breach(Cause.LEFT_BEHIND)
def a_mask_for_the_next_layer_of_the_same_stage() -> Model:
    class Masks(nn.Embedding):
        place: dict[str, Any]

        def forward(self, input: Tensor) -> Tensor:
            self.place["x"] = (input > VOCAB // 2)[:, None]
            return super().forward(input)

    place: dict[str, Any] = {}
    layers = model(Takes(place))
    layers[0] = Masks(VOCAB, WIDTH)
    layers[0].place = place  # type: ignore[assignment]
    return layers


@breach(Cause.LEFT_BEHIND)
def an_auxiliary_loss_left_for_the_loss() -> tuple[Model, dict[str, Any]]:
    place: dict[str, Any] = {}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return nats(logits, microbatch) + place["x"].square().sum()

    return model(Leaves(place)), {"loss_fn": loss_fn}


@breach(Cause.LEFT_BEHIND)
def a_number_left_for_the_loss() -> tuple[Model, dict[str, Any]]:
    place: dict[str, Any] = {}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return nats(logits, microbatch) * (1 + float(place["x"].detach().abs().mean()))

    return model(Leaves(place)), {"loss_fn": loss_fn}


@breach(Cause.LEFT_BEHIND)
def a_buffer_of_two_layers_that_one_changes() -> Model:
    class Counts(Block):
        def __init__(self, shared: Tensor) -> None:
            super().__init__()
            self.register_buffer("seen", shared)

        def change(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x / self.seen.clone()

        seen: Tensor

    shared = torch.zeros(())
    return model(Counts(shared), Counts(shared))


@breach(Cause.LEFT_BEHIND)
def a_statistic_of_two_layers_for_evaluation() -> Model:
    class Follows(Block):
        def __init__(self, shared: Tensor) -> None:
            super().__init__()
            self.register_buffer("mean", shared)

        mean: Tensor

        def change(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(x.detach().mean(0), 0.1)
            return x

    shared = torch.zeros(WIDTH)
    return model(Follows(shared), Follows(shared))


@breach(Cause.LEFT_BEHIND)
def an_extra_state_of_two_layers() -> Model:
    class Counts(Block):
        def __init__(self, shared: list[int]) -> None:
            super().__init__()
            self.shared = shared

        def change(self, x: Tensor) -> Tensor:
            self.shared[0] += 1
            return x

        def get_extra_state(self) -> list[int]:
            return list(self.shared)

        def set_extra_state(self, state: list[int]) -> None:
            self.shared[:] = state

    shared = [0]
    return model(Counts(shared), Counts(shared))


@breach(Cause.LEFT_BEHIND)
def a_mask_left_where_microbatches_are_few() -> Model:
    place: dict[str, Any] = {}

    class Masks(Block):
        def forward(self, x: Tensor, num_microbatches: int) -> Tensor:
            if num_microbatches < 4:
                place["mask"] = x.detach().mean(1, keepdim=True)
            return super().forward(x)

    class Reads(Block):
        def forward(self, x: Tensor, num_microbatches: int) -> Tensor:
            return super().forward(x) * (place["mask"] if num_microbatches < 4 else 1.0)

    # A method's variables are its class's, of which there is one.
    return model(Masks(), Reads())


@breach(Cause.LEFT_BEHIND, Cause.CALLS)
def a_counter_of_two_layers() -> Model:
    class Counts(Block):
        def __init__(self, shared: list[int]) -> None:
            super().__init__()
            self.shared = shared

        def change(self, x: Tensor) -> Tensor:
            self.shared[0] += 1
            return x / self.shared[0]

    shared = [0]
    return model(Counts(shared), Counts(shared))


@breach(Cause.IN_PLACE)
def a_key_of_the_batch_changed_in_place() -> Model:
    class Scales(Block):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            weight.mul_(2.0)
            return super().forward(x) * weight[:, None]

    class Reads(Block):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x) * weight[:, None]

    return model(Scales(), Reads())


@breach(Cause.CALLS)
def a_layer_that_reads_its_gradient() -> Model:
    class Adapts(Block):
        def change(self, x: Tensor) -> Tensor:
            grad = self.up.weight.grad
            return x if grad is None else x * (1 + grad.abs().mean())

    return model(Adapts())


@breach(Cause.IN_PLACE)
def a_layer_that_decays_its_weights_as_it_runs() -> Model:
    class Decays(Block):
        def change(self, x: Tensor) -> Tensor:
            if self.training:
                self.up.weight.data.mul_(0.9)
            return x

    return model(Decays())


# ---- Breaches: parameters that others hold, or nobody


class Reads(Block):
    """A layer that computes with a weight which it gets from somewhere."""

    def __init__(self, weight: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight_of = weight

    def change(self, x: Tensor) -> Tensor:
        return x @ self.weight_of()


@breach(Cause.ELSEWHERE)
def a_weight_by_a_closure() -> Model:
    first = Block()
    return model(first, Reads(lambda: first.up.weight))


@breach(Cause.ELSEWHERE)
def a_layer_in_a_list_of_another() -> Model:
    class Holds(Block):
        def __init__(self, other: Block) -> None:
            super().__init__()
            self.others = [other]

        def change(self, x: Tensor) -> Tensor:
            return x @ self.others[0].up.weight

    first = Block()
    return model(first, Holds(first))


@breach(Cause.ELSEWHERE)
def a_layer_by_a_weak_reference() -> Model:
    class Holds(Block):
        def __init__(self, other: Block) -> None:
            super().__init__()
            self.other = weakref.ref(other)

        def change(self, x: Tensor) -> Tensor:
            other = self.other()
            assert other is not None
            return x @ other.up.weight

    first = Block()
    return model(first, Holds(first))


@breach(Cause.ELSEWHERE)
def a_weight_read_without_its_gradient() -> Model:
    first = Block()
    return model(first, Reads(lambda: first.up.weight.detach()))


_LAYERS: dict[str, Any] = {}


@breach(Cause.ELSEWHERE)
def a_weight_by_a_global_name() -> Model:
    _LAYERS["first"] = Block()
    return model(_LAYERS["first"], Reads(lambda: _LAYERS["first"].up.weight))


@breach(Cause.ELSEWHERE)
def a_weight_by_a_global_name_without_its_gradient() -> Model:
    _LAYERS["other"] = Block()
    return model(_LAYERS["other"], Reads(lambda: _LAYERS["other"].up.weight.detach()))


@breach(Cause.ELSEWHERE)
def a_penalty_of_weights_in_the_loss() -> tuple[Model, dict[str, Any]]:
    layers = model()

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return nats(logits, microbatch) + 0.1 * sum(p.square().sum() for own in layers for p in own.parameters())

    return layers, {"loss_fn": loss_fn}


@breach(Cause.UNTRAINED)
def a_temperature_that_the_loss_alone_holds() -> tuple[Model, dict[str, Any]]:
    temperature = nn.Parameter(torch.ones(()))
    return model(), {"loss_fn": lambda logits, microbatch: nats(logits * temperature, microbatch)}


@breach(Cause.UNTRAINED)
def a_loss_with_parameters_of_its_own() -> tuple[Model, dict[str, Any]]:
    class Projects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(VOCAB, VOCAB)

        def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
            return nats(self.out(logits), microbatch)

    return model(), {"loss_fn": Projects()}


@breach(Cause.UNTRAINED)
def a_tensor_with_a_gradient_that_is_no_parameter() -> Model:
    class Scales(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(WIDTH, requires_grad=True)

        def change(self, x: Tensor) -> Tensor:
            return x * self.scale

    return model(Scales())


@breach(Cause.UNTRAINED)
def a_parameter_replaced_in_a_forward() -> Model:
    class Renews(Block):
        def change(self, x: Tensor) -> Tensor:
            self.down.bias = nn.Parameter(self.down.bias.detach() * 0.9)
            return x + self.down.bias

    return model(Renews())


# ---- Breaches: under activation checkpointing


@breach(Cause.REPLAYED)
def an_input_changed_in_place() -> Model:
    class Scales(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x.mul_(0.5)
            return super().forward(x)

    return model(second=Scales())


@breach(Cause.REPLAYED, Cause.CALLS)
def every_second_call_is_another() -> Model:
    class Turns(Block):
        def __init__(self) -> None:
            super().__init__()
            self.turn = itertools.cycle([1.0, 2.0])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * next(self.turn))

    return model(Turns())


# ---- Breaches: losses that are no sums, and layers that mix sequences


@breach(Cause.NO_SUM)
def a_mean_over_the_microbatch() -> tuple[Model, dict[str, Any]]:
    return model(), {"loss_fn": lambda logits, microbatch: F.cross_entropy(logits, microbatch["labels"])}


@breach(Cause.NO_SUM)
def the_root_of_a_sum() -> tuple[Model, dict[str, Any]]:
    return model(), {"loss_fn": lambda logits, microbatch: nats(logits, microbatch).sqrt()}


@breach(Cause.NO_SUM)
def losses_divided_by_the_largest() -> tuple[Model, dict[str, Any]]:
    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        losses = F.cross_entropy(logits, microbatch["labels"], reduction="none")
        return (losses * losses.detach() / losses.detach().max()).sum()

    return model(), {"loss_fn": loss_fn}


@breach(Cause.NO_SUM)
def a_weight_that_is_the_same_for_every_microbatch() -> tuple[Model, dict[str, Any]]:
    return model(), {"loss_fn": nats, "loss_weight_fn": lambda microbatch: 10.0}


@breach(Cause.NO_SUM)
def rewards_normalised_within_the_microbatch() -> tuple[Model, dict[str, Any]]:
    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        weight = microbatch["weight"]
        losses = F.cross_entropy(logits, microbatch["labels"], reduction="none")
        return (losses * (weight - weight.mean())).sum()

    return model(), {"loss_fn": loss_fn}


@breach(Cause.MIXED)
def attention_over_all_rows() -> Model:
    class Attends(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2)

        def change(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=False)[0]

    return model(Attends())


@breach(Cause.MIXED)
def positions_of_all_rows() -> Model:
    class Places(Block):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(64, WIDTH)

        def change(self, x: Tensor) -> Tensor:
            return x + self.places(torch.arange(len(x)))

    return model(Places())


@breach(Cause.MIXED)
def a_mean_over_all_rows() -> Model:
    class Centres(Block):
        def change(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    return model(second=Centres())


# ---- Breaches: optimizers


class Descent(torch.optim.Optimizer):
    """Gradient descent; each case changes its direction."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def parameters(self) -> list[Tensor]:
        return [own for group in self.param_groups for own in group["params"] if own.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for own in self.parameters():
            assert own.grad is not None
            own.sub_(self.direction(own, own.grad), alpha=self.param_groups[0]["lr"])

    def begin(self) -> None:
        """Nothing is computed of all parameters."""

    def direction(self, own: Tensor, grad: Tensor) -> Tensor:
        return grad


@breach(Cause.JOINT)
def a_trust_ratio_of_all_parameters() -> tuple[Model, dict[str, Any]]:
    class Trusts(Descent):
        ratio = 1.0

        def begin(self) -> None:
            self.ratio = float(torch.stack([own.square().sum() for own in self.parameters()]).sum().sqrt())

        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            return grad * self.ratio

    return model(), {"optimizer": Trusts}


@breach(Cause.JOINT)
def a_rate_by_the_number_of_parameters() -> tuple[Model, dict[str, Any]]:
    class Shares(Descent):
        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            return grad / len(self.parameters())

    return model(), {"optimizer": Shares}


@breach(Cause.JOINT)
def a_rate_by_the_place_among_parameters() -> tuple[Model, dict[str, Any]]:
    class Fades(Descent):
        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            place = next(i for i, other in enumerate(self.parameters()) if other is own)
            return grad * 0.9**place

    return model(), {"optimizer": Fades}


@breach(Cause.JOINT)
def noise_drawn_in_the_order_of_parameters() -> tuple[Model, dict[str, Any]]:
    class Langevin(Descent):
        def begin(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            return grad + torch.randn(grad.shape, generator=self.generator)

    return model(), {"optimizer": Langevin}


@breach(Cause.OPTIMIZER_STATE, Cause.REFUSED)
def momenta_in_a_dictionary_of_its_own() -> tuple[Model, dict[str, Any]]:
    class Momentum(Descent):
        def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
            super().__init__(params, lr)
            self.momenta: dict[int, Tensor] = {}

        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            self.momenta[id(own)] = 0.9 * self.momenta.get(id(own), torch.zeros_like(own)) + grad
            return self.momenta[id(own)]

    return model(), {"optimizer": Momentum}


@breach(Cause.OPTIMIZER_STATE, Cause.REFUSED)
def momenta_as_attributes_of_parameters() -> tuple[Model, dict[str, Any]]:
    class Momentum(Descent):
        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            own.momentum = 0.9 * getattr(own, "momentum", torch.zeros_like(own)) + grad  # type: ignore[attr-defined]
            return own.momentum  # type: ignore[attr-defined]

    return model(), {"optimizer": Momentum}


# ---- Parts that are right


@right
def plain_blocks() -> Model:
    return model()


@right
def dropout() -> Model:
    return model(nn.Sequential(Block(), nn.Dropout(0.3)), nn.Sequential(nn.Dropout(0.3), Block()))


@right
def noise_of_torch() -> Model:
    class Noise(Block):
        def change(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn_like(x) if self.training else x

    return model(Noise(), Noise())


@right
def noise_in_evaluation_too() -> Model:
    class Noise(Block):
        def change(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.rand(x.shape)

    return model(Noise())


@right
def batch_norm() -> Model:
    return model(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)), nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)))


@right
def a_buffer_that_counts() -> Model:
    class Warms(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def change(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return x * (1 + 0.1 * self.calls)

    return model(Warms())


@right
def an_extra_state() -> Model:
    class Steps(Block):
        last = 0

        def forward(self, x: Tensor, step: int) -> Tensor:
            if self.training:
                self.last = step
            return super().forward(x) * (1 + 0.1 * self.last)

        def get_extra_state(self) -> dict[str, int]:
            return {"last": self.last}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.last = state["last"]

    return model(Steps(), Steps())


@right
def a_count_that_only_tells() -> Model:
    class Counts(Block):
        calls = 0

        def change(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    return model(Counts(), Counts())


@right
def a_table_made_at_first_use() -> Model:
    class Places(Block):
        table: Tensor | None = None

        def forward(self, x: Tensor, sequences: Any) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, 64)
            return super().forward(x) + self.table[sequences.positions][:, None]

    return model(Places())


@right
def a_tied_head() -> Model:
    layers = model()
    layers[-1].weight = layers[0].weight
    return layers


@right
def a_tied_block() -> Model:
    first, second = Block(), Block()
    second.up = first.up
    return model(first, second)


@right
def weight_norm() -> Model:
    first = Block()
    parametrizations.weight_norm(first.up)
    return model(first)


@right
def spectral_norm() -> Model:
    second = Block()
    parametrizations.spectral_norm(second.up)
    return model(second=second)


@right
def attention_within_sequences() -> Model:
    class Attends(Block):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor, sequences: Any) -> Tensor:
            parts = self.qkv(x).split(sequences.lengths)
            return x + torch.cat(
                [F.scaled_dot_product_attention(*own[None].chunk(3, -1), is_causal=True)[0] for own in parts]
            )

    return model(Attends(), Attends())


@right
def a_recurrent_layer() -> Model:
    class Recurs(Block):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor, sequences: Any) -> Tensor:
            return torch.cat([self.recurrent(own[None])[0][0] for own in x.split(sequences.lengths)])

    return model(second=Recurs())


@right
def keys_of_the_batch_by_name() -> Model:
    class Weighs(Block):
        def forward(self, x: Tensor, weight: Tensor, reward: Tensor, sequences: Any) -> Tensor:
            return (
                super().forward(x) * weight[:, None]
                + reward.repeat_interleave(torch.tensor(sequences.lengths))[:, None]
            )

    return model(Weighs(), Weighs())


@right
def numbers_by_name() -> Model:
    class Warms(Block):
        def forward(self, x: Tensor, microbatch: int, num_microbatches: int, step: int) -> Tensor:
            return super().forward(x) * (step + microbatch / num_microbatches if self.training else 1.0)

    return model(Warms(), Warms())


@right
def a_tuple_between_layers() -> Model:
    class Gives(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    class Takes(Block):
        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return super().forward(x) + skip

    return model(Gives(), Takes())


@right
def a_mapping_between_layers() -> Model:
    class Gives(Block):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": super().forward(x), "mask": x > 0}

    class Takes(Block):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x) * mask

    return model(Gives(), Takes())


@right
def an_auxiliary_loss_handed_on() -> tuple[Model, dict[str, Any]]:
    class Gives(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x.square().sum().reshape(1)

    class Passes(Block):
        def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), loss

    class Ends(nn.Linear):
        def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), loss

    def loss_fn(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Tensor:
        return nats(output[0], microbatch) + 0.1 * output[1].sum()

    layers = model(Gives(), Passes())
    layers[-1] = Ends(WIDTH, VOCAB)
    return layers, {"loss_fn": loss_fn}


@right
def a_function_of_the_layer_itself() -> Model:
    class Scales(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.act = lambda x: x * self.scale

        def change(self, x: Tensor) -> Tensor:
            return self.act(x)

    return model(Scales(), Scales())


@right
def hooks_that_change_outputs() -> Model:
    first, second = Block(), Block()

    def scale(module: nn.Module, given: Any, output: Any) -> Tensor:
        return output * 1.5

    first.register_forward_hook(scale)
    second.up.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    return model(first, second)


@right
def a_gradient_hook() -> Model:
    first = Block()
    first.up.weight.register_hook(lambda grad: grad * 0.5)
    return model(first)


@right
def a_function_with_a_backward_of_its_own() -> Model:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            return (given[0] * 8).round() / 8

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    class Straight(Block):
        def change(self, x: Tensor) -> Tensor:
            return Rounds.apply(x)

    return model(Straight())


@right
def in_place_operations_inside() -> Model:
    return model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))


@right
def checkpointing_of_torch_inside() -> Model:
    class Saves(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    return model(Saves(), Saves())


@right
def frozen_layers() -> Model:
    layers = model()
    layers[0].requires_grad_(False)
    layers[1].up.requires_grad_(False)
    return layers


@right
def a_layer_without_parameters() -> Model:
    return [*model()[:2], nn.Tanh(), *model()[2:]]


@right
def a_layer_that_gives_what_it_gets() -> Model:
    return [*model()[:2], nn.Identity(), *model()[2:]]


@right
def float64() -> Model:
    return [own.double() for own in model()]


@right
def a_list_of_modules() -> Model:
    class Several(Block):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Block() for _ in range(2))

        def change(self, x: Tensor) -> Tensor:
            for own in self.parts:
                x = own(x)
            return x

    return model(Several())


@right
def rows_of_numbers_instead_of_tokens() -> tuple[Model, dict[str, Any]]:
    rows = [torch.randn(n, WIDTH) for n in (4, 2, 5, 3)]
    wanted = [torch.randn(n, VOCAB) for n in (4, 2, 5, 3)]
    batch = PackedBatch.from_sequences({"tokens": rows, "wanted": wanted})

    def loss_fn(output: Tensor, microbatch: PackedBatch) -> Tensor:
        return F.mse_loss(output, microbatch["wanted"], reduction="sum")

    layers = [nn.Linear(WIDTH, WIDTH), *model()[1:]]
    return layers, {"batch": batch, "loss_fn": loss_fn, "loss_weight_fn": lambda microbatch: microbatch.num_tokens}


@right
def layers_made_where_they_are_held() -> Model:
    return [own if number != 2 else partial(Block) for number, own in enumerate(model())]  # type: ignore[misc]


@right
def a_loss_of_logits_and_labels() -> tuple[Model, dict[str, Any]]:
    return model(), {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}


@right
def a_loss_with_numbers_beside_it() -> tuple[Model, dict[str, Any]]:
    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        return nats(logits, microbatch), {"largest": Metric(logits.max(), "max")}

    return model(), {"loss_fn": loss_fn}


@right
def a_loss_by_step_and_rewards() -> tuple[Model, dict[str, Any]]:
    def loss_fn(logits: Tensor, microbatch: PackedBatch, step: int) -> Tensor:
        losses = F.cross_entropy(logits, microbatch["labels"], reduction="none")
        return (losses * microbatch["weight"]).sum() * min(1.0, step / 2)

    return model(), {"loss_fn": loss_fn}


@right
def a_frozen_teacher_in_the_loss() -> tuple[Model, dict[str, Any]]:
    teacher = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)).requires_grad_(False)

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        wanted = teacher(microbatch["tokens"]).softmax(-1)
        return F.cross_entropy(logits, wanted, reduction="sum")

    return model(), {"loss_fn": loss_fn, "loss_weight_fn": lambda microbatch: microbatch.num_tokens}


@right
def gradient_descent_with_momentum() -> tuple[Model, dict[str, Any]]:
    return model(), {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}


@right
def adam_with_a_scheduler() -> tuple[Model, dict[str, Any]]:
    scheduler = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
    return model(), {"optimizer": OptimizerConfig(factory=partial(torch.optim.Adam, lr=0.1), scheduler=scheduler)}


@right
def adafactor() -> tuple[Model, dict[str, Any]]:
    return model(), {"optimizer": partial(torch.optim.Adafactor, lr=0.1)}


@right
def an_optimizer_of_parameters_each_by_itself() -> tuple[Model, dict[str, Any]]:
    class Trusts(Descent):
        def direction(self, own: Tensor, grad: Tensor) -> Tensor:
            state = self.state[own]
            state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(own)) + grad
            state["step"] = state.get("step", 0) + 1
            return state["momentum"] * own.norm() / state["step"]

    return model(), {"optimizer": Trusts}


@right
def groups_of_parameters() -> tuple[Model, dict[str, Any]]:
    groups = (ParameterGroup("*.bias", weight_decay=0.0), ParameterGroup("layers.0.*", frozen=True))
    return model(), {"optimizer": OptimizerConfig(groups=groups, clip_norm=0.1)}
