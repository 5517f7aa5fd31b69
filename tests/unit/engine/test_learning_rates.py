"""The learning rate follows any callable of the step, torch's schedulers, or an absolute number of the step."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from penstock import PackedBatch
from penstock.engine import Engine
from penstock.settings import LearningRate, OptimizerConfig, ParameterGroup
from tests.dist.users_optimizers import ScheduleFree, Shampoo

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "cosine": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1.0 / (epoch + 1)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=20),
    "chained": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


def configured(**settings: Any) -> OptimizerConfig:
    """Settings as a user spells them, names and tables as plain values."""
    return OptimizerConfig(**settings)


def opened(optimizer: Any, **changes: Any) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)]
    return Engine.from_layers(layers, 8, optimizer=optimizer, device="cpu", **changes)


def rates_of(engine: Engine, num_steps: int, **step: Any) -> list[float]:
    batch = PackedBatch.from_documents([torch.arange(9), torch.arange(5)])
    return [engine.train_batch(batch, **step).learning_rate for _ in range(num_steps)]


def reference_rates(scheduler: Callable[[Any], Any], num_steps: int) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(2, 2))])
    schedule, found = scheduler(optimizer), []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.shows(111)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_set_the_rate_of_each_step_as_in_torchs_own_loop(name: str, tmp_path: Path) -> None:
    expected = reference_rates(SCHEDULERS[name], 12)
    config = OptimizerConfig(factory=SGD, scheduler=SCHEDULERS[name])
    engine = opened(config)
    assert rates_of(engine, 8) == expected[:8] and len(set(expected)) > 1
    engine.save(tmp_path / "run")
    resumed = opened(config)
    resumed.load(tmp_path / "run")
    assert rates_of(resumed, 4) == expected[8:]
    # An absolute number goes there at once, and back.
    assert [rates_of(resumed, 1, step=n)[0] for n in (12, 3, 7)] == [expected[11], expected[2], expected[6]]
    assert resumed.step == 7 and rates_of(resumed, 1) == [expected[7]]


@pytest.mark.shows(111)
def test_the_built_in_optimizer_takes_a_scheduler_or_any_callable_too() -> None:
    config = OptimizerConfig(learning_rate=0.1, scheduler=SCHEDULERS["step"])
    assert rates_of(opened(config), 8) == reference_rates(SCHEDULERS["step"], 8)
    engine = opened(OptimizerConfig(learning_rate=lambda step: 0.5 / step, weight_decay=lambda step: 0.1 * step))
    assert rates_of(engine, 3) == [0.5, 0.25, 0.5 / 3]
    assert rates_of(engine, 2, step=10) == [0.05, 0.05] and engine.step == 10


@pytest.mark.shows(111)
def test_an_absolute_step_gives_the_weights_of_a_run_that_took_the_rates_in_that_order(tmp_path: Path) -> None:
    rate = lambda step: 0.5 / step  # noqa: E731
    jumped, plain = opened(OptimizerConfig(learning_rate=rate)), opened(OptimizerConfig(learning_rate=lambda s: 0.1))
    batch = PackedBatch.from_documents([torch.arange(9), torch.arange(5)])
    for step in (5, 5, 5):
        result = jumped.train_batch(batch, step=step)
        plain.train_batch(batch)
        assert (result.step, result.learning_rate) == (step, 0.1)
    for name, parameter in jumped.parameters().items():
        assert torch.equal(parameter, plain.parameters()[name])
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=rf"step = {re.escape(repr(wrong))}"):
            jumped.train_batch(batch, step=wrong)  # type: ignore[arg-type]
    # Four updates, and the last is step 1.
    jumped.train_batch(batch, step=1)
    jumped.save(tmp_path / "run")
    resumed = opened(OptimizerConfig(learning_rate=rate))
    resumed.load(tmp_path / "run")
    assert resumed.step == 1
    for name, parameter in jumped.parameters().items():
        assert torch.equal(parameter, resumed.parameters()[name])


def test_groups_have_rates_of_their_own() -> None:
    groups = (
        ParameterGroup("layers.0.*", learning_rate=0.2),
        ParameterGroup("*.bias", learning_rate=lambda step: 0.0, weight_decay=0.0),
    )
    engine = opened(configured(name="sgd", learning_rate=lambda step: 0.1, weight_decay=0.0, groups=groups))
    before = {name: p.detach().clone() for name, p in engine.parameters().items()}
    assert rates_of(engine, 1) == [0.1]
    norm = torch.cat([engine.gradient(name).flatten() for name in before]).norm()
    assert norm < 1.0, "nothing was clipped"
    for name, parameter in engine.parameters().items():
        rate = 0.2 if name.startswith("layers.0.") else 0.0 if name.endswith("bias") else 0.1
        assert torch.equal(parameter, before[name].add(engine.gradient(name), alpha=-rate)), name


@pytest.mark.shows(162)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_scheduler_sets_its_own_keys_alone_and_a_rate_that_is_a_tensor_stays_one(tensor: bool) -> None:
    def factory(groups: Any) -> torch.optim.Optimizer:
        return Shampoo(groups, rate=torch.tensor(0.1)) if tensor else ScheduleFree(groups, lr=0.1)

    def scheduled(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.StepLR(optimizer, 2, 0.5)

    engine = opened(OptimizerConfig(factory=factory, scheduler=scheduled, clip_norm=0.0))
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in engine.parameters().items()}
    reference = factory([{"params": list(theirs.values())}])
    scheduler = scheduled(reference)
    for _ in range(5):
        rates_of(engine, 1)
        for name, parameter in theirs.items():
            parameter.grad = engine.gradient(name).clone()
        reference.step()
        scheduler.step()
    assert all(torch.equal(p, theirs[name]) for name, p in engine.parameters().items())


@pytest.mark.shows(162)
def test_a_rate_that_is_given_counts_also_where_it_is_the_usual_one() -> None:
    usual = LearningRate().peak
    for given in (usual, LearningRate()):
        engine = opened(OptimizerConfig(factory=SGD, learning_rate=given))
        assert rates_of(engine, 1) == [usual]
    assert rates_of(opened(OptimizerConfig(factory=SGD)), 1) != [usual]


@pytest.mark.shows(162)
@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.LBFGS, "LBFGS steps with a closure that computes the loss anew"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (lambda groups: None, "gave a NoneType; it gives a torch.optim.Optimizer"),
        ("adaw", r'optimizer.name = .adaw.: expected "adamw"'),
        (3, "optimizer = 3 is not possible"),
        (configured(name="sgd", beta1=0.5), "beta1 = 0.5 has no effect on SGD"),
        (configured(name="rprop", weight_decay=0.3), "Rprop has no weight decay"),
        (configured(name="sgd", arguments={"momentun": 0.9}), "momentun"),
        (configured(name="muon"), "Muon refuses .* such as layers.1.bias of shape"),
        (
            OptimizerConfig(factory=SGD, scheduler=lr_scheduler.ReduceLROnPlateau),
            "whose rates follow from the step alone",
        ),
    ],
)
def test_what_no_engine_can_step_with_is_refused_by_name(optimizer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        opened(optimizer)
