"""Numbers that a loss function reports: those of one process that sees the whole batch, on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import NO_LABEL, Engine, EngineOptions, Layout, Metric, MicroBatchSpec, PackedBatch, Precision
from penstock.engine.training import metrics
from penstock.model import cross_entropy_sum, decoder_units, whole_logits
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

# fp64, one forward: rounding stays well below.
TOLERANCE = 1e-11
NAMES = {"confident", "correct", "highest", "lowest", "sevens"}


def loss_fn(output: Any, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    """The usual loss, with a number for each reduction; some microbatches leave one out."""
    loss = cross_entropy_sum(output, microbatch["labels"])
    logits, labels = whole_logits(output).detach(), microbatch["labels"]
    counted = labels != NO_LABEL
    probabilities = logits.softmax(-1).amax(-1)[counted]
    metrics = {
        "correct": Metric(float((logits.argmax(-1)[counted] == labels[counted]).sum())),
        "confident": Metric(probabilities.mean(), "mean", weight=counted.sum()),
        "highest": Metric(logits.max(), "max"),
        "lowest": Metric(logits.min(), "min"),
    }
    if num_sevens := int((labels == 7).sum()):
        metrics["sevens"] = Metric(num_sevens)
    return loss, metrics


def batches(dp_rank: int = 0, dp: int = 1) -> list[PackedBatch]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(2):
        lengths = torch.randint(3, 12, (16,), generator=generator).tolist()
        documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
        found.append(PackedBatch.from_documents(documents[dp_rank::dp]))
    return found


def engine_of(layout: Layout, schedule: str = "1f1b", sparse: bool = False) -> Engine:
    config = SPARSE if sparse else DENSE
    options = EngineOptions(schedule, precision=Precision.FP64, timeout_s=60.0)
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)


def reported(rank: int, layout: Layout, schedule: str, num: int, sparse: bool) -> list[dict[str, float]]:
    """The numbers of an evaluation of two batches, of a step on the first, and of one on the second."""
    engine = engine_of(layout, schedule, sparse)
    spec, own = MicroBatchSpec(num=num), batches(engine.grid.dp_rank, layout.dp)
    plain = engine.evaluate(own, lambda output, microbatch: loss_fn(output, microbatch)[0], micro_batches=spec)
    evaluated = engine.evaluate(own, loss_fn, micro_batches=spec)
    assert evaluated == plain and plain.metrics == {}
    steps = [engine.train_batch(batch, loss_fn, micro_batches=spec) for batch in own]
    engine.close()
    return [dict(evaluated.metrics), *(dict(step.metrics) for step in steps)]


CASES = [
    (Layout(), "1f1b", 2, False),
    (Layout(), "1f1b", 16, False),
    (Layout(pp=2), "zb-h1", 4, False),
    (Layout(pp=2), "dualpipe", 4, False),
    (Layout(pp=2), "interleaved", 8, False),
    (Layout(dp=2), "1f1b", 3, False),
    (Layout(pp=2, dp=2), "1f1b", 2, True),
    (Layout(tp=2), "1f1b", 4, False),
    (Layout(cp=2), "1f1b", 4, False),
    (Layout(pp=2, cp=2, ep=2), "1f1b", 4, True),
]


@pytest.mark.shows(109)
@pytest.mark.parametrize(("layout", "schedule", "num", "sparse"), CASES, ids=str)
def test_every_rank_has_the_numbers_of_one_process(layout: Layout, schedule: str, num: int, sparse: bool) -> None:
    if sparse:
        # Auxiliary losses belong to the layout's own microbatches, so that only the first pass is alike.
        [wanted, *_] = reported(0, Layout(), "1f1b", 1, True)
    else:
        wanted, *steps = reported(0, Layout(), "1f1b", 1, False)
    by_rank = run_ranks(layout.world_size, reported, layout, schedule, num, sparse, timeout_s=60.0)
    assert by_rank == [by_rank[0]] * layout.world_size, "ranks differ"
    pairs = [(by_rank[0][0], wanted)] if sparse else zip(by_rank[0], [wanted, *steps], strict=True)
    for found, expected in pairs:
        assert found.keys() == NAMES
        for name in NAMES:
            assert found[name] == pytest.approx(expected[name], abs=TOLERANCE, rel=0)
    labels = torch.cat([batch["labels"] for batch in batches()])
    assert by_rank[0][0]["sevens"] == int((labels == 7).sum()) > 0


@pytest.mark.shows(109)
def test_pipelines_change_no_bit_of_them() -> None:
    wanted = reported(0, Layout(), "1f1b", 4, False)
    for pp, schedule in ((2, "1f1b"), (3, "zb-h1"), (2, "zb-v"), (2, "combined-1f1b")):
        assert run_ranks(pp, reported, Layout(pp=pp), schedule, 4, False) == [wanted] * pp


def collectives_of(rank: int, layout: Layout) -> list[tuple[int, int]]:
    """How often a step without metrics and one with them added up numbers of all ranks, and gathered metrics."""
    engine, num_sums, num_gathered = engine_of(layout), 0, 0
    add_up, gather = engine.pipeline.sum_over_ranks, metrics.gather_json

    def counted_sum(what: str, *values: float) -> list[float]:
        nonlocal num_sums
        num_sums += 1
        return add_up(what, *values)

    def counted(*arguments: Any) -> list[Any]:
        nonlocal num_gathered
        num_gathered += 1
        return gather(*arguments)

    engine.pipeline.sum_over_ranks, metrics.gather_json = counted_sum, counted
    [batch, _] = batches(engine.grid.dp_rank, layout.dp)
    found = []
    for loss in (lambda output, microbatch: loss_fn(output, microbatch)[0], loss_fn):
        num_sums = num_gathered = 0
        engine.train_batch(batch, loss, micro_batches=MicroBatchSpec(num=4))
        found.append((num_sums, num_gathered))
    engine.close()
    return found


@pytest.mark.shows(109)
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2)], ids=str)
def test_a_step_that_reports_nothing_sends_nothing_more(layout: Layout) -> None:
    assert run_ranks(2, collectives_of, layout) == [[(1, 0), (1, 1)]] * 2


def differing(rank: int) -> str:
    engine = engine_of(Layout(dp=2))

    def own_loss(output: Any, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        return loss_fn(output, microbatch)[0], {"number": Metric(1.0, ("sum", "max")[rank])}

    with pytest.raises(ValueError, match="ranks reported the loss's 'number' as a sum and as a max") as caught:
        engine.train_batch(batches(rank, 2)[0], own_loss)
    engine.close()
    return str(caught.value)


def test_ranks_that_reduce_differently_are_refused_on_all() -> None:
    first, second = run_ranks(2, differing)
    assert first == second


@pytest.mark.shows(109)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            lambda loss: (loss, 3, 4),
            r"loss_fn gave a tuple of \(Tensor, int, int\); possible are the loss, or the loss and one more value",
        ),
        (lambda loss: (loss, {1: Metric(1.0)}), "reported a Metric under 1; give each a name"),
        (lambda loss: (loss, {"a": Metric(1.0, "median")}), "one of sum, mean, min, max, not 'median'"),
        (lambda loss: (loss, {"a": Metric(torch.ones(3))}), r"value is one number, not a Tensor of shape \[3\]"),
        (lambda loss: (loss, {"a": Metric(1.0, "max", weight=2.0)}), "counts in a mean alone, not in a max"),
        (lambda loss: (loss, {"a": Metric("high")}), "value is one number, not a str"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_no_metric_is_refused(given: Any, message: str) -> None:
    engine = engine_of(Layout())
    with pytest.raises(ValueError, match=message):
        engine.train_batch(batches()[0], lambda output, microbatch: given(loss_fn(output, microbatch)[0]))


def test_what_is_not_finite_comes_back_so() -> None:
    engine, [batch, _] = engine_of(Layout()), batches()
    parts = iter([1.0, math.nan, 2.0, math.inf, 1.0, 2.0] * 4)

    def own_loss(output: Any, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        nan, infinite = next(parts), next(parts)
        empty = Metric(math.nan, "mean", weight=0.0)
        return loss_fn(output, microbatch)[0], {
            "nan": Metric(infinite, "min"),
            "infinite": Metric(nan if math.isfinite(nan) else 0.0, "max"),
            "empty": empty,
        }

    metrics = engine.train_batch(batch, own_loss, micro_batches=MicroBatchSpec(num=3)).metrics
    assert math.isnan(metrics["nan"]) and metrics["infinite"] == 2.0 and math.isnan(metrics["empty"])
