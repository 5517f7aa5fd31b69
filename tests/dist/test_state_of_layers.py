"""What layers declare as state, buffers and extra state, is part of a checkpoint in any layout; attributes are none."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, ScheduleConfig
from penstock.engine.checkpoint.checkpointer import Checkpointer
from penstock.engine.checkpoint.manifest import random_state
from penstock.runtime import PipelineError
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 16

Place = tuple[Layout, str]
"""A layout with a schedule."""


class Declares(nn.Module):
    """Extra state of every kind, and a buffer, by both of which it computes; an attribute of which nothing depends."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.notes, self.trace = 0, dict[str, Any](), torch.zeros(WIDTH, dtype=torch.complex64)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def get_extra_state(self) -> Any:
        return {"calls": self.num_calls, "notes": self.notes, "trace": (self.trace, self.trace[:0]), 7: None}

    def set_extra_state(self, state: Any) -> None:
        assert state[7] is None and state["trace"][1].shape == (0,)
        self.num_calls, self.notes, self.trace = state["calls"], state["notes"], state["trace"][0]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.notes.setdefault("factors", []).append(1 + 0.01 * self.num_calls)
        self.trace = self.trace * 0.5 + torch.polar(x.detach().mean(0).abs(), x.detach().mean(0))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.notes["factors"][-1] + self.mean + 0.1 * self.trace.real


class Counts(nn.Module):
    """Keeps a count in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x


def documents(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (5,), generator=generator) for _ in range(8)])


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    middle: list[nn.Module] = [Declares(), nn.Sequential(Counts(), Declares()), nn.Linear(WIDTH, WIDTH)]
    return [nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB)]


def opened(place: Place, model: list[nn.Module] | None = None, **options: Any) -> Engine:
    layout, schedule = place
    options |= {"device": "cpu", "timeout_s": 60.0, "schedule": ScheduleConfig(schedule)}
    return Engine.from_layers(model or layers(), WIDTH, layout, **options)


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
    assert all(name.endswith("._extra_state") for name in engine.extra_state())
    found = [train(engine, step) for step in range(2, 4)]
    closed(engine)
    return found


@pytest.mark.shows(102, 118)
@pytest.mark.parametrize(
    "first, second",
    [
        ((Layout(pp=2), "1f1b"), (Layout(), "1f1b")),
        ((Layout(), "1f1b"), (Layout(pp=2), "zb-v")),
    ],
    ids=str,
)
def test_what_layers_declare_comes_back_in_any_layout(first: Place, second: Place, tmp_path: Path) -> None:
    expected = run_ranks(first[0].world_size, saved, first, tmp_path)[0]
    found = run_ranks(second[0].world_size, resumed, second, tmp_path)[0]
    assert found == expected[2:]


def replicas(rank: int, folder: Path) -> tuple[Any, Any, list[list[float]]]:
    """What a data-parallel rank has when it saves, and when it has loaded; and what it draws then."""
    engine = opened((Layout(dp=2), "1f1b"))
    train(engine, 0)
    before = engine.extra_state()["layers.1._extra_state"]["trace"][0]
    torch.manual_seed(rank)
    random.seed(rank)
    engine.save(folder)
    drawn = [[*torch.rand(3).tolist(), random.random()]]
    engine.load(folder)
    drawn.append([*torch.rand(3).tolist(), random.random()])
    after = engine.extra_state()["layers.1._extra_state"]["trace"][0]
    closed(engine)
    return before, after, drawn


@pytest.mark.shows(102, 118)
def test_of_data_parallel_ranks_the_first_ones_extra_state_is_saved_and_each_ones_random_numbers(
    tmp_path: Path,
) -> None:
    (first, loaded, drawn), (other, also_loaded, drawn_by_other) = run_ranks(2, replicas, tmp_path)
    assert not torch.equal(first, other)
    assert torch.equal(loaded, first) and torch.equal(also_loaded, first)
    assert drawn[0] == drawn[1] != drawn_by_other[0] == drawn_by_other[1]


@pytest.mark.shows(102)
def test_an_engine_goes_back_to_the_extra_state_that_it_was_saved_with_and_keeps_attributes(tmp_path: Path) -> None:
    engine = opened((Layout(), "1f1b"))
    counts = next(part for part in engine.pipeline.model.stages[0].units[2][1].modules() if isinstance(part, Counts))
    engine.save(tmp_path / "new")
    first = [train(engine, step) for step in range(2)]
    engine.save(tmp_path / "later")
    last = train(engine, 2)
    engine.load(tmp_path / "new")
    assert engine.extra_state()["layers.2.1._extra_state"]["calls"] == 0 and counts.num_calls == 12
    assert [train(engine, step) for step in range(2)] == first
    engine.load(tmp_path / "later")
    assert train(engine, 2) == last
    engine.close()


class Keeps(nn.Module):
    """Has the extra state that it is given."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return x


def keeping(state: Any) -> Engine:
    return opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), Keeps(state), nn.Linear(WIDTH, VOCAB)])


@pytest.mark.shows(102)
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([{3}], r"layers\.1\._extra_state: a set cannot be saved or sent; possible are numbers, strings, tensors"),
        (torch.eye(2).to_sparse(), r"layers\.1\._extra_state: a tensor of layout torch\.sparse_coo cannot be saved"),
    ],
)
def test_extra_state_that_no_checkpoint_can_hold_is_refused_by_name(state: Any, words: str, tmp_path: Path) -> None:
    engine = keeping(state)
    with pytest.raises(ValueError, match=words):
        engine.save(tmp_path)
    assert not [*tmp_path.glob("step-*")] and train(engine, 0) > 0
    engine.close()


@pytest.mark.shows(102)
def test_a_checkpoint_without_the_extra_state_that_a_layer_has_is_refused(tmp_path: Path) -> None:
    """Unless that is empty, as of layers whose statistics nobody has asked for."""
    opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), Counts(), nn.Linear(WIDTH, VOCAB)]).save(tmp_path)
    for state in (None, torch.zeros(0)):
        keeping(state).load(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors asked for: \['layers\.1\._extra_state'\]"):
        keeping({"scale": 1.0}).load(tmp_path)


@pytest.mark.shows(102)
def test_attributes_in_an_older_checkpoint_are_passed_over_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened((Layout(), "1f1b"))
    train(engine, 0)
    form = torch.tensor(list(json.dumps([["num_calls", 4]]).encode()), dtype=torch.uint8)
    older = {"attribute.layers.2.0.form": form, "attribute@1.layers.2.0.form": form}
    saver = Checkpointer(tmp_path, engine.grid, {}, 1, engine.ties, standalone=True)
    values = {"engine": engine.progress(), "random": random_state(), "extra": None}
    saver.save(engine.step, {**engine.state_to_save(), **older}, values, wait=True)
    expected = train(engine, 1)
    with caplog.at_level(logging.WARNING):
        engine.load(tmp_path)
    assert [record.getMessage().partition(" holds ")[2] for record in caplog.records] == [
        "attributes of layers.2.0, which are passed over; state is a buffer or get_extra_state"
    ]
    assert train(engine, 1) == expected
    engine.close()


# ---- sent to another engine


def sent(rank: int, first: Layout, second: Layout) -> dict[str, Any]:
    """What layers of an engine have that was sent another's weights."""
    source, target = opened((first, "1f1b")), opened((second, "1f1b"), learns=False)
    if source.is_here:
        train(source, 0)
    source.send_weights(target)
    return target.extra_state() if target.is_here else {}


@pytest.mark.shows(102)
def test_extra_state_goes_with_the_weights_to_another_engine() -> None:
    (alone,) = [sent(0, Layout(), Layout())]
    assert alone["layers.1._extra_state"]["calls"] == 4
    by_rank = run_ranks(2, sent, Layout(pp=2), Layout(pp=2))
    found = {name: value for of_rank in by_rank for name, value in of_rank.items()}
    assert found.keys() == alone.keys()
    for name, value in found.items():
        assert value["notes"] == alone[name]["notes"] and torch.equal(value["trace"][0], alone[name]["trace"][0])


class Expanded(nn.Module):
    """Has a buffer whose elements share memory where the user makes it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.5).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.shows(102)
def test_none_is_extra_state_as_any_other_and_an_expanded_buffer_is_one(tmp_path: Path) -> None:
    first = opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), Expanded(), Keeps(None), nn.Linear(WIDTH, VOCAB)])
    expected = [train(first, step) for step in range(2)]
    first.save(tmp_path)
    keeps, expanded = Keeps(3), Expanded()
    second = opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), expanded, keeps, nn.Linear(WIDTH, VOCAB)])
    second.load(tmp_path)
    assert second.extra_state() == {"layers.2._extra_state": None}
    assert [train(first, 2), train(first, 3)] == [train(second, 2), train(second, 3)] != expected
    closed(first)
    closed(second)


class Frozen(nn.BatchNorm1d):
    """Stays in evaluation mode, as frozen normalisations do."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_layer_that_keeps_to_a_mode_of_its_own_does_so_from_the_first_step_on(evaluates: bool) -> None:
    frozen = Frozen(WIDTH)
    engine = opened((Layout(), "1f1b"), [nn.Embedding(VOCAB, WIDTH), frozen, nn.Linear(WIDTH, VOCAB)])
    if evaluates:
        engine.evaluate(documents(5))
    train(engine, 0)
    (mean,) = (value for name, value in engine.pipeline.model.buffers().items() if name.endswith("running_mean"))
    closed(engine)
    assert torch.equal(mean, torch.zeros(WIDTH))


class RefusesToGoBack(nn.Module):
    """Fails in its second step, and when it is given what its extra state was."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def get_extra_state(self) -> Any:
        return self.num_calls

    def set_extra_state(self, state: Any) -> None:
        raise TypeError("no way back")

    def forward(self, x: Tensor, *, step: int) -> Tensor:
        if step == 2:
            raise OverflowError("too large")
        return x


def failing_return(rank: int, world: int) -> list[str]:
    model = [nn.Embedding(VOCAB, WIDTH), RefusesToGoBack(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)]
    engine = opened((Layout(pp=world), "1f1b"), model)
    train(engine, 0)
    errors = []
    for step in (1, 2):
        try:
            train(engine, step)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    closed(engine)
    return errors


@pytest.mark.shows(34)
@pytest.mark.parametrize("world", [1, 2])
def test_state_that_cannot_be_put_back_hides_no_error_and_lets_no_rank_wait(world: int) -> None:
    """After it all ranks ask for a checkpoint."""
    for error, then in run_ranks(world, failing_return, world):
        assert "too large" in error and "no way back" not in error
        assert then.startswith("PipelineError") and "TypeError: no way back" in then and "load a checkpoint" in then


class RefusesOnOneRank(Keeps):
    """Takes no extra state on the second rank, until it does."""

    takes = False

    def set_extra_state(self, state: Any) -> None:
        if not self.takes:
            raise OverflowError("it does not fit")
        super().set_extra_state(state)


def refused_load(rank: int, folder: Path) -> list[str]:
    model: list[nn.Module] = [nn.Embedding(VOCAB, WIDTH), Keeps(1), RefusesOnOneRank(2), nn.Linear(WIDTH, VOCAB)]
    engine = opened((Layout(pp=2), "1f1b"), model)
    train(engine, 0)
    engine.save(folder)
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            engine.load(folder)
        errors.append(str(raised.value))
        with pytest.raises(PipelineError, match="not loaded whole: load it again, or another"):
            train(engine, 1)
    RefusesOnOneRank.takes = True
    engine.load(folder)
    train(engine, 1)
    closed(engine)
    return errors


@pytest.mark.shows(102)
def test_extra_state_that_one_rank_refuses_at_a_load_is_told_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, refused_load, tmp_path)
    assert first == second and len(set(first)) == 1
    assert first[0].endswith("layers.2._extra_state was not taken by its layer (OverflowError: it does not fit)")
