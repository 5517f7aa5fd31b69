"""Nothing waits for the device inside a step: reads and copies of steps on a device that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from penstock.data import MicroBatchSpec
from penstock.engine import EngineOptions
from penstock.engine.rehearsal import units
from penstock.engine.rehearsal.step import RehearsedBatch, RehearsedPipeline, microbatches_of
from penstock.engine.rehearsal.units import RehearsedPlace, even_counts, without_values
from penstock.engine.training import trainer as training
from penstock.engine.training.loss import StepLoss, num_loss_tokens, token_cross_entropy
from penstock.engine.training.trainer import Trainer
from penstock.model import decoder_units
from penstock.runtime import Executor
from penstock.settings import ExpertConfig, Layout, LearningRate, ModelConfig, Normalize, OptimizerConfig
from tests.device_waits import READ, UPLOAD, DeviceWaits

NUM_LAYERS = NUM_MICROBATCHES = 4
DENSE = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=NUM_LAYERS,
    num_heads=4,
    num_kv_heads=2,
    max_length=256,
)
EXPERTS = replace(
    DENSE,
    experts=ExpertConfig(
        8, 2, 16, shared_size=16, microbatch_loss=0.01, sequence_loss=0.01, global_loss=0.01, z_loss=1e-3
    ),
)


@contextmanager
def one_rank(waits: DeviceWaits, batch: RehearsedBatch) -> Iterator[None]:
    """Within this context ranks agree at once on the batch, and the run of a program is a phase of its own."""
    run = Executor.run

    @contextmanager
    def agreed(pipeline: Any, *arguments: Any) -> Iterator[Any]:
        loss = StepLoss(token_cross_entropy, num_loss_tokens, Normalize.GLOBAL)
        yield microbatches_of(pipeline, batch.parts, loss)

    def watched(executor: Executor, feeds: Any) -> Any:
        waits.phase = "inside"
        try:
            return run(executor, feeds)
        finally:
            waits.phase = "after"

    def read(*counts: Any) -> Any:
        waits.note(READ)
        return even_counts(*counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "even_counts", read)
        patch.setattr(Executor, "run", watched)
        patch.setattr(training, "agree_on_microbatches", agreed)
        yield


def waits_of_a_step(
    config: ModelConfig, layout: Layout, rank: int = 0, label_share: float = 1.0, **options: Any
) -> DeviceWaits:
    """What waits in a rank's step, in bf16 with clipping."""
    optimizer = OptimizerConfig(LearningRate(1e-3), clip_norm=1.0)
    given = EngineOptions("1f1b", **({"precision": "bf16", "optimizer": optimizer, "device": "cuda"} | options))
    place, waits = RehearsedPlace.of("cuda", rank), DeviceWaits()
    batch = RehearsedBatch((64,) * 8, MicroBatchSpec(num=NUM_MICROBATCHES), label_share=label_share)
    # Labels have values, of which rows are chosen.
    assert batch.parts.microbatches
    with without_values(), one_rank(waits, batch):
        pipeline = RehearsedPipeline(
            place, batch, lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, given
        )
        trainer = Trainer(pipeline)
        with waits.watch():
            trainer.train_batch(batch.data, token_cross_entropy, num_loss_tokens, batch.micro_batches)
    return waits


DENSE_STEPS: dict[str, tuple[Layout, int, dict[str, Any]]] = {
    "one rank": (Layout(), 0, {}),
    "pp 2, first": (Layout(pp=2), 0, {}),
    "pp 2, last": (Layout(pp=2), 1, {}),
    "tp 2": (Layout(tp=2), 0, {}),
    "few labels, recomputed": (Layout(), 0, {"label_share": 0.5, "recompute": "full"}),
}


@pytest.mark.shows(208)
@pytest.mark.parametrize(("layout", "rank", "settings"), DENSE_STEPS.values(), ids=DENSE_STEPS)
def test_a_step_of_a_dense_model_copies_once_a_microbatch_and_waits_for_nothing(
    layout: Layout, rank: int, settings: dict[str, Any]
) -> None:
    waits = waits_of_a_step(DENSE, layout, rank, **settings)
    assert waits.of("before") == {UPLOAD: NUM_MICROBATCHES}, waits.places
    assert waits.of("inside") == {}, waits.places


EXPERT_STEPS: dict[str, tuple[Layout, int, dict[str, Any]]] = {
    "one rank": (Layout(), 0, {}),
    "pp 2, last": (Layout(pp=2), 1, {}),
    "tp 2": (Layout(tp=2), 0, {}),
    "recomputed": (Layout(), 0, {"recompute": "full"}),
}


@pytest.mark.shows(208)
@pytest.mark.parametrize(("layout", "rank", "settings"), EXPERT_STEPS.values(), ids=EXPERT_STEPS)
def test_experts_of_one_rank_are_not_counted_on_the_host(layout: Layout, rank: int, settings: dict[str, Any]) -> None:
    waits = waits_of_a_step(EXPERTS, layout, rank, **settings)
    assert waits.of("before") == {UPLOAD: NUM_MICROBATCHES}, waits.places
    assert waits.of("inside") == {}, waits.places


@pytest.mark.shows(208)
@pytest.mark.parametrize(("recompute", "num_forwards"), [("none", 1), ("full", 2)])
def test_experts_on_several_ranks_are_counted_once_in_each_forward_of_a_layer(
    recompute: str, num_forwards: int
) -> None:
    waits = waits_of_a_step(EXPERTS, Layout(dp=2, ep=2), recompute=recompute)
    assert waits.of("inside") == {READ: num_forwards * NUM_LAYERS * NUM_MICROBATCHES}, waits.places


# The norm and the edits of 16-bit weights are read by themselves.
READS_OF_THE_OPTIMIZER = 2


@pytest.mark.shows(208)
def test_after_the_program_the_loss_is_read_once() -> None:
    waits = waits_of_a_step(DENSE, Layout())
    assert waits.of("after") == {READ: 1 + READS_OF_THE_OPTIMIZER}, waits.places
