"""Nothing waits for the device inside a step: reads and copies of steps on a device that is not there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from penstock.data import MicroBatchSpec
from penstock.engine import EngineOptions
from penstock.engine.generation.generator import Generator
from penstock.engine.generation.listeners import Listeners
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.pipeline import Pipeline
from penstock.engine.rehearsal import place as places
from penstock.engine.rehearsal.place import RehearsedPlace, even_counts
from penstock.engine.rehearsal.step import RehearsedBatch, microbatches_of
from penstock.engine.rehearsal.units import without_values
from penstock.engine.training import trainer as training
from penstock.engine.training.loss import BoundLoss, num_loss_tokens, token_cross_entropy
from penstock.engine.training.trainer import Trainer
from penstock.model import decoder_units
from penstock.runtime import Executor
from penstock.runtime.decode import loop
from penstock.settings import (
    ExpertConfig,
    Layout,
    LearningRate,
    ModelConfig,
    Normalize,
    OptimizerConfig,
    Precision,
    SamplingParams,
)
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
        loss = BoundLoss(token_cross_entropy, num_loss_tokens, Normalize.GLOBAL)
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
        patch.setattr(places, "even_counts", read)
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
        units = lambda groups: decoder_units(config, groups=groups)  # noqa: E731
        pipeline = Pipeline(units, config.hidden_size, layout, given, place)
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


@pytest.mark.shows(208)
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_after_the_program_losses_norms_and_loads_are_one_read(config: ModelConfig) -> None:
    waits = waits_of_a_step(config, Layout())
    assert waits.of("after") == {READ: 1}, waits.places


NUM_ROWS, NUM_TOKENS = 4, 4


def waits_of_a_token(params: SamplingParams, config: ModelConfig = DENSE, **settings: Any) -> dict[str, float]:
    """Kind -> how often in a batch of one token for each row."""

    def waits_of(num_new_tokens: int) -> DeviceWaits:
        place, waits = RehearsedPlace.of("cuda"), DeviceWaits()
        options = EngineOptions("1f1b", precision=Precision.BF16, device="cuda", learns=False)
        with without_values(), waits.watch():
            units = lambda groups: decoder_units(config, groups=groups)  # noqa: E731
            pipeline = Pipeline(units, config.hidden_size, Layout(), options, place)
            prompts = [list(range(row + 2)) for row in range(NUM_ROWS)]
            own = replace(params, max_new_tokens=num_new_tokens)
            listeners, form = Listeners(), GenerateOptions(decode="live-rows", **settings)
            waits.places.clear()
            result = Generator(pipeline).generate(prompts, own, form, listeners)
        assert [len(answer.generated) for answer in result.sequences] == [num_new_tokens] * NUM_ROWS
        return waits

    few, many = (waits_of(num) for num in (2, 2 + NUM_TOKENS))
    before = few.of("before")
    return {kind: (num - before[kind]) / NUM_TOKENS for kind, num in many.of("before").items() if num != before[kind]}


DRAWS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "penalties": SamplingParams(
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        bad_words=((1, 1),),
        logit_bias={3: 1.0},
        end_tokens=(5,),
        min_new_tokens=2,
    ),
    "likeliest": SamplingParams(top_log_probs=3),
}


@pytest.mark.shows(208)
@pytest.mark.parametrize("params", DRAWS.values(), ids=DRAWS)
def test_a_token_is_read_once_and_nothing_else_waits(params: SamplingParams) -> None:
    assert waits_of_a_token(params) == {UPLOAD: 1, READ: 1}


@pytest.mark.shows(208)
def test_a_batchs_tokens_are_read_when_the_next_one_has_been_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    events, begin_read, decode = [], loop.begin_read, loop.StageDecoder.decode

    def noted_read(x: Tensor) -> Callable[[], Tensor]:
        read = begin_read(x)
        return lambda: (events.append("read"), read())[1]

    def noted_decode(*args: Any) -> Tensor:
        events.append("launch")
        return decode(*args)

    monkeypatch.setattr(loop, "begin_read", noted_read)
    monkeypatch.setattr(loop.StageDecoder, "decode", noted_decode)
    waits_of_a_token(DRAWS["greedy"])
    few, many = ["launch", "launch", "read", "read"], ["launch", *["launch", "read"] * (1 + NUM_TOKENS), "read"]
    assert events == few + many
