"""Two engines in one process, each a pipeline over several: what one does leaves nothing for the other to find."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.model import decoder_units
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig
from tests.dist.launch import run_ranks

STEPS = 2
CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, max_length=32)


@dataclass(frozen=True)
class Kind:
    """What two engines may differ in; the model's names and shapes are the same, so that they could be mixed up."""

    schedule: str
    rate: float
    clip_norm: float
    seed: int


KINDS = {"one": Kind("1f1b", 1e-2, 0.5, 1), "other": Kind("zb-v", 3e-3, 0.0, 2)}


def engine_of(kind: Kind) -> Engine:
    optimizer = OptimizerConfig(LearningRate(kind.rate), clip_norm=kind.clip_norm)
    options = EngineOptions(kind.schedule, optimizer=optimizer, seed=kind.seed, timeout_s=30.0)
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=2), options)


def steps(kind: Kind, engine: Engine) -> Iterator[Any]:
    """A step, a validation and an answer in turn; what each of them says."""
    generator = torch.Generator().manual_seed(kind.seed)
    for step in range(STEPS):
        lengths = torch.randint(2, 9, (4,), generator=generator).tolist()
        batch = PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in lengths])
        result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
        yield result.step, result.loss, result.grad_norm, result.learning_rate
        yield engine.evaluate([batch])
        yield [answer.tokens for answer in engine.generate([[1, 2 + step]], SamplingParams(max_new_tokens=4))]


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.parameters().items()}


Outcome = tuple[list[Any], dict[str, Tensor]]


def alone(rank: int, kind: str) -> Outcome:
    engine = engine_of(KINDS[kind])
    told = list(steps(KINDS[kind], engine))
    return told, weights(engine)


def together(rank: int) -> tuple[dict[str, Outcome], list[str]]:
    """All engines in turn, each at another place of its own work; and which of the package's own state has changed."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "penstock"]
    before, random_state = package_state(modules), torch.get_rng_state()
    engines = {name: engine_of(kind) for name, kind in KINDS.items()}
    running = {kind: steps(KINDS[kind], engine) for kind, engine in engines.items()}
    told: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for turn in range(3 * STEPS + len(KINDS) - 1):
        for late, kind in enumerate(KINDS):
            if late <= turn < late + 3 * STEPS:
                told[kind].append(next(running[kind]))
    after = package_state(modules)
    assert len(before) > 1000
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if not torch.equal(torch.get_rng_state(), random_state):
        changed.append("torch's random state")
    return {kind: (told[kind], weights(engine)) for kind, engine in engines.items()}, changed


def package_state(modules: Iterable[ModuleType]) -> dict[str, Any]:
    """What modules and their classes and functions hold, by name; submodules, which come when first imported, apart."""
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {f"{module.__name__}.{name}.{own}": held(of) for own, of in vars(value).items()}
            elif not isinstance(value, ModuleType):
                found[f"{module.__name__}.{name}"] = held(value)
    return {name: state for name, state in found.items() if "__" not in name and "._abc_" not in name}


def held(value: Any) -> Any:
    """Enough of a value to see it changed: which one it is, and what a container, an object or a function has in it."""
    if isinstance(value, dict):
        return id(value), [(repr(key), id(one)) for key, one in value.items()]
    if isinstance(value, list | set | tuple | frozenset | deque):
        return id(value), [id(one) for one in value]
    if not isinstance(value, type) and str(getattr(value, "__module__", "")).startswith("penstock"):
        return id(value), [(name, id(one)) for name, one in getattr(value, "__dict__", {}).items()]
    return id(value)


@pytest.mark.shows(19)
def test_engines_that_train_in_turn_say_and_learn_bit_for_bit_what_each_does_alone() -> None:
    shared = run_ranks(2, together, timeout_s=90.0)
    for kind in KINDS:
        for rank, (told, learned) in enumerate(run_ranks(2, alone, kind, timeout_s=60.0)):
            its_told, its_learned = shared[rank][0][kind]
            assert its_told == told and len(told) == 3 * STEPS
            assert its_learned.keys() == learned.keys() and len(learned) > 3
            assert all(torch.equal(its_learned[name], tensor) for name, tensor in learned.items())
    assert [changed for _, changed in shared] == [[], []], "the package has no state of its own"
