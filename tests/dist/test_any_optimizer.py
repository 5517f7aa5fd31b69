"""Any optimizer of torch's kind steps as in one process, with ZeRO or without, and goes on in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.parallel.tensor_slice import LocalTensor
from penstock.settings import ConfigError, Division, ModelConfig, OptimizerConfig, ParameterGroup, Precision
from tests.covering import EVERY
from tests.dist.launch import run_ranks
from tests.dist.users_optimizers import Prodigy, ScheduleFree, Shampoo

DECODER = ModelConfig(
    vocab_size=40, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=2, tie_embeddings=True
)
WIDTH, VOCABULARY, NUM_STEPS = 24, 40, 2
Factory = Callable[[Any], torch.optim.Optimizer]


def centred(groups: Any) -> torch.optim.Optimizer:
    """SGD with a hook that takes its mean away from each row of a gradient."""
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def centre(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in [p for group in own.param_groups for p in group["params"]]:
            p.grad.sub_(p.grad.mean(1, keepdim=True))

    optimizer.register_step_pre_hook(centre)
    return optimizer


# Each as a user gives it, and as torch is given it in one process.
FACTORIES: dict[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01, weight_decay=0.1),
    "muon": partial(torch.optim.Muon, lr=0.02),
    "hooked": centred,
    "schedule-free": ScheduleFree,
    "shampoo": partial(Shampoo, rate=torch.tensor(0.05)),
}
# Each steps all parameters jointly, and says so.
JOINT: dict[str, Factory] = {"prodigy": Prodigy}
MUON_AND_ADAMW = OptimizerConfig(
    learning_rate=0.01,
    clip_norm=0.5,
    groups=(ParameterGroup("layers.*.weight", matrices=True, name="muon", learning_rate=0.02, weight_decay=0.05),),
)


def turns(cases: list[Any], optimizers: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Cases with optimizers: half of the optimizers for each, the other half for the next; all where all are run.

    The engine knows no more of one than the parts into which its step divides, and the form of its state.
    """
    return [
        (case, name)
        for turn, case in enumerate(cases)
        for number, name in enumerate(optimizers)
        if EVERY or (turn + number) % 2 == 0
    ]


EVERY_KIND: dict[str, OptimizerConfig | Factory] = {**FACTORIES, "muon and adamw": MUON_AND_ADAMW}


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str = "1f1b"
    zero: bool = False
    precision: Precision = Precision.FP32


def own_layers() -> list[nn.Module]:
    """Layers whose parameters are all matrices, with lengths that are no multiple of a cache line."""
    torch.manual_seed(0)
    middle = [
        nn.Sequential(nn.Linear(WIDTH, 33, bias=False), nn.Tanh(), nn.Linear(33, WIDTH, bias=False)) for _ in range(4)
    ]
    return [nn.Embedding(VOCABULARY, WIDTH), *middle, nn.Linear(WIDTH, VOCABULARY, bias=False)]


def opened(case: Case, optimizer: OptimizerConfig | Factory, decoder: bool = False) -> Engine:
    config = replace(OptimizerConfig.of(optimizer), zero=case.zero)
    options = EngineOptions(case.schedule, precision=case.precision, timeout_s=60.0, device="cpu")
    if decoder:
        units = lambda groups: decoder_units(DECODER, groups=groups)  # noqa: E731
        return Engine(units, WIDTH, case.layout, options, optimizer=config)
    return Engine.from_layers(own_layers(), WIDTH, case.layout, options, optimizer=config)


def batch_of(engine: Engine) -> PackedBatch:
    generator = torch.Generator().manual_seed(engine.step)
    lengths = torch.randint(2, 12, (16,), generator=generator).tolist()
    documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    return PackedBatch.from_documents(documents[engine.grid.dp_rank :: engine.layout.dp])


def one_step(engine: Engine) -> tuple[float, float]:
    result = engine.train_batch(batch_of(engine), micro_batches=MicroBatchSpec(num=4))
    assert result.success
    return result.loss, result.grad_norm


def same(one: LocalTensor, other: LocalTensor) -> bool:
    """True if two whole tensors have the same bits."""
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def closed(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


# ---- against torch in one process


def differences(engine: Engine, optimizer: Factory) -> list[str]:
    """Names of weights and states in which a run differs from torch's optimizer, given the run's gradients."""
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in engine.parameters().items()}
    reference = optimizer([{"params": list(theirs.values())}])
    for _ in range(NUM_STEPS):
        one_step(engine)
        for name, parameter in theirs.items():
            parameter.grad = engine.gradient(name).clone()
        reference.step()
    found = [name for name, p in engine.parameters().items() if not torch.equal(p, theirs[name])]
    state = engine.state()
    for name, parameter in theirs.items():
        own = {kind: value for kind, value in reference.state[parameter].items() if isinstance(value, Tensor)}
        for kind, value in own.items():
            found += [] if same(state[f"optimizer.{kind}.{name}"], value) else [f"{kind} of {name}"]
    return found


def compared(rank: int, cases: list[Case]) -> list[tuple[Case, str, list[str]]]:
    found = []
    for case, name in turns(cases, FACTORIES):
        engine = opened(case, FACTORIES[name])
        found.append((case, name, differences(engine, FACTORIES[name])))
        closed(engine)
    return found


CASES = {
    1: [Case(Layout()), Case(Layout(), precision=Precision.FP64)],
    2: [Case(Layout(pp=2)), Case(Layout(pp=2), "zb-v"), Case(Layout(dp=2))],
    4: [Case(Layout(pp=2, dp=2), "interleaved"), Case(Layout(pp=4), "zb-h1")],
}


@pytest.mark.shows(106, 162)
@pytest.mark.parametrize("world", CASES)
def test_a_factorys_optimizer_steps_bit_for_bit_as_torch_does_in_one_process(world: int) -> None:
    by_rank = run_ranks(world, compared, CASES[world], timeout_s=200.0)
    for of_rank in by_rank:
        assert len(of_rank) == len(turns(CASES[world], FACTORIES))
        assert [entry for entry in of_rank if entry[2]] == []


def joined(rank: int, cases: list[Case]) -> list[list[str]]:
    found = []
    for case in cases:
        for factory in JOINT.values():
            engine = opened(case, factory)
            found.append(differences(engine, factory))
            closed(engine)
    return found


def refused(rank: int, cases: list[Case]) -> list[str]:
    """The sentences with which joint optimizers are refused, one declared by its class and one by the settings."""
    found = []
    for case in cases:
        for optimizer in (Prodigy, OptimizerConfig(factory=partial(torch.optim.SGD, lr=0.1), divides=Division.MODEL)):
            with pytest.raises(ConfigError) as caught:
                opened(case, optimizer)
            found.append(str(caught.value))
    return found


@pytest.mark.shows(162)
def test_an_optimizer_declared_to_step_the_model_trains_where_one_rank_has_all_and_is_refused_elsewhere() -> None:
    assert run_ranks(1, joined, [Case(Layout())], timeout_s=60.0) == [[[]]]
    assert run_ranks(2, joined, [Case(Layout(dp=2))], timeout_s=60.0) == [[[]]] * 2
    split = [Case(Layout(pp=2)), Case(Layout(dp=2), zero=True)]
    for of_rank in run_ranks(2, refused, split, timeout_s=60.0):
        assert len(of_rank) == 4
        for text, name in zip(of_rank, ["Prodigy", "SGD"] * 2, strict=True):
            assert text.startswith(
                f'the optimizer {name} steps all parameters together (divides = "model"), but several'
            )
            assert text.endswith("it can train with pp = 1, tp = 1, ep = 1 and optimizer.zero = false")


def test_groups_named_in_settings_step_bit_for_bit_as_two_optimizers_of_torch() -> None:
    engine = opened(Case(Layout()), replace(MUON_AND_ADAMW, clip_norm=0.0), decoder=True)
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in engine.parameters().items()}
    is_muons = {name: name.startswith("layers.") and p.ndim >= 2 for name, p in theirs.items()}
    muon = torch.optim.Muon([p for n, p in theirs.items() if is_muons[n]], lr=0.02, weight_decay=0.05)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for n, p in theirs.items() if p.ndim >= 2 and not is_muons[n]], "weight_decay": 0.1},
            {"params": [p for n, p in theirs.items() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for _ in range(NUM_STEPS):
        one_step(engine)
        for name, parameter in theirs.items():
            parameter.grad = engine.gradient(name).clone()
        muon.step()
        adamw.step()
    for name, parameter in engine.parameters().items():
        if is_muons[name]:
            assert torch.equal(parameter, theirs[name]), name
        else:
            # The built-in AdamW is torch's fused kernel.
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-7)


# ---- ZeRO


def trained(case: Case, optimizer: OptimizerConfig | Factory, decoder: bool) -> dict[str, Any]:
    engine = opened(case, optimizer, decoder)
    results = [one_step(engine) for _ in range(NUM_STEPS)]
    found = {
        "results": results,
        "weights": {name: p.detach().clone() for name, p in engine.parameters().items()},
        "bytes": engine.state_bytes().optimizer,
    }
    closed(engine)
    return found


def on_and_off(rank: int, cases: list[Case]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    found = []
    for case, name in turns(cases, EVERY_KIND):
        optimizer, decoder = EVERY_KIND[name], name == "muon and adamw"
        on = trained(replace(case, zero=True), optimizer, decoder)
        found.append((f"{name} {case}", on, trained(case, optimizer, decoder)))
    return found


ZERO_CASES = {
    2: [Case(Layout(dp=2)), Case(Layout(dp=2), precision=Precision.BF16)],
    4: [Case(Layout(pp=2, dp=2)), Case(Layout(pp=2, dp=2), "dualpipe")],
}


@pytest.mark.shows(106, 162)
@pytest.mark.parametrize("world", ZERO_CASES)
def test_zero_changes_no_bit_and_shards_the_state(world: int) -> None:
    by_rank = run_ranks(world, on_and_off, ZERO_CASES[world], timeout_s=300.0)
    num_cases = len(turns(ZERO_CASES[world], EVERY_KIND))
    assert all(len(of_rank) == num_cases for of_rank in by_rank)
    for index in range(num_cases):
        for name, on, off in (of_rank[index] for of_rank in by_rank):
            for ours, plain in zip(on["results"], off["results"], strict=True):
                assert ours == pytest.approx(plain, rel=1e-12, abs=0), name
            unequal = [key for key, weight in on["weights"].items() if not torch.equal(weight, off["weights"][key])]
            assert unequal == [], name
        total_on, total_off = (sum(of_rank[index][i]["bytes"] for of_rank in by_rank) for i in (1, 2))
        assert 0 < total_on <= 0.6 * total_off, (by_rank[0][index][0], total_on, total_off)


# ---- resumed and resharded

CHAIN = {
    4: [
        Case(Layout(pp=4)),
        Case(Layout(dp=4), zero=True),
        Case(Layout(pp=2, dp=2), "interleaved", zero=True),
        Case(Layout(pp=2, dp=2), "dualpipe"),
        Case(Layout(dp=2, cp=2), zero=True),
        Case(Layout(pp=2, dp=2), "zb-h1", zero=True),
    ]
}
TOLERANCE = 1e-9


def walked(rank: int, chain: list[Case], folder: Path) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for number, (name, optimizer) in enumerate(EVERY_KIND.items()):
        decoder = name == "muon and adamw"
        links = chain if EVERY or decoder else chain[number % 3 :: 3]
        # Context parallelism cuts sequences, which own layers are not made for.
        for case in [case for case in links if decoder or case.layout.cp == 1]:
            engine = opened(replace(case, precision=Precision.FP64), optimizer, decoder)
            if found.get(name):
                engine.load(folder / name)
                assert engine.step == len(found[name])
            found.setdefault(name, []).append(one_step(engine))
            engine.save(folder / name)
            closed(engine)
    return found


@pytest.mark.shows(106, 162)
def test_a_chain_of_layouts_is_one_run(tmp_path: Path) -> None:
    by_rank = run_ranks(4, walked, CHAIN[4], tmp_path, timeout_s=400.0)
    assert by_rank == [by_rank[0]] * 4 and by_rank[0].keys() == EVERY_KIND.keys()
    for name, optimizer in EVERY_KIND.items():
        alone = Case(Layout(), precision=Precision.FP64)
        engine = opened(alone, optimizer, decoder=name == "muon and adamw")
        wanted = [one_step(engine) for _ in range(len(by_rank[0][name]) + 1)]
        resumed = opened(alone, optimizer, decoder=name == "muon and adamw")
        resumed.load(tmp_path / name)
        for found, expected in zip([*by_rank[0][name], one_step(resumed)], wanted, strict=True):
            assert found == pytest.approx(expected, abs=TOLERANCE, rel=0), name


@pytest.mark.shows(106, 162)
@pytest.mark.parametrize("name", ["schedule-free", "shampoo", "muon and adamw", *JOINT])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(name: str, tmp_path: Path) -> None:
    alone, optimizer = Case(Layout()), (EVERY_KIND | JOINT)[name]
    engine = opened(alone, optimizer, decoder=name == "muon and adamw")
    for step in range(2 * NUM_STEPS):
        if step == NUM_STEPS:
            engine.save(tmp_path / "half")
        one_step(engine)
    resumed = opened(alone, optimizer, decoder=name == "muon and adamw")
    resumed.load(tmp_path / "half")
    for _ in range(NUM_STEPS):
        one_step(resumed)
    ours, theirs = resumed.state(), engine.state()
    assert ours.keys() == theirs.keys() and any(key.startswith("optimizer.") for key in ours)
    assert [key for key, own in ours.items() if not same(own, theirs[key])] == []
