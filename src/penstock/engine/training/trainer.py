"""Training: one optimizer step, with gradient accumulation over the microbatches of a batch, and the state it changes.

Each thing that happens once per batch is a line of `Trainer.train_batch`, or of a method that stands below it in order;
each thing that happens once per microbatch is an action of the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.optimizer.optimizer import Optimizer, Update
from penstock.engine.optimizer.steppers import Values
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.aux_losses import AuxLossReport, AuxLossTracker, AuxNotes
from penstock.engine.training.loss import (
    BoundLoss,
    LossFn,
    LossWeightFn,
    StepLoss,
    scalar_loss,
    sum_of,
)
from penstock.engine.training.metrics import reduce_metrics
from penstock.engine.training.microbatches import (
    BatchReport,
    MicrobatchSource,
    agree_on_microbatches,
    source_of,
)
from penstock.engine.training.trained import TrainedParameters
from penstock.model import Numbers
from penstock.parallel import GradientBuckets, share_buffers, sum_tied
from penstock.parallel.host import meet
from penstock.runtime import Feed, PipelineError
from penstock.schedule import Action, Op, Program
from penstock.settings import Normalize

_NONE_TRAINED = "no parameter of the model requires a gradient: all are frozen, so there is none to train"
# A checkpoint has it in 64 bits.
_LAST = 2**63 - 1


@dataclass(frozen=True)
class TrainResult:
    """The outcome of one step, the same on every rank but for `idle_share`, `step_time_s` and `outputs`.

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
    #: fraction of that time in which this rank waited; on a GPU, of its time up to the optimizer's step
    idle_share: float
    #: True if some rank was asked to end after this step
    stop_requested: bool
    #: auxiliary losses, and the experts' load
    aux_losses: AuxLossReport = AuxLossReport()
    #: numbers that the loss function reported, over all microbatches and ranks
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: what else it gave beside each loss, by microbatch, on ranks of the last stage; see `Engine.share_outputs`
    outputs: Sequence[Any] = field(default=(), compare=False, repr=False)


class Trainer:
    """Takes optimizer steps on a pipeline's weights.

    Every process of the layout constructs it at the same point and calls its methods in the same order. With
    `learns=False` there are no gradients, and no step can be taken.
    """

    #: stages, transport and recorder
    pipeline: Pipeline
    #: what requires a gradient, with its gradients and its optimizer
    trained: TrainedParameters
    #: losses that units add in the middle of the model, and the routers that learn from the experts' load; None where
    #: no unit of the model, on any rank, has either
    aux_losses: AuxLossTracker | None
    #: True if this rank was asked to end after the next step
    stop_requested: bool
    #: the loss function of the last step, which the next one mostly has too
    _bound: BoundLoss | None
    #: undoes the optimizer's step, while some rank may still fail in it
    _put_back: Callable[[], None] | None

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.stop_requested, self._bound, self._put_back = pipeline, False, None, None
        self.trained = TrainedParameters(pipeline)
        has_aux_losses = any(unit.has_aux_losses for unit in pipeline.units)
        self.aux_losses = AuxLossTracker(pipeline) if has_aux_losses else None
        pipeline.recovery.around_renewal(undo=self._undo, redo=self._gather_weights)

    @property
    def buckets(self) -> Mapping[int, GradientBuckets]:
        """Local stage -> its flat gradients."""
        return self.trained.buckets

    @property
    def optimizer(self) -> Optimizer:
        """Steps what is trained."""
        return self.trained.optimizer

    def train_batch(
        self,
        batch: PackedBatch | Iterable[PackedBatch] | None,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str | float = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """Take one optimizer step on the batch; see `Engine.train_batch`."""
        pipeline, recovery, start = self.pipeline, self.pipeline.recovery, time.perf_counter()
        step = pipeline.step + 1 if step is None else step
        call = f"train_batch(step={step!r}, normalize={str(normalize)!r})"
        # Within `joined` any rank's failure ends the step on all. Within `announcing` a failure is this rank's alone,
        # and the others have to hear of it; outside of it all ranks fail alike. A call from within a loss ends at
        # `joined`, which leaves the running step's loss and record as they are.
        with recovery.joined():
            loss_scale, bound = self.optimizer.loss_scale, self._bind(loss_fn, loss_weight_fn, normalize)
            source, step_loss = partial(self._source, batch, micro_batches, bound, step), StepLoss(bound)
            required = [parameter.requires_grad for parameter in self.trained.parameters.values()]
            report = BatchReport(stop=self.stop_requested, rebuild=required != self.trained.required)
            pipeline.recorder.begin_step(step)
            with agree_on_microbatches(pipeline, call, source, report) as microbatches:
                self._follow_freezing(microbatches.reports)
                pipeline.has_callbacks_anywhere = any(report.has_callbacks for report in microbatches.reports)
                with recovery.announcing():
                    executor = pipeline.executor(microbatches.num, self.start_reduction)
                    feeds = self.feeds(microbatches, step_loss, loss_scale, step, executor.program)
                    self.prepare()
                    losses = pipeline.run(executor, feeds)
                    rates = self.optimizer.rates.at(step)
                record = pipeline.recorder.begin(Action(Op.STEP))
                norm, rank_loss, aux_notes = self.finish_gradients(losses, feeds)
                with recovery.announcing():
                    # Each rank gives its part when it is through its program: so now none can fail in it any more.
                    loss, num_metrics = step_loss.total(pipeline, rank_loss)
                    microbatches.add_up_drawn()
                # What is wrong with them every rank raises alike, so nobody announces it.
                metrics = reduce_metrics(pipeline, step_loss.metrics) if num_metrics else {}
                update, aux_losses = self.step_weights(norm, aux_notes, loss_scale, step, rates)
                pipeline.recorder.end(record)
        pipeline.step = step
        step_time_s = time.perf_counter() - start
        return TrainResult(
            step=step,
            loss=loss / loss_scale,
            num_tokens=microbatches.num_tokens,
            num_microbatches=microbatches.num,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            loss_scale=loss_scale,
            success=update.success,
            step_time_s=step_time_s,
            idle_share=pipeline.recorder.idle_share(step_time_s),
            stop_requested=any(report.stop for report in microbatches.reports),
            aux_losses=aux_losses,
            metrics=metrics,
            outputs=step_loss.outputs(),
        )

    # ---- the parts of a step, in order

    def _bind(self, loss_fn: LossFn, loss_weight_fn: LossWeightFn, normalize: Normalize | str | float) -> BoundLoss:
        """The loss of the last step where it is the same one, so that it is read once; else a new one."""
        last = self._bound
        if not (
            last is not None
            and last.loss_fn is loss_fn
            and last.loss_weight_fn is loss_weight_fn
            and last.normalize is normalize
        ):
            self._bound = last = BoundLoss(loss_fn, loss_weight_fn, normalize)
        return last

    def _source(self, batch: Any, micro_batches: MicroBatchSpec | None, loss: BoundLoss, step: Any) -> MicrobatchSource:
        """The source of a step's microbatches. Raises: ValueError for what no step can be taken with."""
        if not self.pipeline.options.learns:
            raise ValueError("this engine was made with learns=False, to score and generate; make one that learns")
        source = source_of(self.pipeline, batch, micro_batches, loss)
        if not (isinstance(step, int) and not isinstance(step, bool) and 1 <= step <= _LAST):
            raise ValueError(f"step = {step!r} is not the number of a step; steps are counted from 1 to {_LAST}")
        divisor = loss.divisor
        by_parts = divisor is Normalize.MICROBATCH_MEAN and self.pipeline.context is not None
        needs_counts = divisor in (Normalize.GLOBAL, Normalize.DP) or by_parts or self.aux_losses is not None
        if needs_counts and not source.knows_counts:
            what = "the model's auxiliary losses need" if self.aux_losses else f"normalize = {str(divisor)!r} needs"
            raise ValueError(
                f"{what} the counts of all microbatches before the first backward, which an iterator does not tell; "
                "give the divisor itself, as in normalize=4096.0, or normalize='token_per_microbatch', or a list of "
                "microbatches"
            )
        return source

    def _follow_freezing(self, reports: Sequence[BatchReport]) -> None:
        """Train what requires a gradient now. Raises: ValueError if nothing does; see `TrainedParameters`."""
        if any(report.rebuild for report in reports):
            self.trained.rebuild()
        if not self.trained.names:
            raise ValueError(_NONE_TRAINED)

    def feeds(
        self, microbatches: MicrobatchSource, step_loss: StepLoss, loss_scale: float, step: int, program: Program
    ) -> Iterable[Feed]:
        """The microbatches with their losses, each times its factor; those that are drawn come as they are needed.

        `Stage` calls a feed's `result_fn` with the last layer's output, and that calls `scaled_loss` here.
        """
        is_first = step == 1 and self.pipeline.grid.is_first_of_stages
        loss_of = step_loss.with_warning if is_first else step_loss

        def scaled_loss(output: Any, microbatch: PackedBatch, numbers: Numbers) -> Tensor:
            loss = scalar_loss(loss_of(output, microbatch, numbers))
            return loss * (microbatches.factor(numbers.microbatch) * loss_scale)

        labelled = step_loss.bound.reads_labelled_rows
        feed = partial(self.pipeline.feed, output_fn=scaled_loss, training=True, labelled=labelled)
        feeds = microbatches.feeds(feed, step, program)
        return feeds if self.aux_losses is None else self.aux_losses.attached_to(feeds, microbatches, loss_scale)

    def prepare(self) -> None:
        """Zero the gradients, and put the units into training mode.

        Raises: PipelineError naming a tied parameter that has parted from its original beside it.
        """
        parameters = self.trained.parameters
        for copy, original in self.pipeline.model.loans.items():
            if parameters[copy].untyped_storage()._cdata != parameters[original].untyped_storage()._cdata:
                raise PipelineError(
                    f"{copy} is tied to {original}, but one of them was given other memory, so that they are no longer "
                    "one; write into it in place, as with p.data.copy_(...)"
                )
        for buckets in self.buckets.values():
            buckets.zero_()
        self.pipeline.model.set_training(True)

    def start_reduction(self, stage: int) -> None:
        """Start summing the gradients of a local stage over ranks, without waiting; an action of the program."""
        self.buckets[stage].launch()

    def finish_gradients(self, losses: Sequence[Tensor], feeds: Iterable[Feed]) -> tuple[float, float, AuxNotes | None]:
        """Wait for the reductions that the program started, and add up tied gradients.

        With their norm goes all else that the host needs to know of the step, so that it waits for the device once.
        Returns the norm of all gradients, the sum of this rank's losses, and the notes of its units.
        """
        pipeline, notes, rank_losses = self.pipeline, None, sum_of(losses)
        with pipeline.recovery.announcing():
            if self.aux_losses is not None:
                notes = self.aux_losses.noted(feeds)
            with pipeline.recorder.collective("finish the gradients"):
                gradients: dict[str, Tensor] = {}
                for buckets in self.buckets.values():
                    buckets.wait()
                    gradients |= buckets.owned_gradients
                for ties in (pipeline.model.ties.copies, pipeline.model.ties.tied):
                    sum_tied(ties, gradients, pipeline.grid.mirror_group)
                if pipeline.grid.dp_cp_group is not None:
                    share_buffers(pipeline.model.buffers().values(), pipeline.grid.dp_cp_group)
                also_read = [*rank_losses, *(notes.tensors if notes is not None else ())]
                norm, numbers = self.optimizer.take_edits_and_norm(also_read)
        # After an abort NCCL raises nothing and leaves anything as a gradient. The norm has waited for the device.
        pipeline.recovery.alarm.check()
        num_losses = len(rank_losses)
        notes = replace(notes, numbers=numbers[num_losses:]) if notes is not None else None
        return norm, sum(numbers[:num_losses]), notes

    def step_weights(
        self, norm: float, aux_notes: AuxNotes | None, loss_scale: float, step: int, rates: Sequence[Values]
    ) -> tuple[Update, AuxLossReport]:
        """The optimizer's step, and what follows from it: weights that other ranks have stepped, new casts, routers."""
        pipeline, aux_losses = self.pipeline, AuxLossReport()
        update = self._update(norm, step, rates)
        with pipeline.recovery.announcing(stepping=True):
            with pipeline.recorder.collective("gather the weights"):
                self._gather_weights()
            pipeline.model.casts.renew()
            if self.aux_losses is not None and aux_notes is not None:
                aux_losses = self.aux_losses.report(aux_notes, loss_scale, learns=update.success)
        return update, aux_losses

    def _update(self, norm: float, step: int, rates: Sequence[Values]) -> Update:
        """Clip the gradients and step the weights; a step that may fail is undone on all ranks if it fails on one."""
        pipeline, optimizer = self.pipeline, self.optimizer
        if not optimizer.may_fail:
            with pipeline.recovery.announcing(stepping=True):
                return optimizer.update(norm, step, rates)
        # The copy takes memory while no activation does.
        with pipeline.recovery.announcing():
            self._put_back = optimizer.snapshot()
            update = optimizer.update(norm, step, rates)
            # Nobody drops the copy before all have stepped.
            with pipeline.recorder.collective("finish the optimizer's step"):
                meet(pipeline.grid.control)
        self._put_back = None
        return update

    def _gather_weights(self) -> None:
        """Gather the weights that other ranks have stepped."""
        for buckets in self.buckets.values():
            buckets.gather()

    # ---- what recovery calls between steps, beside `_gather_weights`: messages of the last step were cut too

    def _undo(self) -> None:
        for buckets in self.buckets.values():
            buckets.forget()
        if self._put_back is not None:
            self._put_back()
        self._put_back = None
