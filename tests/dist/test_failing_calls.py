"""Callbacks, saves, optimizers and constructors that fail on one rank: all ranks hear of it, and can go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import (
    CallbackError,
    CheckpointError,
    Engine,
    EngineOptions,
    Layout,
    OptimizerConfig,
    PackedBatch,
    PipelineError,
    SamplingParams,
    StepError,
    token_cross_entropy,
)
from penstock.engine.checkpoint import CheckpointReader, checkpointer
from penstock.engine.optimizer.steppers import AdamW
from penstock.engine.own_layers import units_of_layers
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.settings import ParameterGroup
from tests.dist.grid_cases import DENSE
from tests.dist.launch import run_ranks

LAYOUTS = (Layout(pp=2), Layout(dp=2))
# The others would wait this long if nobody told them.
TIMEOUT_S = 60.0
# Seconds on a machine that may have several other things to do.
LIMIT_S = 10.0


def engine_of(layout: Layout, **options: Any) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)]
    return Engine.from_layers(layers, 8, layout, EngineOptions(timeout_s=TIMEOUT_S), **options)


def batch_of(engine: Engine, step: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(10 * step + engine.grid.dp_rank)
    return PackedBatch.from_documents([torch.randint(0, 16, (n,), generator=generator) for n in (3, 2, 4)])


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.parameters().items()}


def heard(kind: type[Exception], call: Callable[[], object]) -> tuple[str, str]:
    """The error's message and the name of its cause; fails where that takes long."""
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - start < LIMIT_S
    assert type(caught.value) is kind
    return str(caught.value), type(caught.value.__cause__).__name__


class Raises:
    """Raises where it is asked to, on one rank."""

    def __init__(self) -> None:
        self.event = ""

    def on_step(self, result: object) -> None:
        self._see("on_step")

    def on_evaluation(self, step: int, loss: float) -> None:
        self._see("on_evaluation")

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._see("on_checkpoint")

    def _see(self, event: str) -> None:
        if event == self.event:
            raise ArithmeticError("made to fail")


def callbacks_that_raise(rank: int, layout: Layout, folder: Path) -> list[Any]:
    """Only the last rank has callbacks: the others take part without any."""
    engine, callback = engine_of(layout), Raises()
    if rank == 1:
        engine.watch(callback)
    messages = []
    for event, call in {
        "on_step": lambda: engine.train_batch(batch_of(engine)),
        "on_evaluation": lambda: engine.evaluate([batch_of(engine)]),
        "on_checkpoint": lambda: engine.save(folder),
    }.items():
        callback.event = event
        messages.append(heard(CallbackError, call))
        callback.event = ""
        call()
    result = engine.train_batch(batch_of(engine))
    engine.close()
    return [messages, result.step, result.loss]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_callback_that_raises_on_one_rank_ends_the_call_on_all_and_nothing_is_undone(
    layout: Layout, tmp_path: Path
) -> None:
    results = run_ranks(2, callbacks_that_raise, layout, tmp_path)
    for rank, (messages, step, loss) in enumerate(results):
        for event, (text, cause) in zip(("on_step", "on_evaluation", "on_checkpoint"), messages, strict=True):
            assert text.startswith(f"rank 1 failed in {event}, step ")
            assert text.endswith(": ArithmeticError: made to fail")
            assert rank == 0 or cause == "ArithmeticError"
        # The step whose callback failed counts.
        assert step == 3 and loss == results[0][2]


def no_space(*_: object, **__: object) -> None:
    raise OSError("no space left on device")


def saves_that_fail(rank: int, layout: Layout, folder: Path) -> list[Any]:
    engine = engine_of(layout)
    engine.train_batch(batch_of(engine))
    engine.save(folder)
    engine.train_batch(batch_of(engine, 1))
    messages = []
    for owner, name in (
        (checkpointer, "write_tensors"),
        *((checkpointer.Checkpointer, one) for one in ("_copy_to_host", "_publish")),
    ):
        # Only rank 0 publishes.
        failing = 0 if name == "_publish" else 1
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(owner, name, no_space)
            messages.append((failing, heard(CheckpointError, lambda: engine.save(folder))[0]))
    published = [path.name for path in folder.glob("step-*")]
    engine.save(folder)
    saved = weights(engine)
    engine.train_batch(batch_of(engine, 2))
    engine.load(folder)
    loaded = weights(engine)
    engine.close()
    return [messages, published, engine.step, all(torch.equal(saved[name], loaded[name]) for name in saved)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(layout: Layout, tmp_path: Path) -> None:
    for messages, published, step, same in run_ranks(2, saves_that_fail, layout, tmp_path):
        assert len(messages) == 3
        for failing, text in messages:
            why = rf"step 2 could not be saved: rank {failing}: {re.escape(str(tmp_path))}\S*: no space left on device"
            assert re.fullmatch(why, text), text
        assert published == ["step-00000001"] and step == 2 and same


def fails_on_last_rank(*_: Any, **__: Any) -> Any:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        raise ArithmeticError("made to fail")


class Unbuildable(nn.Linear):
    """A layer whose parameters cannot be made on the last rank."""

    def reset_parameters(self) -> None:
        fails_on_last_rank()
        super().reset_parameters()


def is_of_model(optimizer: torch.optim.Optimizer) -> bool:
    """True for the one that steps the model; an engine tries others on a few numbers."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"]) > 100


class SGD(torch.optim.SGD):
    """An optimizer that cannot be made of the model's parameters on the last rank."""

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__(groups, lr=0.1, **options)
        if is_of_model(self):
            fails_on_last_rank()


def units_of(build: Callable[[], nn.Module]) -> list[UnitSpec]:
    first, last = units_of_layers([nn.Embedding(16, 8), nn.Linear(8, 16)])
    return [first, replace(last, build=build, initialise=lambda module, seed: module.to_empty(device="cpu"))]


def constructors(layout: Layout, folder: Path) -> dict[str, Callable[[], object]]:
    def units(groups: ModelGroups) -> list[UnitSpec]:
        fails_on_last_rank()
        return units_of(lambda: nn.Linear(8, 16))

    def loaded() -> None:
        engine = engine_of(layout)
        engine.save(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointReader, "_load", fails_on_last_rank)
            engine.load(folder)

    options = EngineOptions(timeout_s=TIMEOUT_S)
    return {
        "units": lambda: Engine(units, 8, layout, options),
        "build": lambda: Engine(units_of(lambda: Unbuildable(8, 16)), 8, layout, options),
        "optimizer": lambda: engine_of(layout, optimizer=SGD),
        "load": loaded,
    }


def fail_to_construct(rank: int, layout: Layout, folder: Path) -> dict[str, str]:
    messages = {}
    for name, construct in constructors(layout, folder).items():
        start = time.monotonic()
        try:
            construct()
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - start < LIMIT_S
    engine = engine_of(layout)
    engine.train_batch(batch_of(engine))
    engine.close()
    return messages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_engine_that_one_rank_cannot_make_or_load_is_made_on_none(layout: Layout, tmp_path: Path) -> None:
    *others, last = run_ranks(layout.world_size, fail_to_construct, layout, tmp_path)
    number = layout.world_size - 1
    assert len(last) == 4 and set(last.values()) == {"ArithmeticError: made to fail"}
    for messages in others:
        assert messages.pop("load") == f"CheckpointError: rank {number}: made to fail"
        text = f"PipelineError: rank {number} could not make its part of the engine: ArithmeticError: made to fail"
        assert len(messages) == 3 and set(messages.values()) == {text}


class Momentum(torch.optim.SGD):
    """An optimizer that raises on the last rank in its third step, when it has moved a part of its weights."""

    num_steps = 0

    def __init__(self, groups: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def step(self, closure: Any = None) -> None:
        # Of the class: an attribute of its own is put back with the step that fails.
        Momentum.num_steps += 1
        super().step()
        if Momentum.num_steps == 3:
            fails_on_last_rank()


class Plain(torch.optim.SGD):
    """The same rule, owned by whole parameters as that of any class that is not torch's own."""

    def __init__(self, groups: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=weight_decay)


def momentum_alone(kind: type[torch.optim.SGD], zero: bool) -> OptimizerConfig:
    return OptimizerConfig(factory=partial(kind, lr=0.1, momentum=0.9), zero=zero)


def momentum_and_adamw(kind: type[torch.optim.SGD], zero: bool) -> OptimizerConfig:
    """Steps the biases by the built-in AdamW, which counts its updates, after the weights."""
    # Under the name that the settings know; the process ends with the test.
    torch.optim.SGD = kind
    weights = ParameterGroup("*.weight", name="sgd", learning_rate=0.1, arguments={"momentum": 0.9})
    return OptimizerConfig(zero=zero, groups=(weights,))


Config = Callable[[type[torch.optim.SGD], bool], OptimizerConfig]


def an_optimizer_that_raises(rank: int, config: Config, layout: Layout, precision: str, zero: bool) -> dict[str, Any]:
    engine = engine_of(layout, optimizer=config(Momentum, zero), precision=precision)
    results, message = [], ()
    for step in range(4):
        batch = batch_of(engine, step)
        if step == 2:
            before = engine.trainer.optimizer.progress()
            message = heard(StepError, lambda: engine.train_batch(batch))  # noqa: B023
            assert engine.trainer.optimizer.progress() == before
        results.append(engine.train_batch(batch).grad_norm)
    state = {name: part.values.clone() for name, part in engine.trainer.optimizer.owned_state().items()}
    state |= weights(engine)
    engine.close()
    return {"message": message, "results": results, "state": state}


def optimize(rank: int, config: Config, layout: Layout, precision: str, zero: bool) -> dict[str, Any]:
    """The same with nothing that fails."""
    engine = engine_of(layout, optimizer=config(Plain, zero), precision=precision)
    results = [engine.train_batch(batch_of(engine, step)).grad_norm for step in range(4)]
    state = {name: part.values.clone() for name, part in engine.trainer.optimizer.owned_state().items()}
    state |= weights(engine)
    engine.close()
    return {"results": results, "state": state}


@pytest.mark.parametrize(
    ("config", "layout", "precision", "zero"),
    [
        (momentum_alone, Layout(pp=2), "bf16", False),
        (momentum_and_adamw, Layout(dp=2), "bf16", True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_optimizer_that_raises_on_one_rank_has_moved_nothing(
    config: Config, layout: Layout, precision: str, zero: bool
) -> None:
    world, last = layout.world_size, layout.world_size - 1
    failed = run_ranks(world, an_optimizer_that_raises, config, layout, precision, zero)
    clean = run_ranks(world, optimize, config, layout, precision, zero)
    for rank, (ours, theirs) in enumerate(zip(failed, clean, strict=True)):
        text, cause = ours["message"]
        assert text.startswith(f"rank {last} ") and " failed in STEP, step 3: ArithmeticError: made to fail" in text
        assert "load a checkpoint" not in text and (rank != last or cause == "ArithmeticError")
        assert ours["results"] == theirs["results"]
        assert ours["state"].keys() == theirs["state"].keys() and len(ours["state"]) > 2
        assert all(torch.equal(tensor, theirs["state"][name]) for name, tensor in ours["state"].items())


def a_built_in_optimizer_that_raises(rank: int, layout: Layout, folder: Path) -> list[str]:
    """The built-in AdamW is stepped without a copy: once it has failed, weights must be loaded."""
    engine = engine_of(layout)
    engine.train_batch(batch_of(engine))
    engine.save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamW, "step", fails_on_last_rank)
        if rank == 0:
            # Nothing makes it wait for the other one's weights, so it hears in its next call.
            engine.train_batch(batch_of(engine))
        messages = [heard(StepError, lambda: engine.train_batch(batch_of(engine)))[0]]
    messages.append(heard(PipelineError, lambda: engine.train_batch(batch_of(engine)))[0])
    engine.load(folder)
    messages.append(str(engine.train_batch(batch_of(engine)).step))
    engine.close()
    return messages


def test_an_engine_whose_weights_may_differ_takes_no_step_before_it_has_loaded_some(tmp_path: Path) -> None:
    for first, second, step in run_ranks(2, a_built_in_optimizer_that_raises, Layout(pp=2), tmp_path):
        assert first == second and first.startswith("rank 1 failed in STEP, step 2: ArithmeticError: made to fail; ")
        assert first.endswith("weights may differ between ranks: load a checkpoint") and step == "2"


def decoder(layout: Layout) -> Engine:
    options = EngineOptions(timeout_s=TIMEOUT_S)
    return Engine(lambda groups: decoder_units(DENSE, groups=groups), DENSE.hidden_size, layout, options)


def answers(engine: Engine, **listeners: Any) -> list[Any]:
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = SamplingParams(max_new_tokens=5, temperature=1.0, seed=3)
    return [(a.tokens, a.log_probs) for a in engine.generate(prompts, params, **listeners).sequences]


def results_of(engine: Engine, **listeners: Any) -> list[Any]:
    """What scoring, evaluation and generation give, as plain numbers."""
    batch = batch_of(engine)
    logits = engine.forward(batch, broadcast=True)
    return [logits.tolist(), engine.evaluate([batch]), answers(engine, **listeners)]


def calls_that_fail(rank: int, layout: Layout, with_listeners: bool) -> tuple[list[str], list[Any], list[Any]]:
    """Let one engine fail in every kind of call; what it gives then, and what one gives that never failed."""
    engine, clean = decoder(layout), decoder(layout)
    fails = rank == layout.world_size - 1
    heard_tokens: list[int] = []
    listeners: dict[str, Any] = {"on_token": lambda number, token: heard_tokens.append(token)} if with_listeners else {}

    def raising(*_: Any) -> Any:
        raise ArithmeticError("made to fail")

    def loss(output: Any, microbatch: PackedBatch) -> Any:
        return raising() if fails else token_cross_entropy(output, microbatch)

    def hook(logits: Any, microbatch: PackedBatch) -> Any:
        return raising() if fails else logits

    calls = [lambda: engine.forward(batch_of(engine), hook), lambda: engine.evaluate([batch_of(engine)] * 2, loss)]
    messages = [heard(StepError, call)[0] for call in calls]
    stage = max(engine.pipeline.model.stages.items())[1]
    decode, num_calls = stage.decode, 0

    def decode_twice(*arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return raising() if num_calls > 2 else decode(*arguments, **named)

    # Pipelines that share nothing generate each on their own.
    if fails or layout.dp > 1:
        stage.decode = decode_twice
    messages.append(heard(StepError, lambda: answers(engine, **listeners))[0])
    stage.decode = decode
    if with_listeners:
        messages.append(heard(StepError, lambda: answers(engine, on_answer=raising))[0])
    found, wanted = results_of(engine, **listeners), results_of(clean)
    for each in (engine, clean):
        each.close()
    return messages, found, wanted


@pytest.mark.shows(112)
@pytest.mark.parametrize(
    ("layout", "with_listeners"),
    [(Layout(pp=2), True), (Layout(dp=2), False), (Layout(tp=2), True), (Layout(cp=2), True)],
    ids=str,
)
def test_calls_after_one_that_failed_give_what_an_engine_gives_that_never_failed(
    layout: Layout, with_listeners: bool
) -> None:
    for messages, found, wanted in run_ranks(2, calls_that_fail, layout, with_listeners):
        assert len(messages) == 3 + with_listeners
        assert all("ArithmeticError: made to fail" in text for text in messages)
        assert found == wanted and found[0] and len(found[2]) == 3
