"""An update rule of the package's own: one class, entered in one table, is all that an optimizer takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.optimizer.groups import ParameterGroups
from penstock.engine.optimizer.optimizer import Optimizer
from penstock.engine.optimizer.steppers import DIVISIONS, STEPPERS, Block, FlatStepper, Values
from penstock.parallel import GradientBuckets
from penstock.settings import (
    Division,
    LearningRate,
    OptimizerConfig,
    OptimizerName,
    WeightDecay,
)

# The settings know the names of torch.optim alone; the tests have no file that adds one to them.
NAME = OptimizerName.SGD
RATE, DECAY, BETAS = 0.01, 0.3, (0.8, 0.95)
CONFIG = OptimizerConfig(LearningRate(RATE), *BETAS, weight_decay=WeightDecay(DECAY), clip_norm=0.0, name=NAME)
SHAPES = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (7, 5)}


class Lion(FlatStepper):
    """Lion. Source: arXiv 2302.06675, algorithm 2."""

    state_kinds = ("exp_avg",)
    hyperparameters: ClassVar[Values] = {"betas": (0.9, 0.99), "weight_decay": 0.0}

    def step_group(self, blocks: Sequence[Block], values: Values) -> None:
        first, second = values["betas"]
        for block in blocks:
            master, gradient, mean = block.master, block.gradient, block.state["exp_avg"]
            master.mul_(1 - values["lr"] * values["weight_decay"])
            master.sub_(mean.lerp(gradient, 1 - first).sign_(), alpha=values["lr"])
            mean.lerp_(gradient, 1 - second)


@pytest.fixture(autouse=True)
def lion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPPERS, NAME, Lion)


def stage(values: dict[str, Tensor]) -> GradientBuckets:
    return GradientBuckets([(name, nn.Parameter(value.clone())) for name, value in values.items()], cap_bytes=64)


def gradients() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}


def step(optimizer: Optimizer, buckets: GradientBuckets, by_name: dict[str, Tensor]) -> None:
    for name, view in buckets.gradients.items():
        view.copy_(by_name[name])
    assert optimizer.step().success


def test_it_steps_resumes_and_is_put_back_and_its_state_is_named_and_counted() -> None:
    draws = gradients()
    values, steps = next(draws), [next(draws) for _ in range(4)]
    buckets = stage(values)
    optimizer = Optimizer([buckets], CONFIG)
    means = {name: torch.zeros_like(value) for name, value in values.items()}
    for number, by_name in enumerate(steps):
        if number == 2:
            undo = optimizer.snapshot()
            step(optimizer, buckets, steps[0])
            undo()
            saved = {name: state.values.clone() for name, state in optimizer.owned_state().items()}
            progress, buckets = optimizer.progress(), stage(dict(buckets.parameters))
            optimizer = Optimizer([buckets], CONFIG)
            for name, state in optimizer.owned_state().items():
                state.values.copy_(saved[name])
            optimizer.load_progress(progress)
        step(optimizer, buckets, by_name)
        for name, gradient in by_name.items():
            decayed = values[name] * (1 - RATE * (DECAY if name.endswith("weight") else 0.0))
            values[name] = decayed - RATE * (means[name] * BETAS[0] + gradient * (1 - BETAS[0])).sign()
            means[name] = means[name] * BETAS[1] + gradient * (1 - BETAS[1])
        for name, parameter in buckets.parameters.items():
            torch.testing.assert_close(parameter.detach(), values[name], rtol=1e-12, atol=1e-14)
    assert optimizer.owned_state().keys() == {f"optimizer.exp_avg.{name}" for name in SHAPES}
    assert optimizer.state_bytes == 8 * sum(bucket.parameters.numel() for bucket in buckets.buckets)
    assert not optimizer.may_fail


def test_zero_learns_of_it_from_the_table() -> None:
    assert [rule.division for rule in ParameterGroups(CONFIG).rules] == [Division.ELEMENTS] * 2


@pytest.mark.parametrize("name", [name for name, own in DIVISIONS.items() if own is Division.ELEMENTS])
def test_torchs_optimizers_that_are_declared_to_step_elements_do(name: str) -> None:
    kind = getattr(torch.optim, name.removeprefix("torch."))
    generator = torch.Generator().manual_seed(0)
    value, *of_steps = (torch.randn(6, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    whole, parts = nn.Parameter(value.clone()), [nn.Parameter(p.clone()) for p in value.flatten().split(20)]
    together, apart = kind([whole], lr=0.01), kind(parts, lr=0.01)
    for gradient in of_steps:
        whole.grad = gradient.clone()
        for part, own in zip(parts, gradient.flatten().split(20), strict=True):
            part.grad = own.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(torch.cat([p.detach() for p in parts]), whole.detach().flatten(), rtol=1e-12, atol=1e-14)
    assert not torch.equal(whole, value)


def test_every_optimizer_of_torch_stands_in_the_table() -> None:
    bases = {"Optimizer"}
    classes = {name for name, own in vars(torch.optim).items() if isinstance(own, type)} - bases
    assert {name.removeprefix("torch.") for name in DIVISIONS if name.startswith("torch.")} == classes


class Unknown(torch.optim.SGD):
    """Another class, of which nothing is known."""


class Declared(Unknown):
    divides = "elements"


def hooked(groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.shows(106)
@pytest.mark.parametrize(
    ("factory", "settings", "expected"),
    [
        (torch.optim.SGD, {}, Division.ELEMENTS),
        (torch.optim.Muon, {}, Division.PARAMETERS),
        (Unknown, {}, Division.PARAMETERS),
        (hooked, {}, Division.PARAMETERS),
        (Declared, {}, Division.ELEMENTS),
        (Declared, {"divides": "model"}, Division.MODEL),
        (torch.optim.SGD, {"divides": "parameters"}, Division.PARAMETERS),
    ],
)
def test_a_division_is_declared_by_settings_or_class_or_known_of_torchs_classes_or_by_parameters(
    factory: Any, settings: dict[str, Any], expected: Division
) -> None:
    assert ParameterGroups(OptimizerConfig(factory=factory, **settings)).rules[0].division is expected


def test_a_scheduler_changes_its_hyperparameters() -> None:
    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    config = OptimizerConfig(LearningRate(RATE), *BETAS, clip_norm=0.0, name=NAME, scheduler=halved)
    values = Optimizer([stage(next(gradients()))], config).rates.at(3)
    assert [(own["lr"], own["betas"]) for own in values] == [(RATE / 4, BETAS)] * 2
