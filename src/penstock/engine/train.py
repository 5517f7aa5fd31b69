"""One training step: what happens once per batch is a line here, what happens per microbatch is an action."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.extras import Extras, finish_extras, with_terms
from penstock.engine.microbatches import Agreed, agree_on_microbatches
from penstock.engine.normalise import Normalize, loss_factors
from penstock.runtime import Feed
from penstock.schedule import Action, Op

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

LossFn = Callable[[Any, PackedBatch], Tensor]
LossWeightFn = Callable[[PackedBatch], float]


@dataclass(frozen=True)
class TrainResult:
    """What a step did; the same on every rank.

    `loss` is the main one, normalised as the gradients are; `extras` has what models with experts add to it.
    `grad_norm` is that of all parameters before clipping, NaN where the step was skipped because a gradient was not
    finite (`success` is False then). `idle_share` is the share of the step's time in which this rank waited.
    `stop_requested`: some rank was asked to end after this step.
    """

    step: int
    loss: float
    num_tokens: int
    num_microbatches: int
    grad_norm: float
    learning_rate: float
    loss_scale: float
    success: bool
    step_time_s: float
    idle_share: float
    stop_requested: bool
    extras: Extras


def train_batch(
    engine: Engine,
    batch: PackedBatch,
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    micro_batches: MicroBatchSpec,
    normalize: Normalize,
) -> TrainResult:
    """One optimizer step on `batch`; every rank of the grid calls it, ranks of one pipeline with the same batch.

    `loss_fn(output, microbatch)` gives the sum of the microbatch's losses from the last stage's output (logits
    [T, V]), `loss_weight_fn(microbatch)` its weight in the denominator.

    Raises:
        ZeroLossWeight, PipelineError, ValueError: on all ranks alike, before anything is computed.
        TransportError: a peer did not send or receive in time.
    """
    start = time.perf_counter()
    engine.recorder.begin_step(engine.step)
    agreed = agree_on_microbatches(engine, batch, micro_batches, loss_weight_fn)
    factors = loss_factors(normalize, *_weights(engine, agreed, loss_weight_fn, normalize))
    scale = engine.optimizer.loss_scale

    def feed(index: int, microbatch: PackedBatch) -> Feed:
        factor = factors[index] * scale if factors else 0.0
        return engine.feed(microbatch, lambda output, own: _checked(loss_fn(output, own)) * factor)

    feeds = [feed(i, microbatch) for i, microbatch in enumerate(agreed.microbatches)]
    feeds = with_terms(engine, feeds, agreed, [factor * scale for factor in factors])
    engine.zero_gradients()
    losses = engine.executor(len(feeds)).run(feeds)
    record = engine.recorder.begin(Action(Op.STEP))
    with engine.recorder.collective("finish the gradients and step"):
        engine.finish_gradients()
        update = engine.optimizer.step()
        engine.gather_parameters()
        engine.casts.renew()
        extras = finish_extras(engine, feeds, scale, learned=update.success)
    engine.recorder.end(record)

    loss = engine.total_loss(losses) / scale
    engine.step += 1
    step_time_s = time.perf_counter() - start
    return TrainResult(
        step=engine.step,
        loss=loss,
        num_tokens=agreed.num_tokens,
        num_microbatches=len(feeds),
        grad_norm=update.grad_norm,
        learning_rate=update.learning_rate,
        loss_scale=scale,
        success=update.success,
        step_time_s=step_time_s,
        idle_share=1.0 - sum(e.end - e.start for e in engine.recorder.events()) / step_time_s,
        stop_requested=agreed.stop_requested,
        extras=extras,
    )


def _checked(loss: Any) -> Tensor:
    """Raises ValueError where a loss function gives anything but one number to be differentiated."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    given = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        given = f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a graph")
    raise ValueError(
        f"loss_fn gave {given}; a step learns from the sum of a microbatch's losses, one number with its graph, and "
        "`forward` gives whatever else is to be made of the outputs"
    )


def _weights(
    engine: Engine, agreed: Agreed, loss_weight_fn: LossWeightFn, normalize: Normalize
) -> tuple[Sequence[float], Sequence[float]]:
    """The loss weights of this rank's microbatches, and the totals of the ranks that the mode takes a mean over."""
    if normalize is not Normalize.MICROBATCH_MEAN or engine.layout.cp == 1:
        return agreed.weights, agreed.rank_totals
    # Here each context-parallel rank is a rank of its own, with the mean of its part of every microbatch.
    own = [float(loss_weight_fn(engine.context.share(m)[0])) for m in agreed.microbatches if agreed.weights]
    return own, [total for total in agreed.rank_totals for _ in range(engine.layout.cp)]


def evaluate_batch(
    engine: Engine, batch: PackedBatch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, micro_batches: MicroBatchSpec
) -> tuple[float, float]:
    """Sum of the losses and of their weights over all ranks' batches; forwards alone, nothing is learned."""
    agreed = agree_on_microbatches(engine, batch, micro_batches, loss_weight_fn)

    def feed(microbatch: PackedBatch) -> Feed:
        return engine.feed(microbatch, loss_fn)

    feeds = [feed(microbatch) for microbatch in agreed.microbatches]
    losses = engine.executor(len(feeds), training=False).run(feeds)
    return engine.total_loss(losses), sum(agreed.rank_totals)
