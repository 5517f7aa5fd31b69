"""The engine's face for training: a batch in, one optimizer step."""

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.losses import LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.engine.state import ModelState
from penstock.engine.trainer import TrainResult
from penstock.settings import Normalize


class BatchTraining(ModelState):
    """Trains the model by one batch after another."""

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """One optimizer step; every rank calls it. Parameters are trained if they require a gradient now.

        Args:
            batch: this pipeline's part of the data, a `PackedBatch`; ranks of one pipeline give the same, data-parallel
                ranks each their own.
            loss_fn: from the last stage's output (logits [T, V] of T tokens over V words) and the microbatch to the sum
                of its losses, one number with its graph; or that and a dict of numbers to report, each a `Metric`.
            loss_weight_fn: from a microbatch to its weight in the divisor of the loss.
            micro_batches: the parts that the batch is split into, a `MicroBatchSpec`; left out, one.
            normalize: the divisor of the loss, a `Normalize` or its name.
            step: the step's absolute number, on which rates depend; left out, one more than that of the last step.

        Raises:
            ZeroLossWeight: the weights of all microbatches are 0. Like the next two, on all ranks alike, before
                anything is computed.
            PipelineError: ranks of one pipeline were given different batches, or the engine is closed.
            ValueError: the batch cannot be split or computed so, or the engine was made with learns=False.
            StepError: on all ranks, when one has failed; the step has been undone, and the next one can be taken. (A
                rank that is alone raises the exception itself.)
            TransportError: a peer did not send or receive in time.
        """
        taken = self.trainer.train_batch(batch, loss_fn, loss_weight_fn, micro_batches, normalize, step)
        return self.stepped(taken)
