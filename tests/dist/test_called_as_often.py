"""A layer of a user's own is called as often as its microbatches say, on real data, whatever the cut and schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import split
from penstock.engine import EngineOptions
from penstock.model import Randomness, cross_entropy_sum
from penstock.settings import ConfigError, LearningRate, OptimizerConfig, OptimizerName, WeightDecay
from tests.dist.launch import run_ranks

WIDTH, VOCAB, STEPS = 8, 16, 2
SPLIT = MicroBatchSpec(num=3)
SEED = EngineOptions().seed


class Middle(nn.Module):
    """Counts its calls where no engine looks, and says so once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls, self.said = nn.Linear(WIDTH, WIDTH), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if not self.said:
            self.said.append(f"first given {tuple(x.shape)}")
        return torch.tanh(self.linear(self.own(x)))

    def own(self, x: Tensor) -> Tensor:
        return x


class Counts(Middle):
    """Its result depends on the number of its calls."""

    def own(self, x: Tensor) -> Tensor:
        return x * self.num_calls


class Table(Middle):
    """Makes a table on first use, and keeps the last rows beside it."""

    table: Tensor | None = None
    last: Tensor | float = 0.0

    def own(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, WIDTH)
        x = x * self.table + self.last
        self.last = x.detach().mean(0)
        return x


class Draws(Middle):
    """Draws random numbers."""

    def own(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(x.shape)


class Widens(Middle):
    """Gives several tensors: whole rows, a complex one, a number, as many rows as its data say, and none."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = super().forward(x)
        large = x[x[:, 0] > 0]
        return {
            "x": x,
            "turned": torch.polar(x.abs() + 0.1, x),
            "total": x.sum(),
            "large": large,
            "doubled": x.double(),
            "none": x[:0],
        }


class Narrows(Middle):
    def forward(self, x: Tensor, **beside: Tensor) -> Tensor:
        more = beside["turned"].real + beside["turned"].imag * beside["large"].sum() + 0.01 * beside["total"]
        return super().forward(x + more + beside["doubled"].float() + beside["none"].sum())


class Views(Middle):
    """Gives several views: one conjugated by a mark, one negated by a mark, one transposed and one expanded."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        turned = torch.polar(super().forward(x) + 2.0, x).conj()
        return {"turned": turned, "negated": turned.imag, "column": x.t(), "mean": x.mean(0).expand(x.shape)}


class MoreViews(Middle):
    """Gives such views on, among them what it was given."""

    def forward(self, **views: Tensor) -> dict[str, Any]:
        turned = views["turned"].conj()
        more = super().forward(turned.real + views["negated"] + views["column"].t() * views["mean"])
        turned = (turned * more).conj()
        return {**views, "turned": turned, "negated": turned.imag}


class Rows(Middle):
    def forward(self, turned: Tensor, negated: Tensor, column: Tensor, mean: Tensor) -> Tensor:
        return super().forward(turned.real + 2.0 * turned.imag + 3.0 * negated + column.t() + mean)


KINDS: dict[str, tuple[type[Middle], ...]] = {
    "a counter in a plain attribute": (Counts, Counts, Middle),
    "a table made on first use, a tensor in a plain attribute": (Table, Middle, Table),
    "random numbers": (Draws, Middle, Draws),
    "other tensors than rows": (Widens, Narrows, Middle),
    "views among several tensors": (Views, MoreViews, Rows),
}


def layers(kind: str) -> list[nn.Module]:
    torch.manual_seed(7)
    return [nn.Embedding(VOCAB, WIDTH), *(made() for made in KINDS[kind]), nn.Linear(WIDTH, VOCAB)]


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in (5, 3, 7, 4, 6)])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.0)


PLAIN = OptimizerConfig(LearningRate(0.1), weight_decay=WeightDecay(0.0), clip_norm=0.0, name=OptimizerName.SGD)


Found = tuple[list[float], dict[str, Tensor], dict[str, tuple[int, list[str]]]]
"""The losses, the final weights, and what each of the middle layers has counted and said."""


def state(own: dict[str, nn.Module]) -> tuple[dict[str, Tensor], dict[str, tuple[int, list[str]]]]:
    weights = {f"{name}.{key}": p.detach().clone() for name, m in own.items() for key, p in m.named_parameters()}
    return weights, {name: (m.num_calls, m.said) for name, m in own.items() if isinstance(m, Middle)}


def by_hand(kind: str, evaluates: bool) -> Found:
    """Plain PyTorch: one layer after the other, microbatch by microbatch."""
    model, losses = layers(kind), []
    optimizer = sgd([p for layer in model for p in layer.parameters()])

    def run(given: PackedBatch, step: int | None) -> float:
        parts, weight = split(given, SPLIT).microbatches, int((given["labels"] >= 0).sum())
        # As an engine adds up: normalised in a step, afterwards in an evaluation.
        factor, found = 1.0 if step is None else 1.0 / weight, []
        for number, part in enumerate(parts):
            x: Any = part["tokens"]
            for i, layer in enumerate(model):
                if step is not None:
                    Randomness(SEED, step, 0, number, x.device if isinstance(x, Tensor) else torch.device("cpu")).begin(
                        f"layers.{i}"
                    )
                x = layer(**x) if isinstance(x, dict) else layer(x)
            loss = cross_entropy_sum(x, part["labels"]) * factor
            if step is not None:
                loss.backward()
            found.append(loss.detach())
        total = float(torch.stack(found).sum())
        return total if step is not None else total / weight

    for step in range(STEPS):
        if evaluates:
            with torch.no_grad():
                losses.append(run(batch(9), None))
        losses.append(run(batch(step), step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, *state({f"layers.{i}": layer for i, layer in enumerate(model)})


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str = "1f1b"
    evaluates: bool = False


def train(rank: int, kind: str, case: Case) -> Found:
    options = EngineOptions(schedule=case.schedule, optimizer=PLAIN, device="cpu", timeout_s=30.0)
    engine = Engine.from_layers(layers(kind), WIDTH, case.layout, options)
    losses = []
    for step in range(STEPS):
        if case.evaluates:
            losses.append(float(engine.evaluate([batch(9)], micro_batches=SPLIT)))
        losses.append(engine.train_batch(batch(step), micro_batches=SPLIT).loss)
    own = {name: module for stage in engine.pipeline.model.stages.values() for name, module in stage.units}
    found = losses, *state(own)
    assert engine.pipeline.transport.num_pending() == 0
    engine.close()
    engine.grid.close()
    return found


def train_all(rank: int, case: Case) -> list[Found]:
    return [train(rank, kind, case) for kind in KINDS if case.evaluates is False or kind != "random numbers"]


CASES = [
    Case(Layout(pp=2)),
    Case(Layout(pp=2), "zb-v", evaluates=True),
    Case(Layout(pp=3), "zb-h1", evaluates=True),
    Case(Layout(pp=2), "interleaved"),
]


@functools.cache
def expected(evaluates: bool) -> list[Found]:
    kinds = [kind for kind in KINDS if not evaluates or kind != "random numbers"]
    return [by_hand(kind, evaluates) for kind in kinds]


def assert_alike(ranks: list[list[Found]], alone: list[Found]) -> None:
    for (losses, weights, noted), *of_ranks in zip(alone, *ranks, strict=True):
        assert all(found[0] == losses for found in of_ranks)
        every = {name: weight for found in of_ranks for name, weight in found[1].items()}
        assert every.keys() == weights.keys()
        assert all(torch.equal(weight, weights[name]) for name, weight in every.items())
        assert {name: one for found in of_ranks for name, one in found[2].items()} == noted


@pytest.mark.shows(161)
@pytest.mark.parametrize("case", [Case(Layout()), Case(Layout(), evaluates=True), *CASES], ids=str)
def test_each_layer_is_called_as_often_as_its_microbatches_say_and_on_real_data(case: Case) -> None:
    world = case.layout.world_size
    ranks = [train_all(0, case)] if world == 1 else run_ranks(world, train_all, case)
    assert_alike(ranks, expected(case.evaluates))


@pytest.mark.shows(161)
def test_each_replica_calls_its_layers_for_its_own_microbatches_alone() -> None:
    alone, cut = run_ranks(2, train_all, Case(Layout(dp=2))), run_ranks(4, train_all, Case(Layout(dp=2, pp=2)))
    for dp in range(2):
        assert_alike([found for rank, found in enumerate(cut) if rank // 2 == dp], alone[dp])
    assert all(n == STEPS * 3 for found in alone[0] for n, _ in found[2].values())


# ---- what cannot go on to the next layer, and what an engine does not do with layers that it does not know


def gives(make: Callable[[Tensor], Any]) -> nn.Module:
    class Gives(Middle):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    return Gives()


NESTED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "None": (lambda x: None, "gave None;"),
    "a dict in a list": (lambda x: [{"x": x}], "gave a list"),
    "a dict in a tuple": (lambda x: (x, {"y": x}), r"gave a tuple with a dict at 1"),
    "None in a mapping": (lambda x: {"x": x, "mask": None}, r"gave a mapping with None at 'mask'"),
    "nothing": (lambda x: (), "gave an empty tuple"),
    "a sparse tensor": (lambda x: x.to_sparse(), r"gave a tensor that is not dense, of layout torch.sparse_coo"),
    "a tensor without data": (lambda x: x.to("meta"), "gave a tensor without data"),
    "another width": (lambda x: x[:, 1:], rf"gave \[5, {WIDTH - 1}\] .* go rows of \[{WIDTH}\], the hidden size"),
}


def refused(rank: int, pp: int) -> list[str]:
    found = []
    for make, _ in NESTED.values():
        model = [nn.Embedding(VOCAB, WIDTH), gives(make), nn.Linear(WIDTH, VOCAB)]
        engine = Engine.from_layers(model, WIDTH, Layout(pp=pp), EngineOptions(optimizer=PLAIN, device="cpu"))
        given = PackedBatch.from_documents([torch.arange(5)])
        with pytest.raises(RuntimeError) as caught:
            engine.train_batch(given, micro_batches=MicroBatchSpec(num=1))
        found.append(str(caught.value))
        engine.close()
    return found


def test_what_no_layer_can_be_given_is_refused_by_the_name_of_the_layer_that_gives_it() -> None:
    for ranks in ([refused(0, 1)], run_ranks(3, refused, 3)):
        for (_, words), *texts in zip(NESTED.values(), *ranks, strict=True):
            for text in texts:
                with pytest.raises(AssertionError, match=f"layers.1 {words}"):
                    raise AssertionError(text)
                assert "a tensor, or a tuple or mapping of tensors" in text or "as a tuple or mapping" in text


def test_a_users_own_layers_are_neither_measured_nor_rehearsed() -> None:
    model = layers("a counter in a plain attribute")
    with pytest.raises(ConfigError, match="measure_lengths: to measure layers is to run them"):
        Engine.from_layers(model, WIDTH, measure_lengths=(4, 4))
    assert [layer.num_calls for layer in model if isinstance(layer, Middle)] == [0, 0, 0]
