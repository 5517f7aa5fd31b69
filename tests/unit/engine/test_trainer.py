"""One training step of an engine in this process: the loss scale, the auxiliary losses and the routers' memory."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL
from penstock.engine import EngineOptions
from penstock.engine.training.loss import token_cross_entropy
from penstock.engine.training.trainer import TrainResult
from penstock.model import decoder_units
from penstock.settings import ExpertConfig, ModelConfig, Normalize, OptimizerConfig, Precision

VOCABULARY = 48
EXPERTS = ExpertConfig(
    num_experts=6,
    num_active=2,
    intermediate_size=16,
    bias_step=0.05,
    microbatch_loss=0.4,
    sequence_loss=0.3,
    global_loss=0.2,
    z_loss=0.1,
)
MODEL = ModelConfig(VOCABULARY, 24, 32, 2, 4, num_kv_heads=2, experts=EXPERTS)


def engine_of(precision: Precision = Precision.FP64, model: ModelConfig = MODEL) -> Engine:
    options = EngineOptions(precision=precision, optimizer=OptimizerConfig(clip_norm=0), device="cpu")
    return Engine(decoder_units(model), model.hidden_size, options=options)


def batch_of(lengths: Sequence[int], masked: Sequence[int] = ()) -> PackedBatch:
    """Random documents; the `masked` ones, by their number, have no label."""
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
    batch = PackedBatch.from_documents(documents)
    labels = list(batch["labels"].split(list(lengths)))
    for number in masked:
        labels[number] = torch.full_like(labels[number], NO_LABEL)
    return PackedBatch.from_data({"tokens": batch["tokens"], "labels": torch.cat(labels)}, batch.lengths, batch.ids)


def test_a_microbatch_may_be_given_its_weight_as_a_tensor_of_one_element() -> None:
    losses = []
    for weight in (3.0, torch.tensor(3.0), torch.tensor([3.0])):
        engine = engine_of()
        weight_fn: Any = lambda microbatch, weight=weight: weight * len(microbatch.lengths)  # noqa: E731
        losses.append(engine.train_batch(batch_of((5, 3, 4)), loss_weight_fn=weight_fn).loss)
        engine.close()
    assert losses[0] == losses[1] == losses[2]


def test_random_numbers_depend_on_a_steps_number_and_not_on_the_steps_before() -> None:
    layers = [torch.nn.Embedding(VOCABULARY, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, VOCABULARY)]

    def first_loss(step: int | None) -> float:
        engine = Engine.from_layers(copy.deepcopy(layers), hidden_size=8, options=EngineOptions(device="cpu"))
        return engine.train_batch(batch_of((5, 3, 4)), step=step).loss

    assert first_loss(None) == first_loss(1) and first_loss(7) == first_loss(7)
    assert len({first_loss(1), first_loss(7), first_loss(100)}) == 3


# ---- the loss scale


def step_with_weights(precision: Precision, weights: dict[str, Tensor]) -> tuple[TrainResult, dict[str, Tensor]]:
    """One step from these weights; its result, and the gradients it has learned from."""
    engine = engine_of(precision, replace(MODEL, num_predictions=1))
    with torch.no_grad():
        for name, parameter in engine.parameters().items():
            parameter.copy_(weights[name])
    result = engine.train_batch(batch_of((12, 7, 9, 14)), micro_batches=MicroBatchSpec(num=2))
    trained = [name for name, p in engine.parameters().items() if p.requires_grad]
    return result, {name: engine.gradient(name).float().clone() for name in trained}


@pytest.mark.shows(27, 28, 91)
def test_the_loss_scale_of_fp16_shows_in_no_loss_and_no_gradient() -> None:
    """What fp16 rounds is a few thousandths; a scale that is lost, or never taken off, is a factor of 65,536."""
    start = engine_of(Precision.FP16, replace(MODEL, num_predictions=1)).parameters()
    weights = {name: parameter.detach().float() for name, parameter in start.items()}
    (exact, exact_gradients), (found, gradients) = (
        step_with_weights(precision, weights) for precision in (Precision.FP32, Precision.FP16)
    )
    assert (exact.loss_scale, found.loss_scale) == (1.0, 2.0**16) and found.success
    assert found.loss == pytest.approx(exact.loss, rel=0.01)
    assert found.grad_norm == pytest.approx(exact.grad_norm, rel=0.01)
    assert set(exact.aux_losses.losses) == {"balance", "sequence_balance", "global_balance", "z", "prediction"}
    assert dict(found.aux_losses.losses) == pytest.approx(dict(exact.aux_losses.losses), rel=0.01)
    assert gradients.keys() == exact_gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - exact_gradients[name]).norm() <= 0.05 * exact_gradients[name].norm(), name


# ---- auxiliary losses


def losses_of_indifferent_routers(batch: PackedBatch, normalize: Normalize, num_microbatches: int) -> dict[str, float]:
    """A step's auxiliary losses where each router gives all experts the same score, so that each token costs the same.

    One token's share of an expert is 1 / E, so its balance terms are 1 and its z term is log(E)^2, before coefficients.
    """
    engine = engine_of()
    with torch.no_grad():
        for name, parameter in engine.parameters().items():
            if name.endswith("router.logits.weight"):
                parameter.zero_()
    result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=num_microbatches), normalize=normalize)
    return dict(result.aux_losses.losses)


def expected_losses(share: float = 1.0) -> dict[str, float]:
    """By hand: of the model's layers, if `share` of a step's tokens count, each as much as one token of its loss."""
    each = {
        "balance": EXPERTS.microbatch_loss,
        "sequence_balance": EXPERTS.sequence_loss,
        "global_balance": EXPERTS.global_loss,
        "z": EXPERTS.z_loss * math.log(EXPERTS.num_experts) ** 2,
    }
    return {name: MODEL.num_layers * share * value for name, value in each.items()}


@pytest.mark.shows(27)
@pytest.mark.parametrize("masked", [(), (0, 2), (0, 1, 2)], ids=["all labels", "half the labels", "a few labels"])
def test_a_coefficient_means_the_same_whatever_part_of_the_tokens_has_a_label(masked: tuple[int, ...]) -> None:
    batch = batch_of((9, 7, 5, 8), masked)
    found = losses_of_indifferent_routers(batch, Normalize.GLOBAL, num_microbatches=1)
    assert found == pytest.approx(expected_losses(), rel=1e-12)


@pytest.mark.shows(27, 114)
@pytest.mark.parametrize("normalize", [Normalize.GLOBAL, Normalize.DP])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_fully_masked_microbatch_weighs_what_its_tokens_weigh_in_any_other(
    normalize: Normalize, num_microbatches: int
) -> None:
    batch = batch_of((11, 6, 8, 3), masked=(0, 3))
    found = losses_of_indifferent_routers(batch, normalize, num_microbatches)
    assert found == pytest.approx(expected_losses(), rel=1e-12)


@pytest.mark.shows(24, 27)
def test_a_fully_masked_microbatch_adds_no_auxiliary_loss_to_a_mean_over_microbatches() -> None:
    lengths = (11, 6)
    # The mean over two microbatches, of which one has no loss: half of the other's, and each of its tokens counts as
    # the labels of the step are spread over all tokens.
    found = losses_of_indifferent_routers(
        batch_of(lengths, masked=(0,)), Normalize.TOKEN_PER_MICROBATCH, num_microbatches=2
    )
    assert found == pytest.approx(expected_losses(share=6 / 17 / 2), rel=1e-12)


# ---- what routers remember


def infinite_loss(output: Tensor, microbatch: PackedBatch) -> Tensor:
    return token_cross_entropy(output, microbatch) * math.inf


@pytest.mark.shows(92)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_a_skipped_step_moves_no_router(precision: Precision) -> None:
    engine, batch = engine_of(precision), batch_of((12, 7, 9, 14))
    spec = MicroBatchSpec(num=2)

    def remembered() -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in engine.parameters().items() if ".balance." in name}

    before = remembered()
    assert len(before) == 2 * MODEL.num_layers, "a bias and a load each"
    assert not engine.train_batch(batch, loss_fn=infinite_loss, micro_batches=spec).success
    assert all(torch.equal(value, before[name]) for name, value in remembered().items())
    assert engine.train_batch(batch, micro_batches=spec).success
    assert not any(torch.equal(value, before[name]) for name, value in remembered().items())


def test_the_loss_scale_stays_when_a_parameter_is_frozen() -> None:
    engine, batch = engine_of(Precision.FP16), batch_of((12, 7, 9, 14))
    spec = MicroBatchSpec(num=2)
    begun = engine.trainer.optimizer.loss_scale
    assert not engine.train_batch(batch, loss_fn=infinite_loss, micro_batches=spec).success
    lowered = engine.trainer.optimizer.loss_scale
    assert lowered < begun
    next(iter(engine.parameters().values())).requires_grad_(False)
    assert engine.train_batch(batch, micro_batches=spec).success
    assert engine.trainer.optimizer.loss_scale == lowered
