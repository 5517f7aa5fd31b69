"""What layers keep in attributes and in buffers made on first use is part of a checkpoint, in any layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, ScheduleConfig, StepError
from tests.dist.launch import run_ranks
from tests.dist.what_users_bring import (
    VOCAB,
    WIDTH,
    Counted,
    EmptyBuffer,
    LateBuffer,
    PlainTensor,
    Remembers,
    counting_together,
    documents,
)

Place = tuple[Layout, str]
"""A layout with a schedule."""


def opened(place: Place, layers: list[nn.Module] | None = None, **options: Any) -> Engine:
    torch.manual_seed(0)
    middle: list[nn.Module] = [Counted(), nn.Sequential(PlainTensor()), Remembers(), LateBuffer(), EmptyBuffer()]
    layers = layers or [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]
    layout, schedule = place
    options |= {"device": "cpu", "timeout_s": 60.0, "schedule": ScheduleConfig(schedule)}
    return Engine.from_layers(layers, WIDTH, layout, **options)


def train(engine: Engine, step: int) -> float:
    layout, batch = engine.grid.layout, documents(step)
    own = batch.split_with([8 // layout.dp] * layout.dp)[engine.grid.dp_rank]
    return engine.train_batch(own, micro_batches=MicroBatchSpec(num=4)).loss


def closed(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


def saved(rank: int, place: Place, folder: Path) -> list[float]:
    """The losses of two steps, which are saved, and of two more."""
    engine = opened(place)
    found = [train(engine, step) for step in range(4) if step != 2 or engine.save(folder) is None]
    closed(engine)
    return found


def resumed(rank: int, place: Place, folder: Path) -> list[float]:
    """The losses of the last two steps, by an engine that has kept other things before it loads."""
    engine = opened(place)
    train(engine, 7)
    engine.load(folder)
    found = [train(engine, step) for step in range(2, 4)]
    closed(engine)
    return found


@pytest.mark.shows(102)
@pytest.mark.parametrize(
    "first, second",
    [
        ((Layout(pp=2), "1f1b"), (Layout(), "1f1b")),
        ((Layout(), "1f1b"), (Layout(pp=2), "zb-v")),
        ((Layout(dp=2), "1f1b"), (Layout(dp=2), "1f1b")),
        ((Layout(pp=2), "dualpipe"), (Layout(pp=2), "dualpipe")),
    ],
    ids=str,
)
def test_what_layers_keep_comes_back_in_any_layout(first: Place, second: Place, tmp_path: Path) -> None:
    expected = run_ranks(first[0].world_size, saved, first, tmp_path)[0]
    found = run_ranks(second[0].world_size, resumed, second, tmp_path)[0]
    assert found == expected[2:]


def test_an_engine_goes_back_to_what_its_layers_kept_when_it_was_saved(tmp_path: Path) -> None:
    engine = opened((Layout(), "1f1b"))
    known = engine.pipeline.stages[0].units[3][1]
    assert isinstance(known, Remembers)
    queue = known.queue
    engine.save(tmp_path / "new")
    first = [train(engine, step) for step in range(2)]
    engine.save(tmp_path / "later")
    last = train(engine, 2)
    engine.load(tmp_path / "new")
    assert known.queue == [] and "layers.4.mean" not in engine.buffers() and "layers.5.mean" not in engine.buffers()
    assert [train(engine, step) for step in range(2)] == first
    engine.load(tmp_path / "later")
    assert train(engine, 2) == last
    assert queue == []
    engine.close()


class Unlike(nn.Module):
    """Keeps a value of some type from the first microbatch on."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.kept = value, None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.value() if callable(self.value) else self.value
        return x


def test_a_list_and_a_dictionary_come_back_where_none_was_kept_yet(tmp_path: Path) -> None:
    def new() -> Engine:
        kinds = [Unlike(lambda: [1, "two"]), Unlike(lambda: {"one": 1})]
        return opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), *kinds, nn.Linear(WIDTH, VOCAB)])

    one, other = new(), new()
    train(one, 0)
    one.save(tmp_path)
    other.load(tmp_path)
    layers = [module for _, module in other.pipeline.stages[0].units]
    assert [layer.kept for layer in layers if isinstance(layer, Unlike)] == [[1, "two"], {"one": 1}]
    one.close()
    other.close()


@pytest.mark.shows(102)
@pytest.mark.parametrize(
    "value, words",
    [
        (lambda: {3}, "layers.1 keeps a set in its attribute 'kept', which has changed since the engine was made"),
        (torch.Generator, "layers.1 keeps a Generator in its attribute 'kept'"),
        (lambda: torch.zeros(2).numpy(), "layers.1 keeps a ndarray in its attribute 'kept'"),
        ("text", ""),
        (1.5, ""),
        # These are no state: functions, torch's own objects, and what leads to a graph.
        (lambda: print, ""),
        (lambda: torch.profiler.ProfilerActivity, ""),
        (lambda: [torch.zeros(1, requires_grad=True).exp()], ""),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_by_name_at_the_first_save(
    value: Any, words: str, tmp_path: Path
) -> None:
    layers = [nn.Embedding(VOCAB, WIDTH), Unlike(value), nn.Linear(WIDTH, VOCAB)]
    engine = opened((Layout(), "1f1b"), layers)
    engine.save(tmp_path / "before")
    train(engine, 0)
    if not words:
        engine.save(tmp_path)
    else:
        with pytest.raises(ValueError, match=words):
            engine.save(tmp_path)
        assert not [*tmp_path.glob("step-*")]
    engine.close()


@pytest.mark.shows(102)
def test_what_two_layers_keep_together_is_refused_by_both_names(tmp_path: Path) -> None:
    engine = opened((Layout(), "1f1b"), counting_together())
    train(engine, 0)
    with pytest.raises(ValueError, match=r"layers\.1\.counts and layers\.2\.counts share a tensor, list or dictionary"):
        engine.save(tmp_path)
    engine.close()


class InPlace(nn.Module):
    """Tensors, containers, an array and a generator in plain attributes, each moved on where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.ema, self.seen, self.noise = torch.zeros(WIDTH), list[int](), torch.Generator().manual_seed(3)
        self.array, self.counter = np.zeros(1), Counter(calls=1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        self.ema.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.array += 0.01
        self.counter["calls"] += 1
        beside = float(self.array[0]) + 0.01 * self.counter["calls"]
        return x + self.ema + beside + 0.01 * torch.randn(WIDTH, generator=self.noise) * len(self.seen)


class Unseen(nn.Module):
    """A tensor of which torch does not count the changes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.data.add_(0.01)
        return x + self.kept


class Raises(nn.Module):
    """Fails once, at its third call after it was told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise ZeroDivisionError
        return self.linear(x)


countdown = [0]


def failing(rank: int, place: Place, fails: bool) -> list[float]:
    """The losses of three steps, of which the second is taken twice where it fails at first."""
    middle: list[nn.Module] = [Counted(), PlainTensor(), Remembers(), InPlace(), Unseen(), LateBuffer()]
    engine = opened(place, [nn.Embedding(VOCAB, WIDTH), *middle, Raises()])
    found = [train(engine, 0)]
    if fails:
        countdown[0] = 3
        with pytest.raises((StepError, ZeroDivisionError)):
            train(engine, 1)
        countdown[0] = 0
    found += [train(engine, step) for step in (1, 2)]
    closed(engine)
    return found


@pytest.mark.parametrize("place", [(Layout(), "1f1b"), (Layout(pp=2), "1f1b"), (Layout(pp=2), "zb-v")], ids=str)
def test_a_step_that_fails_leaves_what_layers_keep_as_it_was(place: Place) -> None:
    plain, failed = (run_ranks(place[0].world_size, failing, place, fails) for fails in (False, True))
    assert failed == plain


def test_a_layer_that_is_computed_again_keeps_all_of_it_as_its_forward_saw_it() -> None:
    found: list[list[float]] = []
    for recompute in ((), (1, 2)):
        torch.manual_seed(3)
        # A linear layer needs its input again.
        middle = [nn.Sequential(InPlace(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        layers = [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]
        engine = opened((Layout(), "1f1b"), layers, recompute=recompute)
        found.append([train(engine, step) for step in range(3)])
        engine.close()
    assert found[0] == found[1]
