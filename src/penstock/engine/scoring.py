"""Scoring: forwards alone, and what is made of each microbatch's logits, back in the order of the batch.

Shapes: T tokens of a microbatch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.data import MicroBatchSpec, PackedBatch, Split, check_lengths, merge, take_apart
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.loss import (
    BoundLoss,
    EvaluationLoss,
    LossFn,
    LossWeightFn,
    StepLoss,
    check_total,
    labelled_rows,
    reads_labelled_rows,
    sum_of,
)
from penstock.engine.training.metrics import reduce_metrics
from penstock.engine.training.microbatches import (
    END,
    MicrobatchSource,
    agree_on_microbatches,
    is_iterator,
    source_of,
)
from penstock.model import (
    Logits,
    Numbers,
    check_callable,
    numbers_asked,
    token_log_probs,
    token_statistics,
    whole_logits,
)
from penstock.parallel.host import broadcast_value, check_portable, on_all_ranks
from penstock.parallel.staging import read_numbers
from penstock.runtime import Feed, PipelineError
from penstock.settings import Layout
from penstock.settings.declare import check_argument, checked, type_in_words

PostHook = Callable[..., Any]
"""A function of logits (a Tensor, or `ShardedLogits` where ranks share the vocabulary) and their microbatch.

It may ask for `penstock.model.Numbers` by name.
"""

AggregateFn = Callable[[list[Any]], Any]


def forward(
    pipeline: Pipeline,
    batch: PackedBatch | Iterable[PackedBatch] | None,
    micro_batches: MicroBatchSpec | None,
    collector: OutputCollector,
) -> Any:
    """Run the batch through the model; see `Engine.forward`."""
    pipeline.model.set_training(False)
    hook = collector.post_hook

    def source() -> MicrobatchSource:
        reads_labels = isinstance(hook, PerToken) and hook.reads_labels
        made = source_of(pipeline, batch, micro_batches, reads_labels=reads_labels)
        collector.check(batch)
        return made

    with pipeline.recovery.joined(), pipeline.model.casts.kept():
        pipeline.recorder.begin_step(pipeline.step)
        call = f"forward(broadcast={collector.broadcast})"
        with agree_on_microbatches(pipeline, call, source) as microbatches:
            with pipeline.recovery.announcing():
                _run_forwards(pipeline, microbatches, partial(collector.feed, pipeline))
            return collector.handed_out(pipeline, microbatches.split)


def _run_forwards(
    pipeline: Pipeline, microbatches: MicrobatchSource, feed: Callable[[PackedBatch, Numbers], Feed]
) -> list[Tensor]:
    """Run the program of forwards; a rank without microbatches has none. Returns the last stage's results."""
    results: list[Tensor] = []
    if microbatches.num:
        executor = pipeline.executor(microbatches.num, reduce=None)
        results = pipeline.run(executor, microbatches.feeds(feed, pipeline.step, executor.program))
    microbatches.add_up_drawn()
    return results


def evaluate(
    pipeline: Pipeline,
    batches: PackedBatch | Iterable[PackedBatch | Iterable[PackedBatch]],
    loss_fn: LossFn,
    loss_weight_fn: LossWeightFn,
    micro_batches: MicroBatchSpec | None = None,
) -> EvaluationLoss:
    """Run forwards alone, and add up their losses; see `Engine.evaluate`."""
    loss, weight, num_rounds, num_metrics = 0.0, 0.0, 0, 0
    step_loss, outputs = StepLoss(BoundLoss(loss_fn, loss_weight_fn)), list[Any]()
    recovery, num_dp = pipeline.recovery, pipeline.layout.dp
    batches = [batches] if isinstance(batches, PackedBatch) else batches
    are_batches = isinstance(batches, Iterable) and not isinstance(batches, str | bytes | Mapping)
    # Anything else is refused on all ranks alike, as if there were no batch.
    remaining = iter(batches if are_batches else ())
    feed = partial(pipeline.feed, output_fn=step_loss, labelled=reads_labelled_rows(loss_fn))
    pipeline.model.set_training(False)

    def source_from(batch: Any) -> MicrobatchSource:
        if not are_batches:
            raise ValueError(f"batches={batches!r} is {type_in_words(batches)}; give a PackedBatch or a list of such")
        return source_of(pipeline, batch, micro_batches, step_loss.bound)

    with pipeline.model.casts.kept():
        while True:
            with recovery.joined():
                with recovery.announcing():
                    batch = next(remaining, END)
                with agree_on_microbatches(pipeline, "evaluate()", partial(source_from, batch)) as microbatches:
                    pipeline.has_callbacks_anywhere = any(report.has_callbacks for report in microbatches.reports)
                    ended = [dp for dp, rank in enumerate(pipeline.output_ranks) if microbatches.reports[rank].ended]
                    _check_ended(pipeline.layout, ended, num_rounds)
                    if len(ended) == num_dp:
                        break
                    num_rounds += 1
                    with recovery.announcing():
                        losses = _run_forwards(pipeline, microbatches, feed)
                        total, num_metrics = step_loss.total(pipeline, sum(read_numbers(sum_of(losses))))
                    outputs += step_loss.outputs()
                    loss += total
                    weight += sum(microbatches.rank_totals)
    metrics = reduce_metrics(pipeline, step_loss.metrics) if num_metrics else {}
    return EvaluationLoss(loss / check_total([weight], num_dp, "all batches"), metrics, tuple(outputs))


def share_outputs(pipeline: Pipeline, outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Give every rank of the pipeline what those of the last stage have; see `Engine.share_outputs`."""
    rank_outputs, all_outputs, placement = list(outputs), list[Any](), pipeline.placement
    with pipeline.recorder.collective("share outputs"):
        on_all_ranks(lambda: check_portable(rank_outputs), pipeline.grid.control, TypeError)
        # Each copy of a bidirectional model has computed its own microbatches, one half after the other.
        for source in placement.copies_of(placement.stages_per_route - 1):
            all_outputs += broadcast_value(rank_outputs, source, pipeline.grid.pp_control)
    return tuple(all_outputs)


def _check_ended(layout: Layout, ended: Sequence[int], num_rounds: int) -> None:
    """Refuse, on all ranks alike, an evaluation of nothing, and pipelines that share experts and compute alone."""
    if len(ended) == layout.dp and not num_rounds:
        raise ValueError(
            "batches is empty on every rank, so there is no loss; give at least one PackedBatch (a generator gives "
            "its batches once)"
        )
    if 0 < len(ended) < layout.dp and layout.ep > 1:
        raise ValueError(
            f"evaluate was given fewer batches on dp {', '.join(map(str, ended))} than on others, with which ep = "
            f"{layout.ep} shares experts; give all data-parallel ranks equally many"
        )


@checked
@dataclass(frozen=True)
class PerToken:
    """A hook whose result has a row for each token, made of that token's logits and keys alone.

    It gives a tensor [T, ...] or a mapping of such. Ranks that share every sequence (cp) each call it on their own part
    of a microbatch, and only its results are sent between them: whole logits exist nowhere.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> batch = PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
    >>> engine.forward(batch, PerToken(lambda logits, microbatch: logits.argmax(-1))).shape
    torch.Size([8])
    """

    hook: PostHook
    #: True if it reads the labels as token ids
    reads_labels: bool = False

    def __call__(self, logits: Logits, microbatch: PackedBatch, **numbers: int) -> Any:
        result = self.hook(logits, microbatch, **numbers)
        for rows in result.values() if isinstance(result, Mapping) else [result]:
            if not isinstance(rows, Tensor) or rows.shape[:1] != logits.shape[:1]:
                what = tuple(rows.shape) if isinstance(rows, Tensor) else type_in_words(rows)
                raise ValueError(
                    f"a hook per token gave {what} for {logits.shape[0]} tokens; a tensor with a row for each, or a "
                    "mapping of such, is possible"
                )
        return result


@checked
def token_scores(temperature: float = 1.0, entropies: bool = False) -> PostHook:
    """A hook that gives each token the log-probability of its label, the next token: {"log_probs": [T]} in fp32.

    Where the label is `NO_LABEL` it is 0. With `entropies` the entropies of the tokens' distributions are added.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> scores = engine.forward(PackedBatch.from_documents([torch.arange(5)]), token_scores(entropies=True))
    >>> sorted(scores), scores["log_probs"].shape
    (['entropies', 'log_probs'], torch.Size([5]))
    """

    def hook(logits_TV: Logits, microbatch: PackedBatch) -> dict[str, Tensor]:
        labels_T = microbatch["labels"].to(logits_TV.device)
        if entropies:
            return token_statistics(logits_TV, labels_T, temperature)._asdict()
        return {"log_probs": token_log_probs(logits_TV, labels_T, temperature)}

    # Tokens without a label have an entropy too.
    return PerToken(hook if entropies else labelled_rows(hook), reads_labels=True)


def by_key(change: Callable[[Tensor], Tensor], result: Any) -> Any:
    """The result of a hook per token with its rows changed, in a mapping those of each key."""
    if isinstance(result, Mapping):
        return {name: change(rows) for name, rows in result.items()}
    return change(result)


@dataclass(eq=False)
class OutputCollector:
    """Collects the results of one batch microbatch by microbatch, and gives them to the ranks that get them."""

    #: called on the last stage with each microbatch's logits [T, V] and the microbatch, right after its forward; its
    #: result is kept, and the logits are freed unless it keeps them. None keeps all logits. Where ranks share sequences
    #: (cp), each of them gets whole logits, unless the hook is `PerToken`
    post_hook: PostHook | None = None
    #: from one result per item, in the order of the batch (one per microbatch where they cannot be taken apart), to
    #: what is returned; None joins them as `merge` does
    aggregate_fn: AggregateFn | None = None
    #: rows of each item in the results, where these are neither one per token, nor per sequence, nor per item
    output_seqlens: Sequence[int] | None = None
    #: True if all ranks of the pipeline get the result, not its last stage's alone
    broadcast: bool = False
    #: one result per microbatch, on ranks that hold the last stage
    _results: list[Any] = field(default_factory=list, init=False)

    def check(self, batch: Any) -> None:
        """Refuse before anything is computed what cannot fit. Raises: `PartitionError`, ValueError."""
        check_callable("post_hook", self.post_hook, "logits, microbatch", optional=True)
        check_callable("aggregate_fn", self.aggregate_fn, "list of results", optional=True)
        check_argument("broadcast", self.broadcast, bool)
        check_argument("output_seqlens", self.output_seqlens, Sequence[int] | None)
        if self.output_seqlens is not None and not is_iterator(batch):
            parts = [batch] if isinstance(batch, PackedBatch) else batch
            check_lengths(self.output_seqlens, sum(part.num_items for part in parts))

    def feed(self, pipeline: Pipeline, microbatch: PackedBatch, numbers: Numbers) -> Feed:
        """The microbatch, whose result is kept; the executor carries on with an empty tensor in place of its logits."""
        context, hook = pipeline.context, self.post_hook
        names = numbers_asked(hook.hook if isinstance(hook, PerToken) else hook)

        def take(logits: Logits, part: PackedBatch, numbers: Numbers) -> Tensor:
            if context is not None and not isinstance(hook, PerToken):
                logits, part = context.whole_logits(logits, microbatch), whole
            asked = {name: getattr(numbers, name) for name in names}
            result = whole_logits(logits) if hook is None else hook(logits, part, **asked)
            self._results.append(by_key(sequences.whole, result) if isinstance(hook, PerToken) else result)
            return torch.empty(0, device=logits.device)

        whole = microbatch
        if context is not None and not isinstance(hook, PerToken):
            whole = context.whole_on(pipeline.device, microbatch)
        labelled = isinstance(hook, PerToken) and reads_labelled_rows(hook.hook)
        feed = pipeline.feed(microbatch, numbers, take, labelled=labelled)
        # Not the feed itself, which holds `take`: a circle would outlive the microbatch.
        sequences = feed.sequences
        return feed

    def handed_out(self, pipeline: Pipeline, split: Split) -> Any:
        """Gather the results, raise on all ranks if one has failed, and return this rank's."""
        value = on_all_ranks(
            lambda: self._value(pipeline, split),
            pipeline.grid.control,
            otherwise=PipelineError,
            message="rank {rank} cannot make use of its outputs: {kind}: {error}",
            within=pipeline.recorder.collective("hand out the results"),
        )
        if not self.broadcast:
            return value
        with pipeline.recorder.collective("hand out the results", pipeline.grid.pp_control):
            return broadcast_value(value, pipeline.placement.output_rank, pipeline.grid.pp_control)

    def _value(self, pipeline: Pipeline, split: Split) -> Any:
        """This rank's results as one value, in the order of the batch; None where it gives none."""
        if not pipeline.gives_results:
            return None
        context, results = pipeline.context, self._results
        if context is not None and isinstance(self.post_hook, PerToken):
            # Ranks that share every sequence have a part of each result.
            with pipeline.recorder.collective("put the results together", context.group):
                results = [
                    by_key(partial(context.whole, microbatch=microbatch), result)
                    for result, microbatch in zip(results, split.microbatches, strict=True)
                ]
        if self.aggregate_fn is None:
            value = merge(results, split, self.output_seqlens)
        else:
            pieces = take_apart(results, split, self.output_seqlens)
            value = self.aggregate_fn(list(results) if pieces is None else pieces)
        if self.broadcast:
            check_portable(value)
        return value
