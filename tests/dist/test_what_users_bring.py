"""What users bring trains as in a plain loop of torch, bit for bit in one, two and three stages, or is refused."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import (
    Engine,
    EngineOptions,
    Layout,
    Metric,
    MetricReduction,
    MicroBatchSpec,
    OptimizerConfig,
    PackedBatch,
    PipelineError,
    Precision,
)
from penstock.data import split
from penstock.model import Randomness
from tests.covering import EVERY
from tests.dist.launch import run_outcomes, run_ranks
from tests.dist.what_users_bring import CASES, WIDTH, Case

WORLDS = (1, 2, 3)
SPLIT = MicroBatchSpec(num=4)
# Cases that are not yet as they should be, each with what is wrong.
FAULTS: dict[str, str] = {}


# ---- the plain loop


def plain(case: Case) -> dict[str, Any]:
    """Each step's loss and the final state in a loop of torch alone."""
    torch.manual_seed(0)
    layers, loss_fn, edit = case.layers(), case.loss(), case.between()
    ties = untied(layers)
    model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
    if isinstance(loss_fn, nn.Module):
        model["loss"] = loss_fn
    if case.precision == "bf16":
        model.bfloat16()
    masters = Masters(model, {id(other) for _, others in ties for other in others})
    optimizer = case.optimizer(case.groups(masters.named))
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    losses: list[float] = []
    metrics: list[dict[str, float]] = []
    for step in range(case.num_steps):
        reported: list[dict[str, Metric]] = []
        microbatches = split(case.batch(step), SPLIT).microbatches
        weight = sum(case.weight(m) for m in microbatches)
        total = torch.zeros(())
        for number, microbatch in enumerate(microbatches):
            numbers = Randomness(0, step, 0, number, torch.device("cpu"))
            with torch.autocast("cpu", torch.bfloat16, case.precision == "bf16-autocast"):
                loss = loss_fn(output(layers, microbatch, numbers), microbatch)
            if isinstance(loss, tuple):
                loss, numbers = loss
                reported.append(numbers)
            loss = loss / weight
            loss.backward()
            masters.collect()
            total = total + loss.detach()
        for owner, others in ties:
            owner.grad = sum_of([*(other.grad for other in others), owner.grad])
        masters.step(optimizer)
        for owner, others in ties:
            for other in others:
                other.grad = None
                other.data.copy_(owner.data)
        if scheduler:
            scheduler.step()
        edit(dict(model.named_parameters()), step)
        masters.follow()
        losses.append(float(total))
        metrics.append({name: reduced([one[name] for one in reported]) for one in reported[:1] for name in one})
    return {"losses": losses, "metrics": metrics, "state": state_of(model)}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, each under its first name in a layer, and the buffers that a checkpoint keeps."""
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    return {name: value for name, value in model.state_dict().items() if name not in again and "extra" not in name}


def reduced(numbers: Sequence[Metric]) -> float:
    """A step's number from those of its microbatches."""
    values = [float(one.value) for one in numbers]
    kind = MetricReduction(numbers[0].reduction)
    if kind is MetricReduction.MEAN:
        weights = [float(one.weight or 0) for one in numbers]
        return sum(value * weight for value, weight in zip(values, weights)) / sum(weights)
    return {MetricReduction.MAX: max, MetricReduction.MIN: min, MetricReduction.SUM: sum}[kind](values)


def output(layers: Sequence[nn.Module], microbatch: PackedBatch, numbers: Randomness) -> Any:
    """What the last layer gives; each layer draws from a seed of its own."""
    x: Any = microbatch["tokens"]
    for i, layer in enumerate(layers):
        numbers.begin(f"layers.{i}")
        asked = set(signature(layer.forward).parameters) & set(microbatch.keys)
        beside = {name: microbatch[name] for name in asked - {"tokens"}}
        if isinstance(x, Mapping):
            x = layer(**x, **beside)
        else:
            x = layer(*(x if isinstance(x, tuple) else (x,)), **beside)
    return x


def untied(layers: list[nn.Module]) -> list[tuple[nn.Parameter, list[nn.Parameter]]]:
    """Weights that several layers hold, with the copies that take their places in all layers but the first.

    Each layer's gradients are summed over the microbatches, and then the sums are added.
    """
    found: dict[int, tuple[nn.Parameter, list[nn.Parameter]]] = {}
    for i, layer in enumerate(layers):
        own = list(layer.parameters())
        if any(id(p) in found for p in own):
            layers[i] = copy.deepcopy(layer)
            for p, other in zip(own, layers[i].parameters()):
                if id(p) in found:
                    found[id(p)][1].append(other)
        found = {id(p): (p, []) for p in own} | found
    return [(owner, others) for owner, others in found.values() if others]


def sum_of(gradients: Sequence[Tensor | None]) -> Tensor:
    """The sum in the order given."""
    total = torch.zeros(())
    for gradient in gradients:
        assert gradient is not None
        total = total + gradient
    return total


class Masters:
    """Parameters of 16 bits are stepped through fp32 copies, with gradients added up in fp32; others as they are."""

    def __init__(self, model: nn.Module, copies: set[int]) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in copies}
        self.pairs = [
            (p, nn.Parameter(p.detach().float().clone()))
            for p in trained.values()
            if p.dtype in (torch.bfloat16, torch.half)
        ]
        by_parameter = {id(p): master for p, master in self.pairs}
        self.named = {name: by_parameter.get(id(p), p) for name, p in trained.items()}

    def follow(self) -> None:
        """Take over what the user has changed between steps."""
        for parameter, master in self.pairs:
            changed = parameter.data != master.data.to(parameter.dtype)
            master.data[changed] = parameter.data[changed].float()

    def collect(self) -> None:
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


# ---- the engine


def opened(case: Case, world: int) -> Engine:
    """An engine of the case, in as many stages as ranks."""
    torch.manual_seed(0)
    layers = case.layers()
    config = (
        case.config()
        if case.config
        else OptimizerConfig(factory=case.optimizer, scheduler=case.scheduler, clip_norm=0.0)
    )
    options = EngineOptions(
        optimizer=config,
        precision=Precision(case.precision),
        device="cpu",
        timeout_s=20.0,
        **case.options,
    )
    return Engine.from_layers(layers, WIDTH, Layout(pp=world), options)


def closed(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


def trained(case: Case, world: int, folder: Path) -> dict[str, Any]:
    """The same as the plain loop by an engine, or by two where the first is saved in between."""
    loss_fn, edit = case.loss(), case.between()
    engine = opened(case, world)
    try:
        losses, metrics = [], []
        for step in range(case.num_steps):
            result = engine.train_batch(case.batch(step), loss_fn, case.weight, micro_batches=SPLIT)
            losses.append(result.loss)
            metrics.append(dict(result.metrics))
            edit(engine.parameters(), step)
            if step == 1 and case.resumes:
                engine.save(folder)
                closed(engine)
                engine = opened(case, world)
                engine.load(folder)
        return {"losses": losses, "metrics": metrics, "state": copied({**engine.parameters(), **engine.buffers()})}
    finally:
        closed(engine)


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


def run(rank: int, world: int, names: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What became of each of the cases on this rank."""
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        try:
            found[name] = trained(CASES[name], world, folder / f"{world}" / f"{number}")
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return found


def worlds_of(name: str) -> tuple[int, ...]:
    """The numbers of stages for a case: one for the first, two for the next, then three; all where all are run.

    Two for those that are refused from two on.
    """
    if EVERY or name in FAULTS:
        return WORLDS
    if CASES[name].refused_from > 1:
        return (CASES[name].refused_from,)
    number = list(CASES).index(name) % len(WORLDS)
    return WORLDS[number : number + 1]


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """What became of all cases in as many stages, by rank."""
    found, folder = {}, tmp_path_factory.mktemp("saved")
    for world in WORLDS:
        names = [name for name in CASES if name not in FAULTS and world in worlds_of(name)]
        found[world] = run_ranks(world, run, world, names, folder)
    return found


@pytest.fixture(scope="module")
def faults_by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, dict[str, Any]]]]:
    """The same for cases with faults, which may end their ranks."""
    found, folder = {}, tmp_path_factory.mktemp("saved")
    for world in WORLDS:
        outcomes = run_outcomes(world, run, world, list(FAULTS), folder, stop_at_failure=True)
        found[world] = [one.value or {name: {"error": one.error} for name in FAULTS} for one in outcomes]
    return found


def differences(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float) -> list[str]:
    """What differs from the plain loop, in words."""
    text = []
    for one in found:
        if one["losses"] != pytest.approx(expected["losses"], rel=tolerance, abs=0):
            text = [f"loss {one['losses']} for {expected['losses']}"]
        for numbers, others in zip(one["metrics"], expected["metrics"]):
            text += [] if numbers == pytest.approx(others, rel=1e-6) else [f"metrics {numbers} for {others}"]
    state = {name: value for one in found for name, value in one["state"].items()}
    text += [f"no {name}" for name in expected["state"].keys() - state.keys() if not name.startswith("loss.")]
    for name, value in state.items():
        if name not in expected["state"]:
            text.append(f"unknown {name}")
        elif value.dtype != (other := expected["state"][name]).dtype:
            text.append(f"{name} is {value.dtype} for {other.dtype}")
        elif not torch.allclose(value, other, rtol=tolerance, atol=tolerance):
            text.append(f"{name} is off by {(value - other).abs().max():.1e}")
    return text


def marked(name: str) -> Any:
    marks = [pytest.mark.xfail(strict=True, reason=FAULTS[name])] if name in FAULTS else []
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_what_users_bring_trains_bit_for_bit_as_in_a_plain_loop_or_is_refused(
    name: str, request: pytest.FixtureRequest
) -> None:
    case = CASES[name]
    by_world = request.getfixturevalue("faults_by_world" if name in FAULTS else "by_world")
    expected = plain(case) if not case.refused or case.refused_from > 1 else None
    for world in worlds_of(name):
        found = [rank[name] for rank in by_world[world]]
        errors = [one["error"] for one in found if "error" in one]
        if case.refused and world >= case.refused_from:
            assert len(errors) == world and any(case.refused in error for error in errors), (world, errors)
        else:
            assert not errors, (world, errors, *(one.get("traceback") for one in found))
            assert expected is not None
            assert not (different := differences(found, expected, case.tolerance)), (world, different)


def test_a_checkpoint_is_read_back_into_a_buffer_that_is_conjugated_by_a_mark(tmp_path: Path) -> None:
    case = CASES["a buffer conjugated by a mark, 1f1b"]
    engine = opened(case, 1)

    def steps() -> list[float]:
        return [engine.train_batch(case.batch(step), micro_batches=MicroBatchSpec(num=3)).loss for step in range(2)]

    steps()
    engine.save(tmp_path)
    saved = copied(engine.buffers())
    losses = steps()
    assert all(own.is_conj() for own in engine.buffers().values())
    engine.load(tmp_path)
    assert all(torch.equal(own, saved[name]) for name, own in engine.buffers().items())
    assert steps() == losses
    closed(engine)


def test_a_tied_weight_that_is_given_other_memory_is_refused_until_it_is_one_again() -> None:
    case = CASES["tied weights"]
    engine = opened(case, 1)
    owner, copy_of_it = (engine.parameters()[name] for name in ("layers.0.weight", "layers.4.weight"))
    memory = owner.data
    owner.data = 0.9 * memory
    words = r"layers\.4\.weight is tied to layers\.0\.weight, but one of them was given other memory"
    with pytest.raises(PipelineError, match=words):
        engine.train_batch(case.batch(0), micro_batches=SPLIT)
    owner.data = memory
    engine.train_batch(case.batch(0), micro_batches=SPLIT)
    assert torch.equal(owner, copy_of_it)
    closed(engine)
