"""Training: one optimizer step, with gradient accumulation over the microbatches of a batch.

Each thing that happens once per batch is a line of `Trainer.train_batch`; each thing that happens once per microbatch
is an action of the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.build import build_on_all_ranks
from penstock.engine.optimizer.optimizer import LossScaler, Optimizer, Update
from penstock.engine.optimizer.steppers import Values
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.aux_losses import AuxLossReport, AuxLossTracker
from penstock.engine.training.freezing import TrainedParameters, WholeState
from penstock.engine.training.losses import (
    LossFn,
    LossMetrics,
    LossWeightFn,
    checked_loss,
    loss_factors,
    token_cross_entropy,
)
from penstock.engine.training.microbatches import (
    LAST_STEP,
    AgreedSplit,
    BatchCall,
    BatchReport,
    agree_on_microbatches,
    check_loss,
    check_step,
)
from penstock.model import kept_random_state
from penstock.parallel import GradientBuckets, naming_ended_ranks, share_buffers, sum_tied
from penstock.parallel.host import gather_json
from penstock.runtime import Feed
from penstock.schedule import Action, Op
from penstock.settings import Normalize, Precision


@dataclass(frozen=True)
class TrainResult:
    """The outcome of one step, the same on every rank but for `idle_share` and `step_time_s`.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> result = engine.train_batch(PackedBatch.from_documents([torch.arange(5), torch.arange(3)]))
    >>> result.step, result.num_tokens, result.success
    (1, 8, True)
    """

    #: the step's number, from 1
    step: int
    #: the main loss, normalised as the gradients are
    loss: float
    #: tokens of all data-parallel ranks
    num_tokens: int
    #: microbatches of each rank
    num_microbatches: int
    #: norm of all gradients before clipping; NaN where one was not finite
    grad_norm: float
    #: learning rate of the last step that succeeded, this or an earlier one
    learning_rate: float
    #: factor on this step's loss; 1 unless training in fp16
    loss_scale: float
    #: False where a gradient was not finite: then no weight has changed
    success: bool
    #: wall time of the step
    step_time_s: float
    #: fraction of that time in which this rank waited
    idle_share: float
    #: True if some rank was asked to end after this step
    stop_requested: bool
    #: auxiliary losses, and the experts' load
    aux_losses: AuxLossReport
    #: numbers that the loss function reported, over all microbatches and ranks
    metrics: Mapping[str, float] = field(default_factory=dict)


class Trainer:
    """Takes optimizer steps on a pipeline's weights.

    Every process of the layout constructs it at the same point and calls its methods in the same order. With
    `learns=False` there are no gradients, and no step can be taken.
    """

    #: stages, transport and recorder
    pipeline: Pipeline
    #: local stage -> its flat gradients, which the program's REDUCE_GRAD actions sum over ranks
    gradients: dict[int, GradientBuckets]
    #: losses that units add in the middle of the model, and the routers that learn from the experts' load
    aux_losses: AuxLossTracker
    #: steps the parameters of this rank, or with ZeRO its shard of them
    optimizer: Optimizer
    #: this rank's parameters, and which of them are trained
    _trained: TrainedParameters
    #: full names of all that is trained, on any rank
    _names: set[str]
    #: True if this rank was asked to end after the next step
    stop_requested: bool
    #: undoes the optimizer's step, while some rank may still fail in it
    _put_back: Callable[[], None] | None

    @naming_ended_ranks()
    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.stop_requested, self._put_back = pipeline, False, None
        self._trained = TrainedParameters(pipeline.parameters())
        self._names = self._trained.agree(pipeline.ties.owners, pipeline.grid.control)
        self.gradients = build_on_all_ranks(lambda: _make_buckets(pipeline, {}), pipeline.grid.control)
        # Parameters have moved into their buckets.
        pipeline.lend_weights()
        self.aux_losses = AuxLossTracker(pipeline)
        self.optimizer = _make_optimizer(pipeline, list(self.gradients.values()))
        pipeline.recovery.around_renewal(undo=self._undo, redo=self._gather_weights)

    def refit(self, since: Mapping[str, int] | None = None) -> None:
        """Give gradients and optimizer state to exactly the parameters that require a gradient now.

        Parameters that are trained already keep their state; others begin without one. All ranks call it, and
        `train_batch` does where a parameter was frozen or thawed. since: see `Optimizer.since`.

        Raises:
            ValueError: ranks disagree on a parameter, or on two that are tied; on all ranks alike.
        """
        pipeline, old = self.pipeline, self.optimizer
        trained = self._trained.agree(pipeline.ties.owners, pipeline.grid.control)
        progress = old.progress()
        if since is None:
            new, num_updates = trained - self._names, int(progress["num_updates"])
            kept = {name: number for name, number in old.since.items() if name in trained - new}
            since = {**kept, **{name: num_updates for name in new if num_updates}}
        self._names = trained
        state = WholeState.of(old, pipeline.device, pipeline.grid.control)
        places = [place for of_stage in self.gradients.values() for place in of_stage.places]
        for of_stage in self.gradients.values():
            of_stage.close()
        for place in places:
            if not place.parameter.requires_grad:
                # The bucket's memory goes.
                place.parameter.data = place.parameter.detach().clone()
        self.gradients = build_on_all_ranks(lambda: _make_buckets(pipeline, since), pipeline.grid.control)
        pipeline.lend_weights()
        pipeline.casts.renew()
        self.optimizer = _make_optimizer(pipeline, list(self.gradients.values()))
        state.give(self.optimizer)
        self.optimizer.load_progress(progress | {"since": since})

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from an optimizer's `progress`, after its state has been loaded."""
        since = progress.get("since", {})
        if since != self.optimizer.since:
            self.refit(since)
        self.optimizer.load_progress(progress)

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """One optimizer step on `batch`; every rank of the grid calls it, ranks of one pipeline with the same batch.

        `loss_fn(output, microbatch)` gives the sum of the microbatch's losses from the last stage's output (logits
        [T, V]), or that and a dict of numbers to report, each a `Metric`. `loss_weight_fn(microbatch)` gives its weight
        in the denominator. `step` is the step's absolute number, on which rates depend; left out, one more than that of
        the last step. Parameters are trained if they require a gradient now.

        Raises:
            ZeroLossWeight, PipelineError, ValueError: on all ranks alike, before anything is computed.
            StepError: on all ranks, when one has failed; the step has been undone, and the next one can be taken. (A
                rank that is alone raises the exception itself.)
            TransportError: a peer did not send or receive in time.
        """
        self.pipeline.recovery.check_usable()
        if not self.pipeline.options.learns:
            raise ValueError("this engine was made with learns=False, to score and generate; make one that learns")
        start, loss_scale = time.perf_counter(), self.optimizer.loss_scale
        number = self.pipeline.step + 1 if step is None else step
        self.pipeline.begin_recording(number)
        job = self._job(loss_fn, loss_weight_fn, normalize, number)
        measured, recovery = LossMetrics(loss_fn), self.pipeline.recovery
        with recovery.joined():
            agreed = agree_on_microbatches(self.pipeline, batch, micro_batches, job, loss_weight_fn)
            self._train_what_requires(agreed.refit)
            factors = self._loss_factors(agreed, loss_weight_fn, Normalize.parse(normalize))
            with recovery.alone():
                feeds = self.feeds(agreed, measured, [factor * loss_scale for factor in factors])
                losses = self.run(feeds)
                rates = self.optimizer.rates(number)
                # Each rank gives its part when it is through its program: so now none can fail in it any more.
                loss, num_metrics = measured.total(self.pipeline, losses)
            metrics = measured.reduced(self.pipeline, num_metrics)
            update, aux_losses = self.finish(feeds, loss_scale, number, rates)
        step, step_time_s = self.pipeline.count_step(number), time.perf_counter() - start
        return TrainResult(
            step=step,
            loss=loss / loss_scale,
            num_tokens=agreed.num_tokens,
            num_microbatches=len(feeds),
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            loss_scale=loss_scale,
            success=update.success,
            step_time_s=step_time_s,
            idle_share=1.0 - sum(e.end - e.start for e in self.pipeline.recorder.events()) / step_time_s,
            stop_requested=agreed.stop_requested,
            aux_losses=aux_losses,
            metrics=metrics,
        )

    # ---- the parts of a step, in order

    def _train_what_requires(self, changed: bool) -> None:
        """Take over what was frozen or thawed, if something was. Raises: ValueError if nothing is left to train."""
        if changed:
            self.refit()
        if not self._names:
            raise ValueError("no parameter of the model requires a gradient: all are frozen, so there is none to train")

    def _job(self, loss_fn: LossFn, loss_weight_fn: LossWeightFn, normalize: Normalize | str, step: int) -> BatchCall:
        """This rank's report of a step and its arguments before the first forward."""

        def check() -> None:
            Normalize.parse(normalize)
            check_step(step)
            check_loss(loss_fn, loss_weight_fn)

        number = step if isinstance(step, int) and 0 < step <= LAST_STEP else 0
        asked = BatchReport(stop=self.stop_requested, refit=self._trained.changed, step=number)
        return BatchCall(f"train_batch(normalize={str(normalize)!r})", check, loss_fn is token_cross_entropy, asked)

    def _loss_factors(self, agreed: AgreedSplit, loss_weight_fn: LossWeightFn, normalize: Normalize) -> Sequence[float]:
        """The factor on the loss of each of this rank's microbatches; none where no labels are seen."""
        num_cp = self.pipeline.layout.cp
        if normalize is not Normalize.MICROBATCH_MEAN or num_cp == 1:
            return loss_factors(normalize, agreed.weights, agreed.rank_totals)
        # Here each context-parallel rank counts as a rank, with the mean of its part of every microbatch.
        shard = self.pipeline.context.shard
        own = [float(loss_weight_fn(shard(m)[0])) for m in agreed.microbatches if agreed.weights]
        return loss_factors(normalize, own, [total for total in agreed.rank_totals for _ in range(num_cp)])

    def feeds(self, agreed: AgreedSplit, loss_fn: LossFn, factors: Sequence[float]) -> list[Feed]:
        """The microbatches with their losses, each times its factor; `factors` is empty where no labels are seen."""

        def finish(factor: float, output: Any, microbatch: PackedBatch) -> Tensor:
            return checked_loss(loss_fn(output, microbatch)) * factor

        feeds = [
            self.pipeline.feed(microbatch, partial(finish, factors[i] if factors else 0.0), training_number=i)
            for i, microbatch in enumerate(agreed.microbatches)
        ]
        return self.aux_losses.attached_to(feeds, agreed, factors)

    def run(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Run the program: every forward, backward, transfer and reduction; returns the losses on the last stage."""
        self.zero_gradients()
        self.pipeline.set_training(True)
        with kept_random_state(self.pipeline.device):
            return self.pipeline.executor(len(feeds), self.start_reduction).run(feeds)

    def zero_gradients(self) -> None:
        for buckets in self.gradients.values():
            buckets.zero_()

    def _undo(self) -> None:
        """Forget reductions that were under way, and put back what the optimizer has moved."""
        for buckets in self.gradients.values():
            buckets.forget()
        if self._put_back is not None:
            self._put_back()
        self._put_back = None

    def _gather_weights(self) -> None:
        """Gather the weights that other ranks have stepped, since messages of the last step were cut too."""
        for buckets in self.gradients.values():
            buckets.gather()

    def start_reduction(self, stage: int) -> None:
        """Start summing the gradients of a local stage over ranks."""
        self.gradients[stage].launch()

    def finish(
        self, feeds: Sequence[Feed], loss_scale: float, number: int, rates: Sequence[Values]
    ) -> tuple[Update, AuxLossReport]:
        """The optimizer's step, and what follows from it."""
        record = self.pipeline.recorder.begin(Action(Op.STEP))
        update = self._move_weights(number, rates)
        with self.pipeline.recovery.alone(stepping=True):
            aux_losses = self._spread(feeds, loss_scale, update.success)
        self.pipeline.recorder.end(record)
        return update, aux_losses

    def _move_weights(self, number: int, rates: Sequence[Values]) -> Update:
        """Finish the gradients, clip them and step the weights."""
        pipeline, optimizer, recovery = self.pipeline, self.optimizer, self.pipeline.recovery
        with recovery.alone(), pipeline.recorder.collective("finish the gradients"):
            self._finish_gradients()
            share_buffers(pipeline.buffers().values(), pipeline.grid.dp_cp_group)
            norm = optimizer.gradient_norm()
        if not optimizer.is_own:
            with recovery.alone(stepping=True):
                return optimizer.update(norm, number, rates)
        # The copy takes memory while no activation does.
        with recovery.alone():
            self._put_back = optimizer.snapshot()
            update = optimizer.update(norm, number, rates)
            # Nobody drops the copy before all have stepped.
            with pipeline.recorder.collective("finish the optimizer's step"):
                gather_json(None, pipeline.grid.control)
        self._put_back = None
        return update

    def _spread(self, feeds: Sequence[Feed], loss_scale: float, success: bool) -> AuxLossReport:
        """Gather the weights that other ranks have stepped; the casts of weights are made anew."""
        pipeline = self.pipeline
        with pipeline.recorder.collective("gather the weights"):
            for buckets in self.gradients.values():
                buckets.gather()
            pipeline.casts.renew()
            return self.aux_losses.finish(feeds, loss_scale, learns=success)

    def _finish_gradients(self) -> None:
        """Wait for the reductions that the program started, then add up the copies of each tied parameter."""
        for buckets in self.gradients.values():
            buckets.wait()
        every = {name: view for buckets in self.gradients.values() for name, view in buckets.owned_gradients.items()}
        for ties in (self.pipeline.ties.copies, self.pipeline.ties.tied):
            sum_tied(ties, every, self.pipeline.grid.mirror_group)


def _make_buckets(pipeline: Pipeline, since: Mapping[str, int]) -> dict[int, GradientBuckets]:
    """Gradient buckets of this rank's stages, into which their parameters move; none where nothing is learned."""
    if not pipeline.options.learns:
        return {}
    reductions = dict(pipeline.sharding.reductions)
    for name in reductions.keys() & since.keys():
        # Parameters with another number of updates have buckets of their own.
        reductions[name] = replace(reductions[name], alone=f"{reductions[name].alone} {since[name]}")
    found = {
        number: GradientBuckets(
            stage.named_parameters(),
            pipeline.grid.dp_cp_group,
            reductions=reductions,
            observer=pipeline.recorder,
            group_of=pipeline.parameter_groups.number,
        )
        for number, stage in pipeline.stages.items()
    }

    def settle_all() -> None:
        for buckets in found.values():
            buckets.settle()

    for number, buckets in found.items():
        # The owner of a lent weight may lie in any stage of this rank.
        pipeline.stages[number].read_weights_after(settle_all if pipeline.loans else buckets.settle)
    return found


def _make_optimizer(pipeline: Pipeline, buckets: list[GradientBuckets]) -> Optimizer:
    options, grid = pipeline.options, pipeline.grid

    def make() -> Optimizer:
        return Optimizer(
            buckets,
            pipeline.parameter_groups,
            grid.control if options.optimizer.zero else grid.model_control,
            pipeline.ties.owners,
            LossScaler() if options.precision is Precision.FP16 else None,
            pipeline.sharding.norm_names,
        )

    return build_on_all_ranks(make, grid.control)
