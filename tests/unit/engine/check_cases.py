"""Layers, losses and optimizers that `penstock.check` is asked about: some break a contract, the others are right.

They are written from docs/guides/check.md, not from the engine. Most are one function, a layer's forward, a loss or an
optimizer's directions; the name of the function is the case's. Those that break a contract say the causes to be named.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock import Labels, Metric, OptimizerConfig, PackedBatch, ParameterGroup
from penstock.engine.check.report import Cause

WIDTH, VOCAB = 8, 16
Model = list[nn.Module]
Given = tuple[Model, dict[str, Any]]
"""Layers, and the other arguments of a check."""


def batch() -> PackedBatch:
    """Six documents of unequal lengths, with a number for each token and each document."""
    draw = torch.Generator().manual_seed(3)
    found = PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=draw) for n in (5, 3, 7, 4, 6, 2)])
    found = found.with_key("weight", torch.rand(found.num_tokens, generator=draw), "token")
    return found.with_key("reward", torch.rand(6, generator=draw), "item")


class Block(nn.Module):
    """A layer of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def changed(forward: Callable[..., Any], **attributes: Any) -> Any:
    """A block with another forward, and with attributes."""
    layer: Any = type("Changed", (Block,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def model(first: nn.Module | None = None, second: nn.Module | None = None) -> Model:
    """An embedding and a block in one stage, a block and a head in the other."""
    torch.manual_seed(5)
    blocks = [Block(), Block()]
    return [nn.Embedding(VOCAB, WIDTH), first or blocks[0], second or blocks[1], nn.Linear(WIDTH, VOCAB)]


def nats(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.cross_entropy(logits, microbatch["labels"], reduction="sum")


def nats_of_tokens(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.cross_entropy(logits, microbatch["labels"], reduction="none")


class Descent(torch.optim.Optimizer):
    """Gradient descent; each case has other directions."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [own for group in self.param_groups for own in group["params"] if own.grad is not None]
        for parameter, direction in zip(parameters, self.directions(parameters), strict=True):
            parameter.sub_(direction, alpha=self.param_groups[0]["lr"])

    def directions(self, parameters: list[Any]) -> list[Tensor]:
        return [parameter.grad for parameter in parameters]


# ---- How a case is entered


@dataclass(frozen=True)
class Case:
    """What is given to `penstock.check`, and what it is to name."""

    name: str
    #: makes the layers, and the other arguments
    make: Callable[[], Given]
    #: the causes that the report names, the engine's refusal only where that is one; none for parts that are right
    causes: tuple[Cause, ...]


CASES: list[Case] = []
Enter = Callable[[Callable[..., Any]], Callable[..., Any]]


def entered(given: Callable[[Callable[..., Any]], Model | Given], *causes: Cause) -> Enter:
    """Enter a function as a case, whose arguments are made of it."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> Given:
            torch.manual_seed(7)
            made = given(function)
            return made if isinstance(made, tuple) else (made, {})

        CASES.append(Case(function.__name__.replace("_", " "), make, causes))
        return function

    return enter


def parts(*causes: Cause) -> Enter:
    """Of a function that makes the layers, and perhaps other arguments."""
    return entered(lambda function: function(), *causes)


def layer(*causes: Cause, **attributes: Callable[[], Any]) -> Enter:
    """Of a layer's forward: two blocks have it, each with attributes of its own that these make."""

    def given(forward: Callable[..., Any]) -> Model:
        return model(*(changed(forward, **{name: make() for name, make in attributes.items()}) for _ in range(2)))

    return entered(given, *causes)


def loss(*causes: Cause) -> Enter:
    """Of a loss."""
    return entered(lambda loss_fn: (model(), {"loss_fn": loss_fn}), *causes)


def optimizer(*causes: Cause) -> Enter:
    """Of the directions of an optimizer."""
    return entered(
        lambda directions: (model(), {"optimizer": type("Changed", (Descent,), {"directions": directions})}), *causes
    )


# ---- Breaches: what a layer keeps without declaring it


@layer(Cause.UNDECLARED, Cause.CALLS, calls=int)
def a_layer_counts_its_calls(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return Block.forward(layer, x) / layer.calls


@layer(Cause.UNDECLARED, mean=lambda: torch.zeros(WIDTH))
def a_running_mean_in_an_attribute(layer: Any, x: Tensor) -> Tensor:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return Block.forward(layer, x) - layer.mean


@layer(Cause.UNDECLARED, seen=lambda: nn.Buffer(torch.zeros(()), persistent=False))
def a_buffer_that_is_not_persistent_but_changes(layer: Any, x: Tensor) -> Tensor:
    layer.seen += len(x)
    return Block.forward(layer, x) * (1 + 0.01 * layer.seen)


@layer(Cause.UNDECLARED, generator=lambda: torch.Generator().manual_seed(1))
def a_generator_of_torch_of_its_own(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x) + torch.randn(x.shape, generator=layer.generator)


@parts(Cause.UNDECLARED, Cause.CALLS)
def a_loss_that_counts_its_calls() -> Given:
    class Warms(nn.Module):
        calls = 0

        def forward(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
            self.calls += self.training
            return nats(logits, microbatch) * min(1.0, self.calls / 6)

    return model(), {"loss_fn": Warms()}


@parts(Cause.UNDECLARED)
def a_baseline_kept_by_the_loss() -> Given:
    kept = {"baseline": 0.0}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        losses = nats_of_tokens(logits, microbatch)
        if torch.is_grad_enabled():
            kept["baseline"] = 0.5 * kept["baseline"] + 0.5 * float(losses.detach().mean())
        return (losses * (losses.detach() - kept["baseline"])).sum()

    return model(), {"loss_fn": loss_fn}


@parts(Cause.UNDECLARED, Cause.REFUSED)
def an_extra_state_that_cannot_be_set() -> Model:
    class Counts(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

        def get_extra_state(self) -> int:
            return self.calls

    return model(Counts())


# ---- Breaches: what one run leaves for the next, and chance


class Counted(Block):
    """A block with a counter, and a mask, of the class."""

    calls: ClassVar[int] = 0
    mask: ClassVar[Any] = None


@layer(Cause.CHANCE)
def a_counter_of_the_class(layer: Any, x: Tensor) -> Tensor:
    Counted.calls += 1
    return Block.forward(layer, x) * (1 + 0.01 * Counted.calls)


@layer(Cause.CHANCE)
def numbers_of_the_system(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x) * random.SystemRandom().random()


# ---- Breaches: what layers leave for others


def leaves(layer: Any, x: Tensor) -> Tensor:
    """Leaves what it makes in a place."""
    layer.place["x"] = Block.forward(layer, x)
    return layer.place["x"]


def takes(layer: Any, x: Tensor) -> Tensor:
    """Takes what another has left."""
    return Block.forward(layer, x) + layer.place["x"]


def mean_of_rows(x: Tensor) -> Tensor:
    return x.detach().mean(1, keepdim=True)


def with_place(first: Callable[..., Any], second: Callable[..., Any], place: Any) -> Model:
    """Two blocks that have a place in common."""
    return model(changed(first, place=place), changed(second, place=place))


@parts(Cause.LEFT_BEHIND)
def a_skip_connection_by_a_shared_dict() -> Model:
    return with_place(leaves, takes, {})


@parts(Cause.LEFT_BEHIND)
def a_mask_by_an_attribute_of_a_class() -> Model:
    def masks(layer: Any, x: Tensor) -> Tensor:
        Counted.mask = mean_of_rows(x)
        return Block.forward(layer, x)

    return model(changed(masks), changed(lambda layer, x: Block.forward(layer, x) * Counted.mask))


@parts(Cause.LEFT_BEHIND)
def a_mask_for_the_next_layer_of_the_same_stage() -> Model:
    class Masks(nn.Embedding):
        place: Any

        def forward(self, input: Tensor) -> Tensor:
            self.place["x"] = (input > VOCAB // 2)[:, None]
            return super().forward(input)

    place: dict[str, Any] = {}
    layers = model(changed(takes, place=place))
    layers[0] = Masks(VOCAB, WIDTH)
    layers[0].place = place
    return layers


@parts(Cause.LEFT_BEHIND)
def an_auxiliary_loss_left_for_the_loss() -> Given:
    place: dict[str, Any] = {}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return nats(logits, microbatch) + place["x"].square().sum()

    return model(changed(leaves, place=place)), {"loss_fn": loss_fn}


@parts(Cause.LEFT_BEHIND)
def a_buffer_of_two_layers_that_one_changes() -> Model:
    def counts(layer: Any, x: Tensor) -> Tensor:
        layer.place += 1
        return Block.forward(layer, x) / layer.place.clone()

    return with_place(counts, counts, nn.Buffer(torch.zeros(())))


@parts(Cause.LEFT_BEHIND)
def a_statistic_of_two_layers_for_evaluation() -> Model:
    def follows(layer: Any, x: Tensor) -> Tensor:
        if layer.training:
            layer.place.lerp_(x.detach().mean(0), 0.1)
        return Block.forward(layer, x)

    return with_place(follows, follows, nn.Buffer(torch.zeros(WIDTH)))


@parts(Cause.LEFT_BEHIND)
def an_extra_state_of_two_layers() -> Model:
    class Counts(Block):
        def __init__(self, shared: list[int]) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: Tensor) -> Tensor:
            self.shared[0] += 1
            return super().forward(x)

        def get_extra_state(self) -> list[int]:
            return list(self.shared)

        def set_extra_state(self, state: list[int]) -> None:
            self.shared[:] = state

    shared = [0]
    return model(Counts(shared), Counts(shared))


@parts(Cause.LEFT_BEHIND)
def a_mask_left_where_microbatches_are_few() -> Model:
    place: dict[str, Any] = {}

    def masks(layer: Any, x: Tensor, num_microbatches: int) -> Tensor:
        if num_microbatches < 4:
            place["mask"] = mean_of_rows(x)
        return Block.forward(layer, x)

    def reads(layer: Any, x: Tensor, num_microbatches: int) -> Tensor:
        return Block.forward(layer, x) * (place["mask"] if num_microbatches < 4 else 1.0)

    # A method's variables are its class's, of which there is one.
    return model(changed(masks), changed(reads))


@parts(Cause.LEFT_BEHIND, Cause.CALLS)
def a_counter_of_two_layers() -> Model:
    def counts(layer: Any, x: Tensor) -> Tensor:
        layer.place[0] += 1
        return Block.forward(layer, x) / layer.place[0]

    return with_place(counts, counts, [0])


@parts(Cause.IN_PLACE)
def a_key_of_the_batch_changed_in_place() -> Model:
    return model(
        changed(lambda layer, x, weight: Block.forward(layer, x) * weight.mul_(2.0)[:, None]),
        changed(lambda layer, x, weight: Block.forward(layer, x) * weight[:, None]),
    )


@layer(Cause.CALLS)
def a_layer_that_reads_its_gradient(layer: Any, x: Tensor) -> Tensor:
    x, grad = Block.forward(layer, x), layer.up.weight.grad
    return x if grad is None else x * (1 + grad.abs().mean())


@layer(Cause.IN_PLACE)
def a_layer_that_decays_its_weights_as_it_runs(layer: Any, x: Tensor) -> Tensor:
    x = Block.forward(layer, x)
    if layer.training:
        layer.up.weight.data.mul_(0.9)
    return x


# ---- Breaches: parameters that others hold, or nobody


_LAYERS = {"by name": Block(), "by name, detached": Block()}


def reads(first: nn.Module, weight: Callable[[], Tensor]) -> Model:
    """A block, and another that computes with a weight which it gets from somewhere."""
    return model(first, changed(lambda layer, x: Block.forward(layer, x) @ layer.weight_of(), weight_of=weight))


@parts(Cause.ELSEWHERE)
def a_weight_by_a_closure() -> Model:
    first = Block()
    return reads(first, lambda: first.up.weight)


@parts(Cause.ELSEWHERE)
def a_layer_in_a_list_of_another() -> Model:
    first = Block()
    return model(first, changed(lambda layer, x: Block.forward(layer, x) @ layer.others[0].up.weight, others=[first]))


@parts(Cause.ELSEWHERE)
def a_weight_by_a_global_name() -> Model:
    return reads(_LAYERS["by name"], lambda: _LAYERS["by name"].up.weight)


@parts(Cause.ELSEWHERE)
def a_weight_by_a_global_name_without_its_gradient() -> Model:
    return reads(_LAYERS["by name, detached"], lambda: _LAYERS["by name, detached"].up.weight.detach())


@parts(Cause.ELSEWHERE)
def a_penalty_of_weights_in_the_loss() -> Given:
    layers = model()

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return nats(logits, microbatch) + 0.1 * sum(p.square().sum() for own in layers for p in own.parameters())

    return layers, {"loss_fn": loss_fn}


@parts(Cause.UNTRAINED)
def a_temperature_that_the_loss_alone_holds() -> Given:
    temperature = nn.Parameter(torch.ones(()))
    return model(), {"loss_fn": lambda logits, microbatch: nats(logits * temperature, microbatch)}


@layer(Cause.UNTRAINED, scale=lambda: torch.ones(WIDTH, requires_grad=True))
def a_tensor_with_a_gradient_that_is_no_parameter(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x) * layer.scale


@layer(Cause.UNTRAINED)
def a_parameter_replaced_in_a_forward(layer: Any, x: Tensor) -> Tensor:
    x = Block.forward(layer, x)
    layer.down.bias = nn.Parameter(layer.down.bias.detach() * 0.9)
    return x + layer.down.bias


# ---- Breaches: memory that tensors share


@parts(Cause.SHARED)
def a_head_in_the_memory_of_the_embedding() -> Given:
    layers: list[Any] = model()
    layers[-1].weight.data = layers[0].weight.data
    return layers, {"optimizer": "sgd"}


@parts(Cause.SHARED)
def a_buffer_in_the_memory_of_a_parameter() -> Model:
    first = Block()
    second = changed(lambda layer, x: Block.forward(layer, x) @ layer.weight)
    second.register_buffer("weight", first.up.weight.detach())
    return model(first, second)


@parts(Cause.SHARED)
def parameters_of_one_layer_in_one_memory() -> Model:
    first = Block()
    first.down.weight.data = first.up.weight.data
    return model(first)


@parts(Cause.SHARED)
def an_attribute_in_the_memory_of_a_parameter() -> Model:
    first, second = Block(), changed(lambda layer, x: Block.forward(layer, x) @ layer.weight)
    second.weight = first.up.weight.detach()
    return model(first, second)


# ---- Breaches: hooks of parameters


@parts(Cause.UNDECLARED)
def a_hook_of_a_parameter_that_counts() -> Model:
    first = Block()
    counts = itertools.count(1)
    first.up.weight.register_hook(lambda gradient: gradient / next(counts))
    return model(first)


# ---- Breaches: under activation checkpointing


@parts(Cause.REPLAYED, Cause.REFUSED)
def an_input_changed_in_place() -> Model:
    def scales(layer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return Block.forward(layer, x)

    return model(second=changed(scales))


@layer(Cause.REPLAYED, Cause.CALLS, turn=lambda: itertools.cycle([1.0, 2.0]))
def every_second_call_is_another(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x * next(layer.turn))


# ---- Breaches: losses that are no sums, and layers that mix sequences


@loss(Cause.NO_SUM)
def a_mean_over_the_microbatch(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return F.cross_entropy(logits, microbatch["labels"])


@parts(Cause.NO_SUM)
def a_weight_that_is_the_same_for_every_microbatch() -> Given:
    return model(), {"loss_fn": nats, "loss_weight_fn": lambda microbatch: 10.0}


@parts(Cause.NO_SUM)
def a_mean_by_weights_of_classes() -> Given:
    weights = torch.linspace(1, 1.3, VOCAB)
    return model(), {"loss_fn": Labels(lambda logits, labels: F.cross_entropy(logits, labels, weights), "mean")}


@loss(Cause.NO_SUM)
def a_small_penalty_for_each_microbatch(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    return nats(logits, microbatch) + 0.01 * logits.square().mean()


@layer(Cause.MIXED)
def a_small_part_of_other_rows(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x) - 0.0005 * x.mean(0)


@parts(Cause.MIXED)
def a_small_part_of_other_rows_in_a_layer_made_where_it_is_held() -> Model:
    class Mixing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return a_small_part_of_other_rows(self, x)

    return model(partial(Mixing))  # type: ignore[arg-type]


@parts(Cause.CHANCE)
def a_variable_that_a_layers_method_and_the_loss_share() -> Given:
    last = {"loss": 1.0}

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.01 * last["loss"])

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        loss = nats(logits, microbatch)
        last["loss"] = loss.item()
        return loss

    return model(Reading()), {"loss_fn": loss_fn}


@parts(Cause.UNDECLARED)
def an_attribute_that_matters_from_the_third_step_on() -> Given:
    def late(layer: Any, x: Tensor, step: int) -> Tensor:
        y = Block.forward(layer, x) * (1.1 if layer.last > 1 else 1.0)
        layer.last = step
        return y

    return model(changed(late, last=0)), {"steps": 4}


@layer(Cause.MIXED, attention=lambda: nn.MultiheadAttention(WIDTH, 2))
def attention_over_all_rows(layer: Any, x: Tensor) -> Tensor:
    x = Block.forward(layer, x)
    return x + layer.attention(x, x, x, need_weights=False)[0]


# ---- Breaches: optimizers


@optimizer(Cause.JOINT)
def a_trust_ratio_of_all_parameters(optimizer: Any, parameters: list[Any]) -> list[Tensor]:
    ratio = float(torch.stack([own.square().sum() for own in parameters]).sum().sqrt())
    return [own.grad * ratio for own in parameters]


@optimizer(Cause.OPTIMIZER_STATE)
def momenta_in_a_dictionary_of_its_own(optimizer: Any, parameters: list[Any]) -> list[Tensor]:
    momenta = vars(optimizer).setdefault("momenta", {})
    momenta |= {own: 0.9 * momenta.get(own, torch.zeros_like(own)) + own.grad for own in parameters}
    return [momenta[own] for own in parameters]


@optimizer(Cause.OPTIMIZER_STATE)
def momenta_as_attributes_of_parameters(optimizer: Any, parameters: list[Any]) -> list[Tensor]:
    for own in parameters:
        own.momentum = 0.9 * getattr(own, "momentum", torch.zeros_like(own)) + own.grad
    return [own.momentum for own in parameters]


# ---- Layers that are right


@parts()
def dropout() -> Model:
    return model(nn.Sequential(Block(), nn.Dropout(0.3)), nn.Sequential(nn.Dropout(0.3), Block()))


@layer()
def noise_in_evaluation_too(layer: Any, x: Tensor) -> Tensor:
    return Block.forward(layer, x) + 0.1 * torch.rand(x.shape)


@parts()
def batch_norm() -> Model:
    return model(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)), nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)))


@layer(calls=lambda: nn.Buffer(torch.zeros(())))
def a_buffer_that_counts(layer: Any, x: Tensor) -> Tensor:
    if layer.training:
        layer.calls += 1
    return Block.forward(layer, x) * (1 + 0.1 * layer.calls)


@parts()
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


@layer(calls=int)
def a_count_that_only_tells(layer: Any, x: Tensor) -> Tensor:
    layer.calls += 1
    return Block.forward(layer, x)


@layer(table=lambda: None)
def a_table_made_at_first_use(layer: Any, x: Tensor, sequences: Any) -> Tensor:
    if layer.table is None:
        layer.table = torch.linspace(0, 1, 64)
    return Block.forward(layer, x) + layer.table[sequences.positions][:, None]


@parts()
def a_tied_head() -> Model:
    layers = model()
    layers[-1].weight = layers[0].weight
    return layers


@parts()
def a_tied_block() -> Model:
    first, second = Block(), Block()
    second.up = first.up
    return model(first, second)


@parts()
def a_buffer_of_one_element_in_the_place_of_many() -> Model:
    first = changed(lambda layer, x: Block.forward(layer, x) * layer.scale)
    first.register_buffer("scale", torch.full((1,), 0.5).expand(WIDTH), persistent=False)
    return model(first)


@parts()
def attributes_that_refer_back() -> Model:
    first: Any = Block()
    first.up.owner, first.settings, first.ring = [first], {"root": first}, []
    first.ring.append(first.ring)
    return model(first)


@parts()
def parameters_side_by_side_in_one_memory() -> Model:
    first, memory = Block(), torch.randn(WIDTH, 2 * WIDTH)
    first.up.weight.data, first.down.weight.data = memory.chunk(2, dim=1)
    return model(first)


@parts()
def a_table_of_all_layers() -> Model:
    table = torch.linspace(0, 1, WIDTH)
    layers = [changed(lambda layer, x: Block.forward(layer, x) + layer.table) for _ in range(2)]
    for own in layers:
        own.register_buffer("table", table[:])
    return model(*layers)


@parts()
def spectral_norm() -> Model:
    second = Block()
    parametrizations.spectral_norm(second.up)
    return model(second=second)


@parts()
def spectral_norm_by_a_hook() -> Model:
    second = Block()
    nn.utils.spectral_norm(second.up)
    return model(second=second)


@layer(recurrent=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
def a_recurrent_layer(layer: Any, x: Tensor, sequences: Any) -> Tensor:
    return torch.cat([layer.recurrent(own[None])[0][0] for own in x.split(sequences.lengths)])


@layer()
def keys_of_the_batch_by_name(layer: Any, x: Tensor, weight: Tensor, reward: Tensor, sequences: Any) -> Tensor:
    rewards = reward.repeat_interleave(torch.tensor(sequences.lengths))
    return Block.forward(layer, x) * weight[:, None] + rewards[:, None]


@layer()
def numbers_by_name(layer: Any, x: Tensor, microbatch: int, num_microbatches: int, step: int) -> Tensor:
    return Block.forward(layer, x) * (step + microbatch / num_microbatches if layer.training else 1.0)


@parts()
def a_mapping_between_layers() -> Model:
    return model(
        changed(lambda layer, x: {"x": Block.forward(layer, x), "mask": x > 0}),
        changed(lambda layer, x, mask: Block.forward(layer, x) * mask),
    )


@parts()
def an_auxiliary_loss_handed_on() -> Given:
    class Ends(nn.Linear):
        def forward(self, input: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(input), loss

    def loss_fn(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Tensor:
        return nats(output[0], microbatch) + 0.1 * output[1].sum()

    layers = model(
        changed(lambda layer, x: (Block.forward(layer, x), x.square().sum().reshape(1))),
        changed(lambda layer, x, loss: (Block.forward(layer, x), loss)),
    )
    layers[-1] = Ends(WIDTH, VOCAB)
    return layers, {"loss_fn": loss_fn}


@parts()
def a_function_of_the_layer_itself() -> Model:
    class Scales(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.act = lambda x: x * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    return model(Scales(), Scales())


@parts()
def hooks_that_change_outputs() -> Model:
    first, second = Block(), Block()
    first.register_forward_hook(lambda module, given, output: output.mul(1.5))
    second.up.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))
    return model(first, second)


@parts()
def a_gradient_hook() -> Model:
    first = Block()
    first.up.weight.register_hook(lambda grad: grad * 0.5)
    return model(first)


class Rounds(torch.autograd.Function):
    """Rounds to eighths; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        return (given[0] * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@layer()
def a_function_with_a_backward_of_its_own(layer: Any, x: Tensor) -> Tensor:
    return Rounds.apply(Block.forward(layer, x))


@parts()
def in_place_operations_inside() -> Model:
    return model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))


@layer()
def checkpointing_of_torch_inside(layer: Any, x: Tensor) -> Any:
    return checkpoint(partial(Block.forward, layer), x, use_reentrant=False)


@parts()
def frozen_layers() -> Model:
    layers = model()
    layers[0].requires_grad_(False)
    layers[1].up.requires_grad_(False)
    return layers


@parts()
def a_layer_that_detaches_its_input() -> Model:
    return model(second=changed(lambda layer, x: Block.forward(layer, x.detach())))


@parts()
def sparse_gradients() -> Model:
    return [nn.Embedding(VOCAB, WIDTH, sparse=True), *model()[1:]]


@parts()
def a_layer_that_gives_what_it_gets() -> Model:
    return [*model()[:2], nn.Identity(), *model()[2:]]


@parts()
def bfloat16() -> Model:
    return [own.bfloat16() for own in model()]


@parts()
def float64() -> Model:
    return [own.double() for own in model()]


@parts()
def rows_of_numbers_instead_of_tokens() -> Given:
    rows = [torch.randn(n, WIDTH) for n in (4, 2, 5, 3)]
    wanted = [torch.randn(n, VOCAB) for n in (4, 2, 5, 3)]

    def loss_fn(output: Tensor, microbatch: PackedBatch) -> Tensor:
        return F.mse_loss(output, microbatch["wanted"], reduction="sum")

    return [nn.Linear(WIDTH, WIDTH), *model()[1:]], {
        "batch": PackedBatch.from_sequences({"tokens": rows, "wanted": wanted}),
        "loss_fn": loss_fn,
        "loss_weight_fn": lambda microbatch: microbatch.num_tokens,
    }


@parts()
def items_without_images() -> Given:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.patches = nn.Embedding(VOCAB, WIDTH), nn.Conv2d(1, WIDTH, 4, 4)

        def forward(self, tokens: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
            return self.words(tokens), self.patches(images).flatten(1)

    def both(layer: Any, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return x + layer.up(x), seen + layer.down(seen)

    def joins(layer: Any, x: Tensor, seen: Tensor, tokens: Tensor) -> Tensor:
        return Block.forward(layer, x.masked_scatter((tokens == 3)[:, None], seen))

    two, one = torch.randn(3, 1, 4, 4).split([2, 1])
    tokens = [[5, 6, 7], [3, 1, 3, 2], [4, 4], [1, 2, 3]]
    labels = [[*own[1:], -100] for own in tokens]
    batch = PackedBatch.from_sequences({"tokens": tokens, "labels": labels, "images": [[], two, [], one]})
    return [Looks(), changed(both), changed(joins), nn.Linear(WIDTH, VOCAB)], {"batch": batch}


@parts()
def layers_made_where_they_are_held() -> Model:
    return [own if number != 2 else partial(Block) for number, own in enumerate(model())]  # type: ignore[misc]


# ---- Losses and optimizers that are right


@parts()
def a_sum_with_a_weight_for_each_class() -> Given:
    return model(), {"loss_fn": nn.CrossEntropyLoss(torch.linspace(1, 3, VOCAB), reduction="sum")}


@parts()
def a_loss_of_logits_and_labels() -> Given:
    return model(), {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}


@loss()
def a_loss_with_numbers_beside_it(logits: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    return nats(logits, microbatch), {"largest": Metric(logits.max(), "max")}


@loss()
def a_loss_by_step_and_rewards(logits: Tensor, microbatch: PackedBatch, step: int) -> Tensor:
    return (nats_of_tokens(logits, microbatch) * microbatch["weight"]).sum() * min(1.0, step / 2)


@parts()
def a_parameter_of_the_loss_in_the_last_layer() -> Given:
    class Tempered(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, VOCAB)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(input), self.scale

    def loss_fn(output: tuple[Tensor, Tensor], microbatch: PackedBatch) -> Tensor:
        logits, scale = output
        return nats(logits, microbatch) * (-scale.float()).exp().sum() + scale.float().sum() * len(logits)

    return [*model()[:-1], Tempered()], {"loss_fn": loss_fn}


@parts()
def a_frozen_teacher_in_the_loss() -> Given:
    teacher = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)).requires_grad_(False)

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return F.cross_entropy(logits, teacher(microbatch["tokens"]).softmax(-1), reduction="sum")

    return model(), {"loss_fn": loss_fn, "loss_weight_fn": lambda microbatch: microbatch.num_tokens}


@parts()
def adam_with_a_scheduler() -> Given:
    scheduler = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)
    return model(), {"optimizer": OptimizerConfig(factory=partial(torch.optim.Adam, lr=0.1), scheduler=scheduler)}


@parts()
def adafactor() -> Given:
    return model(), {"optimizer": partial(torch.optim.Adafactor, lr=0.1)}


@optimizer()
def an_optimizer_of_parameters_each_by_itself(optimizer: Any, parameters: list[Any]) -> list[Tensor]:
    found = []
    for own in parameters:
        state = optimizer.state[own]
        state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(own)) + own.grad
        state["step"] = state.get("step", 0) + 1
        found.append(state["momentum"] * own.norm() / state["step"])
    return found


@parts()
def groups_of_parameters() -> Given:
    groups = (ParameterGroup("*.bias", weight_decay=0.0), ParameterGroup("layers.0.*", frozen=True))
    return model(), {"optimizer": OptimizerConfig(groups=groups, clip_norm=0.1)}


BREACHES = [case for case in CASES if case.causes]
RIGHT = [case for case in CASES if not case.causes]
