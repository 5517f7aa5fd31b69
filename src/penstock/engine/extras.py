"""What a step's loss has beside its main term, and how busy the experts were: told to units, and gathered from them.

Terms of routers and of multi-token prediction are made in the middle of a pipeline, where nobody sees labels. So the
factor of each microbatch's main loss is told to all ranks of the pipeline before the first forward, and from there on
travels with the microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import PackedBatch
from penstock.engine.build import SECOND_COPY
from penstock.model import Ahead, LossTerms, Term
from penstock.model.router import Balance
from penstock.parallel import sum_tied
from penstock.runtime import Feed, Stage

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.microbatches import Agreed


@dataclass(frozen=True)
class Extras:
    """Of one step, the same on every rank.

    losses: what each kind of term added to the loss, by name; normalised and weighted as it was learned from.
    busiest_expert: tokens of the busiest expert of any layer over the mean of its layer; None without experts.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    busiest_expert: float | None = None

    def metrics(self) -> dict[str, float]:
        """What there is to tell of a step, by name."""
        told = {f"{name}_loss": value for name, value in self.losses.items()}
        return told if self.busiest_expert is None else told | {"busiest_expert": self.busiest_expert}


class ExpertBalance:
    """The routers of this rank's stages, which learn once a step from the tokens that each of their experts got.

    Counts are summed over all microbatches and over all ranks that saw other tokens, copies of a bidirectional model
    included, so that every rank moves its routers alike.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._routers: dict[str, Balance] = {
            f"{unit}.{name}{stage.suffix}": part
            for stage in stages.values()
            for unit, module in stage.units
            for name, part in module.named_modules()
            if isinstance(part, Balance)
        }

    def counts(self, terms: Sequence[LossTerms], engine: Engine) -> dict[str, Tensor]:
        """Tokens of each expert [E] int64 by router, of the whole step; all ranks call it at the same point."""
        counts = {
            name: sum((t.counts[router] for t in terms if router in t.counts), start=router.no_counts(engine.device))
            for name, router in self._routers.items()
        }
        if counts:
            together = torch.cat(list(counts.values()))
            for group in (engine.grid.dp_cp_group, engine.grid.tp_group):
                if group is not None:
                    dist.all_reduce(together, group=group)
            counts = dict(zip(counts, together.split([len(c) for c in counts.values()]), strict=True))
        if engine.placement.num_routes > 1:
            copies = {name: name.removesuffix(SECOND_COPY) for name in counts if name.endswith(SECOND_COPY)}
            copies |= {f"{name}{SECOND_COPY}": name for name in counts if not name.endswith(SECOND_COPY)}
            sum_tied(copies, counts, engine.grid.mirror_group)
        return counts

    def update(self, counts: Mapping[str, Tensor]) -> None:
        """Let the routers learn from a step's counts."""
        for name, router in self._routers.items():
            router.update(counts[name])


def with_terms(engine: Engine, feeds: Sequence[Feed], agreed: Agreed, factors: Sequence[float]) -> list[Feed]:
    """The feeds, each with the factor of its microbatch's loss where the model has use for it.

    `factors` are known where labels are seen, and empty elsewhere; all ranks call this at one point.
    """
    if not any(unit.notes_terms for unit in engine.units):
        return list(feeds)
    told = torch.zeros(len(feeds), dtype=torch.float64)
    for i, (factor, weight) in enumerate(zip(factors, agreed.weights, strict=True)):
        # Without labels nothing is learned from a microbatch, whatever factor its empty sum may have.
        told[i] = factor if weight else 0.0
    if engine.grid.pp_control is not None:
        last = engine.placement.rank_of(engine.placement.stages_per_route - 1)
        with engine.recorder.collective("tell the loss's factors", engine.grid.pp_control):
            dist.broadcast(told, engine.grid.pp_ranks[last], group=engine.grid.pp_control)
    weight_per_token = sum(agreed.rank_totals) / agreed.num_tokens
    found = []
    for feed, factor, microbatch in zip(feeds, told.tolist(), agreed.microbatches, strict=True):
        terms = LossTerms(factor, factor * weight_per_token, _ahead(engine, microbatch))
        found.append(replace(feed, sequences=feed.sequences.learning(terms)))
    return found


def _ahead(engine: Engine, microbatch: PackedBatch) -> list[Ahead]:
    """What a head that predicts further tokens must know, of this rank's part of the microbatch."""
    distances = range(1, engine.units[-1].num_ahead + 1)
    if not engine.holds_last_stage or not distances:
        return []
    tokens, labels = (microbatch[key].to(engine.device) for key in ("tokens", "labels"))
    lengths = microbatch.sequence_lengths("tokens")
    found = [Ahead.of(tokens, labels, lengths, distance) for distance in distances]
    spread = engine.context.spread(microbatch)
    if spread is None:
        return found
    starts = accumulate(lengths[:-1], initial=0)
    rows = torch.cat(
        [
            torch.arange(start + piece.start, start + piece.stop)
            for start, pieces in zip(starts, spread.pieces[spread.rank], strict=True)
            for piece in pieces
        ]
    ).to(engine.device)
    return [ahead.rows(rows) for ahead in found]


def finish_extras(engine: Engine, feeds: Sequence[Feed], scale: float, learned: bool) -> Extras:
    """Gather what the units noted, under a loss scaled so; routers learn from it where the step itself did.

    All ranks call it at one point.
    """
    if not any(unit.notes_terms for unit in engine.units):
        return Extras()
    terms = [feed.sequences.terms for feed in feeds if feed.sequences.terms is not None]
    counts = engine.balance.counts(terms, engine)
    if learned:
        engine.balance.update(counts)
    busiest = max((float(c.max() * len(c) / c.sum()) for c in counts.values()), default=0.0)
    if engine.grid.control is not None:
        highest = torch.tensor(busiest, dtype=torch.float64)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=engine.grid.control)
        busiest = float(highest)
    notes = [note for t in terms for note in t.values.items()]
    own = [sum(float(value) for (_, kind), value in notes if kind is term) for term in Term]
    sums = engine.sum_over_ranks(*own)
    losses = {term.value: value / scale for term, value in zip(Term, sums, strict=True) if value}
    return Extras(losses, busiest or None)
