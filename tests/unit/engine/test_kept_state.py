"""State beside the weights: buffers that are saved or not, and what a failed call leaves, in one process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from penstock import (
    ConfigError,
    Engine,
    EngineOptions,
    PackedBatch,
)
from penstock.engine.optimizer.torch_stepper import TorchStepper
from penstock.settings import OptimizerConfig, ParameterGroup

BATCH = PackedBatch.from_documents([[1, 2, 3], [4, 5]])


class Buffered(nn.Linear):
    """Has a buffer that belongs to its state, and one that does not."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def engine_of(**options: Any) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), Buffered(), nn.Linear(8, 16)]
    return Engine.from_layers(layers, 8, options=EngineOptions(device="cpu", **options))


@pytest.mark.shows(102)
def test_buffers_that_are_no_state_of_a_module_are_none_of_the_engine() -> None:
    engine = engine_of()
    assert set(engine.buffers()) == {"layers.1.kept"} and "layers.1.scratch" not in engine.state()
    engine.close()


def counting(groups: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: STEPS.append("hook"))
    return optimizer


STEPS: list[str] = []


class Stepping(torch.optim.SGD):
    """Notes each of its steps."""

    def step(self, closure: Any = None) -> None:
        STEPS.append("step")
        super().step()


@pytest.mark.shows(162)
@pytest.mark.parametrize(("factory", "name"), [(counting, "hook"), (partial(Stepping, lr=0.1), "step")])
def test_an_optimizer_steps_as_often_as_the_engine(factory: Any, name: str, tmp_path: Path) -> None:
    STEPS.clear()
    engine = engine_of(optimizer=OptimizerConfig(factory=factory, zero=True))
    engine.save(tmp_path)
    for _ in range(2):
        engine.train_batch(BATCH)
    engine.save(tmp_path)
    other = engine_of(optimizer=OptimizerConfig(factory=factory, zero=True))
    other.load(tmp_path)
    other.train_batch(BATCH)
    assert [name] * 3 == STEPS


class Keeping(torch.optim.SGD):
    """Keeps something in one of the places of a state dict."""

    def __init__(self, groups: Any, where: str, what: Any) -> None:
        super().__init__(groups, lr=0.1)
        self.where, self.what = where, what

    def step(self, closure: Any = None) -> None:
        super().step()
        own = self.what() if callable(self.what) else self.what
        for group in self.param_groups:
            if self.where == "groups":
                group["log"] = own
            for parameter in group["params"]:
                self.state[parameter]["log"] = own if self.where == "state" else 1

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return found | {"log": self.what} if self.where == "dict" else found


@pytest.mark.shows(162)
@pytest.mark.parametrize(
    ("where", "words"), [("state", "layers.0.weight"), ("groups", "group 0"), ("dict", "the whole optimizer")]
)
def test_state_that_no_checkpoint_can_hold_is_refused_by_name_at_the_first_save(
    where: str, words: str, tmp_path: Path
) -> None:
    engine = engine_of(optimizer=OptimizerConfig(factory=partial(Keeping, where=where, what=[{1}])))
    engine.train_batch(BATCH)
    with pytest.raises(ConfigError, match=rf"Keeping has state of {words} that no .*, 'log': a set cannot be"):
        engine.save(tmp_path / "after")
    assert engine.train_batch(BATCH).success, "training goes on"
    engine.close()


class Fallible(torch.optim.SGD):
    """Keeps a count in a place of its state dict, by which it steps, and can fail after half of its parameters."""

    fails = False

    def __init__(self, groups: Any, where: str) -> None:
        super().__init__(groups, lr=0.1)
        self.where = where

    def num_steps(self, parameter: Any) -> float:
        if self.where == "memory":
            parameter.data = parameter.data.clone()
            own = self.state[parameter].setdefault("own", torch.zeros(0))
            own.data = torch.cat([own, torch.ones(1)])
            return float(len(own))
        if self.where == "list":
            counts = self.state[parameter].setdefault("counts", [torch.zeros(2, dtype=torch.int32)])
            return float(counts[0].add_(1)[0])
        holder = self.param_groups[0] if self.where == "group" else self.state[parameter]
        holder["count"] = holder.get("count", 0) + 1
        return float(holder["count"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        for number, parameter in enumerate(parameters):
            parameter.sub_(parameter.grad / self.num_steps(parameter))
            if self.fails and 2 * number > len(parameters):
                raise ArithmeticError("made to fail")


PLACES = ["state", "list", "group", "memory"]


@pytest.mark.shows(112)
@pytest.mark.parametrize("where", PLACES)
def test_an_optimizers_step_that_fails_is_as_if_it_had_not_been_tried(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = (engine_of(optimizer=OptimizerConfig(factory=partial(Fallible, where=where))) for _ in range(2))
    for _ in range(3):
        monkeypatch.setattr(Fallible, "fails", True)
        with pytest.raises(ArithmeticError):
            engine.train_batch(BATCH)
        monkeypatch.setattr(Fallible, "fails", False)
        assert engine.train_batch(BATCH).loss == plain.train_batch(BATCH).loss
    theirs = plain.parameters()
    assert [name for name, own in engine.parameters().items() if not torch.equal(own, theirs[name])] == []


def test_state_that_was_read_before_a_step_is_not_loaded_after_it() -> None:
    engine, plain = (engine_of(optimizer=OptimizerConfig(factory=partial(Fallible, where="state"))) for _ in range(2))
    for number in range(3):
        engine.state()
        assert engine.train_batch(BATCH).loss == plain.train_batch(BATCH).loss, f"step {number + 1}"
        engine.load_progress(engine.progress())
    engine.close()
    plain.close()


def kept_by(engine: Engine, where: str) -> Any:
    """The value that an engine's optimizer keeps there."""
    optimizer = next(own for own in engine.trainer.optimizer._steppers if isinstance(own, TorchStepper))._optimizer
    return (next(iter(optimizer.state.values())) if where == "state" else optimizer.param_groups[0])["log"]


@pytest.mark.shows(162)
@pytest.mark.parametrize("where", ["state", "groups"])
def test_lists_and_dictionaries_come_back(where: str, tmp_path: Path) -> None:
    value = {"a": [1, (2.5, None), [torch.arange(3)]], 7: torch.ones(2, dtype=torch.float64)}
    config = OptimizerConfig(factory=partial(Keeping, where=where, what=value))
    engine, other = engine_of(optimizer=config), engine_of(optimizer=config)
    engine.train_batch(BATCH)
    engine.save(tmp_path)
    other.load(tmp_path)
    found = kept_by(other, where)
    assert found is not value and str(found) == str(value)
    assert found["a"][2][0].dtype is torch.int64
    engine.close()
    other.close()


@pytest.mark.shows(162)
def test_values_of_a_group_that_is_frozen_now_are_left(tmp_path: Path) -> None:
    groups = (ParameterGroup("layers.2.*"),)
    config = OptimizerConfig(factory=partial(Keeping, where="groups", what=1), groups=groups)
    frozen = replace(config, groups=(replace(groups[0], frozen=True),))
    engine, other = engine_of(optimizer=config), engine_of(optimizer=frozen)
    engine.train_batch(BATCH)
    engine.save(tmp_path)
    other.load(tmp_path)
    assert other.step == 1 and kept_by(other, "groups") == 1
    engine.close()
    other.close()


@pytest.mark.shows(162)
def test_tensors_of_other_classes_come_back(tmp_path: Path) -> None:
    what = lambda: TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))  # noqa: E731
    config = OptimizerConfig(factory=partial(Keeping, where="state", what=what))
    engine, other = engine_of(optimizer=config), engine_of(optimizer=config)
    engine.train_batch(BATCH)
    engine.save(tmp_path)
    other.load(tmp_path)
    found = kept_by(other, "state")
    assert isinstance(found, TwoTensor)
    assert torch.equal(found.a, torch.ones(2, 3)) and torch.equal(found.b, torch.zeros(2, 3))
    engine.close()
    other.close()


@pytest.mark.shows(162)
def test_state_of_another_optimizer_is_refused_with_nothing_loaded(tmp_path: Path) -> None:
    momentum, adam = partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adam, lr=0.1)
    engine, other = engine_of(optimizer=momentum), engine_of(optimizer=adam)
    engine.train_batch(BATCH)
    engine.save(tmp_path)
    before = {name: p.detach().clone() for name, p in other.parameters().items()}
    with pytest.raises(ValueError, match="has the state of SGD, but this engine's optimizer is Adam; load it with the"):
        other.load(tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in other.parameters().items())
    assert other.step == 0 and other.train_batch(BATCH).success


@pytest.mark.shows(112)
def test_random_numbers_are_as_before_a_call_that_failed() -> None:
    engine = engine_of()
    before = torch.get_rng_state()

    def hook(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        torch.rand(5)
        raise ArithmeticError("made to fail")

    with pytest.raises(ArithmeticError):
        engine.forward(BATCH, hook)
    assert torch.equal(torch.get_rng_state(), before)
    engine.close()


class Named(nn.Linear):
    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        return super().forward(input) * mask[:, None]


@pytest.mark.shows(103)
def test_a_rank_that_is_given_metadata_alone_is_told_which_layer_needs_the_key() -> None:
    engine = Engine.from_layers([nn.Embedding(16, 8), Named(8, 8), nn.Linear(8, 16)], 8, device="cpu")
    given = BATCH.with_key("mask", torch.ones(5))
    with pytest.raises(ValueError, match=r"layers\.1 takes the key 'mask', but this rank was given metadata alone"):
        engine.train_batch(given.without_data())
    assert engine.train_batch(given).success
    engine.close()
