"""Ranks that share every sequence train as one process does: loss, gradient norm, gradients and weights."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL, part_of, split
from penstock.engine import Engine, EngineOptions
from penstock.model import ModelGroups, cross_entropy_sum, cut_sequences, decoder_units
from penstock.runtime import PipelineError
from penstock.settings import ContextForm, ModelConfig, OptimizerConfig, Precision
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, sliding_window=9
)
LENGTHS = (13, 4, 16, 7, 2, 11, 30, 1)
# fp64 sums of a few hundred terms of size one: rounding stays well below.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str = "1f1b"
    form: ContextForm = ContextForm.RING
    recompute: str = "none"


def batch_of(dp_rank: int, dp: int) -> PackedBatch:
    """This data-parallel rank's documents, some tokens without a label."""
    generator = torch.Generator().manual_seed(0)
    whole = PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in LENGTHS])
    labels = whole["labels"].clone()
    labels[::5] = NO_LABEL
    whole = whole.with_data({"tokens": whole["tokens"], "labels": labels})
    return PackedBatch.gather(whole.unpack()[dp_rank::dp])


def trained(case: Case) -> dict[str, Any]:
    options = EngineOptions(
        schedule=case.schedule,
        precision=Precision.FP64,
        attention=case.form,
        recompute=case.recompute,
        optimizer=OptimizerConfig(clip_norm=0.5),
        timeout_s=30.0,
    )
    engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, case.layout, options)
    batch = batch_of(engine.grid.dp_rank, case.layout.dp)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(3):
        result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=2))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        found.setdefault("gradients", {name: engine.gradient(name).clone() for name in engine.parameters()})
    found["tokens"] = result.num_tokens
    found["weights"] = {name: p.detach().clone() for name, p in engine.parameters().items()}
    found["evaluated"] = engine.evaluate([batch], micro_batches=MicroBatchSpec(num=2))
    found["logits"] = engine.forward(batch, broadcast=True)
    engine.close()
    engine.grid.close()
    return found


def trained_in_turn(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [trained(case) for case in cases]


def assert_same(found: dict[str, Any], wanted: dict[str, Any], case: Case) -> None:
    for kind in ("losses", "norms"):
        assert found[kind] == pytest.approx(wanted[kind], abs=TOLERANCE, rel=0), case
    assert found["evaluated"] == pytest.approx(wanted["evaluated"], abs=TOLERANCE, rel=0), case
    assert found["tokens"] == wanted["tokens"]
    for kind in ("gradients", "weights"):
        assert found[kind].keys() <= wanted[kind].keys() and found[kind]
        for name, value in found[kind].items():
            assert (value - wanted[kind][name]).abs().max() <= TOLERANCE, (case, kind, name)
    if case.layout.dp == 1:
        assert (found["logits"] - wanted["logits"]).abs().max() <= TOLERANCE


CASES = {
    2: [
        Case(Layout(cp=2)),
        Case(Layout(cp=2), recompute="full"),
        Case(Layout(cp=2), form=ContextForm.ALL_TO_ALL),
        Case(Layout(cp=2), "combined-1f1b"),
    ],
    4: [
        Case(Layout(pp=2, cp=2)),
        Case(Layout(pp=2, cp=2), "zb-h1"),
        Case(Layout(pp=2, cp=2), "interleaved", ContextForm.ALL_TO_ALL, "full"),
        Case(Layout(dp=2, cp=2)),
        Case(Layout(cp=4)),
    ],
}


@pytest.mark.shows(82, 86, 87)
@pytest.mark.parametrize("world", CASES)
def test_training_and_scoring_equal_those_of_one_process(world: int) -> None:
    wanted = trained(Case(Layout()))
    by_rank = run_ranks(world, trained_in_turn, CASES[world], timeout_s=120.0)
    for of_rank in by_rank:
        for found, case in zip(of_rank, CASES[world], strict=True):
            assert_same(found, wanted, case)
    for index, _ in enumerate(CASES[world]):
        assert set().union(*(of_rank[index]["weights"] for of_rank in by_rank)) == wanted["weights"].keys()


def refusals(rank: int) -> list[str]:
    """What all ranks are told, in turn; between the refusals the engine still works."""
    engine = Engine(
        lambda groups: decoder_units(CONFIG, groups=groups),
        CONFIG.hidden_size,
        Layout(pp=1, dp=2, cp=2),
        EngineOptions(),
    )
    good, short = (PackedBatch.from_documents([torch.arange(n)] * 2) for n in (6, 1))
    said = []
    for normalize, batch in (("global", short if engine.grid.dp_rank == 1 else good), ("global", good)):
        try:
            engine.train_batch(batch, normalize=normalize, micro_batches=MicroBatchSpec(num=2))
        except (ValueError, PipelineError) as error:
            said.append(f"{type(error).__name__}: {error}")
    with pytest.raises(ValueError, match="cp = 1, 2, or attention = 'ring'"):
        groups = ModelGroups.planned(cp=4, form=ContextForm.ALL_TO_ALL)
        decoder_units(CONFIG, groups=groups)
    engine.close()
    engine.grid.close()
    return said


def test_what_cannot_be_shared_is_refused_on_all_ranks_before_it_starts() -> None:
    by_rank = run_ranks(4, refusals, timeout_s=60.0)
    assert [len(said) for said in by_rank] == [1] * 4
    sharing = "cp=2 ranks cannot share sequences of [1] tokens: some rank would hold none; at most cp=1 can"
    assert all(sharing in by_rank[rank][0] for rank in (2, 3))
    assert all(f"rank 2 cannot use what it was given: {sharing}" in by_rank[rank][0] for rank in (0, 1))


def means_of_parts(rank: int) -> float:
    engine = Engine(
        lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, Layout(cp=2), EngineOptions()
    )
    batch = batch_of(0, 1)
    of_parts = engine.train_batch(batch, normalize="microbatch_mean", micro_batches=MicroBatchSpec(num=2)).loss
    engine.close()
    engine.grid.close()
    return of_parts


@pytest.mark.shows(21)
def test_the_mean_of_microbatches_is_one_over_context_ranks_too() -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size)
    batch = batch_of(0, 1)
    means = []
    for microbatch in split(batch, MicroBatchSpec(num=2)).microbatches:
        logits = engine.forward(microbatch)
        pieces = cut_sequences(microbatch.sequence_lengths(), 2)
        for of_rank in pieces:
            rows = part_of(microbatch.with_key("row", torch.arange(len(logits))), of_rank)
            own = logits[rows["row"]]
            num_labels = int((rows["labels"] != NO_LABEL).sum())
            assert num_labels
            means.append(float(cross_entropy_sum(own, rows["labels"])) / num_labels)
    for of_parts in run_ranks(2, means_of_parts, timeout_s=60.0):
        assert of_parts == pytest.approx(sum(means) / len(means), rel=1e-5)
