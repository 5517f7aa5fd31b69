"""The engine's face for scoring: batches in, their loss or what hooks make of the model's outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.loss_metrics import EvaluationLoss
from penstock.engine.losses import LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.engine.scorer import AggregateFn, Outputs, PostHook, Scorer
from penstock.engine.state import ModelState


class BatchScoring(ModelState):
    """Scores batches with the weights as they are; nothing is learned."""

    #: runs forwards alone
    scorer: Scorer

    def evaluate(
        self,
        batches: Iterable[PackedBatch],
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
    ) -> EvaluationLoss:
        """The loss per unit of weight over all ranks' batches, the same on every rank; nothing is learned.

        The result is a float, whose `metrics` are the numbers that the loss function reported. The arguments are those
        of `Engine.train_batch`, with several batches. Ranks of one pipeline give the same ones; data-parallel ranks may
        have unequal numbers of them, except where they share experts (ep > 1).

        Raises: as `Engine.forward`.
        """
        return self.evaluated(self.scorer.evaluate(batches, loss_fn, loss_weight_fn, micro_batches))

    def forward(
        self,
        batch: PackedBatch,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
        micro_batches: MicroBatchSpec | None = None,
        output_seqlens: Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> Any:
        """The model's outputs, or what hooks make of them, in the batch's order; every rank calls it.

        The rank of the last stage gets the result, the others None, unless `broadcast` is true.

        Args:
            batch: this pipeline's part of the data; ranks of one pipeline give the same.
            post_hook: called on the last stage with each microbatch's logits [T, V] and the microbatch; its result is
                kept, and the logits are freed unless it keeps them. None keeps all logits. Where ranks share sequences
                (cp), each of them gets whole logits, unless the hook is a `PerToken`.
            aggregate_fn: from one result per item, in the order of the batch (one per microbatch where they cannot be
                taken apart), to what is returned; None joins them.
            micro_batches: the parts that the batch is split into, a `MicroBatchSpec`; left out, one.
            output_seqlens: rows of each item in the results, where these are neither one per token, nor per sequence,
                nor per item.
            broadcast: True if all ranks of the pipeline get the result.

        Raises:
            PipelineError: ranks of one pipeline were given different batches. Like the next, on all ranks alike, before
                anything is computed.
            ValueError: the batch cannot be split or computed so. Also for results that do not fit its items, on the
                rank of the last stage, with a `PipelineError` on the others.
            StepError: on all ranks, when a hook or anything else has failed on one; the engine can be used further.
            TransportError: a peer did not send or receive in time.
        """
        return self.scorer.forward(batch, micro_batches, Outputs(post_hook, aggregate_fn, output_seqlens, broadcast))
