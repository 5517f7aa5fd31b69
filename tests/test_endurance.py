"""tools/endurance.py, in its short form: steps and generation without growth, and growth that is planted is found."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import endurance  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.subject("tools/*.py", "src/penstock/**/*.py")
# The long form takes 2000 steps and an hour: make endurance.
STEPS, CALLS = 120, 90


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = endurance.small_engine(tmp_path_factory.mktemp("endurance"))
    yield engine
    engine.close()


@pytest.mark.shows(156)
def test_processes_of_a_run_do_not_grow(tmp_path: Path) -> None:
    found = dict(endurance.command_of_two_ranks(tmp_path, STEPS))
    assert found.keys() == {"launcher", "rank 0", "rank 1"}
    assert {name: endurance.growth(samples) for name, samples in found.items()} == dict.fromkeys(found)


@pytest.mark.shows(156)
@pytest.mark.parametrize(("kind", "times"), [("trains", STEPS), ("generates", CALLS)])
def test_steps_and_calls_leave_nothing_behind(engine: Engine, kind: str, times: int) -> None:
    samples = endurance.over(getattr(endurance, kind)(engine), lambda number: number < times, 10)
    assert samples[-1].tensors > 0
    assert endurance.growth(samples) is None


@pytest.mark.shows(156)
def test_a_tensor_that_each_step_leaves_behind_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    train_batch = Engine.train_batch

    def leaky(*args: Any, **named: Any) -> Any:
        kept.append(torch.zeros(1))
        return train_batch(*args, **named)

    monkeypatch.setattr(Engine, "train_batch", leaky)
    samples = endurance.over(endurance.trains(engine), lambda number: number < 24, 4)
    assert "tensors grew" in str(endurance.growth(samples))


@pytest.mark.parametrize("leak", [lambda: [[]], lambda: open("/dev/null")])  # noqa: SIM115
def test_other_things_that_are_left_behind_are_found(leak: Any) -> None:
    kept: list[Any] = []
    assert endurance.growth(endurance.over(lambda _: kept.append(leak()), lambda number: number < 400, 40)) is not None
    for one in kept:
        if hasattr(one, "close"):
            one.close()


def test_memory_that_no_object_holds_is_found() -> None:
    samples = [endurance.Held(step, 2**28 + 10_000 * step, 9, 3) for step in range(0, 6000, 100)]
    assert "resident_bytes grew" in str(endurance.growth(samples))
