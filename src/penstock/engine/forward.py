"""Scoring: forwards alone, and what is made of each microbatch's logits, back in the order of the batch.

Shapes: T tokens of a microbatch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import MicroBatchSpec, PackedBatch, Split, check_lengths, merge, take_apart
from penstock.engine.microbatches import agree_on_microbatches
from penstock.model import Logits, token_log_probs, token_statistics, whole_logits
from penstock.parallel.broadcast import broadcast_value, check_portable
from penstock.parallel.exchange import gather_json
from penstock.runtime import Feed, PipelineError

if TYPE_CHECKING:
    from penstock.engine.engine import Engine

PostHook = Callable[[Any, PackedBatch], Any]
"""Of logits (`Logits`: a Tensor, unless ranks share the vocabulary) and their microbatch."""

AggregateFn = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class PerToken:
    """A hook whose result has a row for each token, made of that token's logits and keys alone.

    It gives a tensor [T, ...] or a mapping of such. Ranks that share every sequence (cp) each call it on their own part
    of a microbatch, and only what it gives travels between them: whole logits exist nowhere.
    """

    hook: PostHook

    def __call__(self, logits: Logits, microbatch: PackedBatch) -> Any:
        result = self.hook(logits, microbatch)
        for rows in result.values() if isinstance(result, Mapping) else [result]:
            if not isinstance(rows, Tensor) or rows.shape[:1] != logits.shape[:1]:
                given = tuple(rows.shape) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
                raise ValueError(
                    f"a hook per token gave {given} for {logits.shape[0]} tokens; a tensor with a row for each, or a "
                    "mapping of such, is possible"
                )
        return result


def token_scores(temperature: float = 1.0, entropies: bool = False) -> PostHook:
    """A hook that gives each token the log-probability of its label, the token after it: {"log_probs": [T]} in fp32.

    Where the label is `NO_LABEL` it is 0. With `entropies` those of the tokens' distributions are given beside them.
    """

    def hook(logits_TV: Logits, microbatch: PackedBatch) -> dict[str, Tensor]:
        labels_T = microbatch["labels"].to(logits_TV.device)
        if entropies:
            return token_statistics(logits_TV, labels_T, temperature)._asdict()
        return {"log_probs": token_log_probs(logits_TV, labels_T, temperature)}

    return PerToken(hook)


@dataclass(frozen=True)
class Outputs:
    """What is made of the logits, and who gets it.

    post_hook: called on the last stage with each microbatch's logits [T, V] and the microbatch, right after its
    forward; its result is kept in their place, and the logits are freed unless it keeps them. None keeps them all.
    Where ranks share sequences (cp), each of them is given whole logits for it, unless it is `PerToken`.
    aggregate_fn: from a list of one result per item, in the order of the batch (one per microbatch where they can not
    be taken apart), to what is returned; None joins them as `merge` does. output_seqlens: rows of each item in the
    results, where these are neither one per token, nor per sequence, nor per item. broadcast: whether all ranks of
    the pipeline get the result, not its last stage's alone.
    """

    post_hook: PostHook | None = None
    aggregate_fn: AggregateFn | None = None
    output_seqlens: Sequence[int] | None = None
    broadcast: bool = False

    def check(self, batch: PackedBatch) -> None:
        """Refuse before anything is computed what can not fit. Raises: `PartitionError`."""
        if self.output_seqlens is not None:
            check_lengths(self.output_seqlens, batch.num_items)

    def gathered(self, results: Sequence[Any], split: Split) -> Any:
        """The microbatches' results as one, in the order of the batch."""
        if self.aggregate_fn is None:
            return merge(results, split, self.output_seqlens)
        pieces = take_apart(results, split, self.output_seqlens)
        return self.aggregate_fn(list(results) if pieces is None else pieces)


def forward_batch(engine: Engine, batch: PackedBatch, micro_batches: MicroBatchSpec, outputs: Outputs) -> Any:
    """Run the batch through the model, nothing being learned; every rank of the grid calls it.

    Ranks of one pipeline give the same batch. The rank of the last stage gets the result, the others None, unless all
    are to have it.

    Raises:
        PipelineError, ValueError: the batches differ or can not be split; on all ranks alike, before any compute.
        Whatever a hook raises, or `PartitionError` for results that do not fit: on the rank of the last stage, and
        PipelineError on the others; the engine can be used further.
    """
    engine.recorder.begin_step(engine.step)
    agreed = agree_on_microbatches(engine, batch, micro_batches, check=lambda: outputs.check(batch))
    run = _Run(outputs)
    feeds = [run.feed(engine, microbatch) for microbatch in agreed.microbatches]
    engine.executor(len(feeds), training=False).run(feeds)
    return run.end(engine, agreed.split)


class _Run:
    """The results of one batch, gathered microbatch by microbatch."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self._results: list[Any] = []
        self._error: Exception | None = None

    @property
    def _per_token(self) -> bool:
        return isinstance(self.outputs.post_hook, PerToken)

    def feed(self, engine: Engine, microbatch: PackedBatch) -> Feed:
        if self._per_token:
            return engine.feed(microbatch, self._take)
        return engine.feed(
            microbatch, lambda logits, _: self._take(engine.context.whole_logits(logits, microbatch), microbatch)
        )

    def _take(self, logits: Logits, microbatch: PackedBatch) -> Tensor:
        """Keep what the hook makes of the logits; the executor carries on without it.

        An exception waits for the end of the batch, so that no other rank is left alone with its messages.
        """
        if self._error is None:
            try:
                hook = self.outputs.post_hook
                self._results.append(whole_logits(logits) if hook is None else hook(logits, microbatch))
            except Exception as error:
                self._error = error
        return torch.empty(0, device=logits.device)

    def end(self, engine: Engine, split: Split) -> Any:
        """Gather the results, tell all ranks whether all is well, and hand out what is theirs."""
        value = None
        try:
            if engine.gives_results and self._per_token:
                self._join(engine, split)
            if self._error is not None:
                raise self._error
            if engine.gives_results:
                value = self.outputs.gathered(self._results, split)
                if self.outputs.broadcast:
                    check_portable(value)
        except Exception as error:
            self._error = error
        told = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        with engine.recorder.collective("hand out the results"):
            failures = gather_json(told, engine.grid.control)
        if self._error is not None:
            raise self._error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise PipelineError(f"rank {rank} can not make use of its outputs: {failure}")
        if not self.outputs.broadcast:
            return value
        giver = engine.placement.rank_of(engine.placement.stages_per_route - 1)
        with engine.recorder.collective("hand out the results", engine.grid.pp_control):
            return broadcast_value(value, giver, engine.grid.pp_control)

    def _join(self, engine: Engine, split: Split) -> None:
        """Put together what ranks that share every sequence have made of their parts, if none of them has failed."""
        context = engine.context
        if context.group is None:
            return
        failed = torch.tensor(int(self._error is not None), device=context.device)
        with engine.recorder.collective("put the results together", context.group):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=context.group)
            if failed:
                raise self._error or PipelineError("a rank that shares the sequences can not make use of its outputs")
            self._results = [
                {name: context.whole(rows, microbatch) for name, rows in result.items()}
                if isinstance(result, Mapping)
                else context.whole(result, microbatch)
                for result, microbatch in zip(self._results, split.microbatches, strict=True)
            ]
