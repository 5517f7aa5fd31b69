"""Auxiliary losses (routers, multi-token prediction) and the experts' load, gathered from the units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.pipeline import Pipeline
from penstock.engine.sharding import SECOND_COPY
from penstock.engine.training.microbatches import MicrobatchSource
from penstock.model import AuxLoss, AuxLosses
from penstock.model.layers.router import Balance
from penstock.parallel import sum_tied
from penstock.runtime import Feed


@dataclass(frozen=True)
class AuxLossReport:
    """Auxiliary losses of one step and the experts' load, the same on every rank."""

    #: kind of loss -> its part of the step's loss, normalised and weighted as it was learned from
    losses: Mapping[str, float] = field(default_factory=dict)
    #: tokens of the busiest expert of any layer over the mean of its layer; None without experts
    busiest_expert: float | None = None

    def metrics(self) -> dict[str, float]:
        """Name -> value, for a run's metrics."""
        metrics = {f"{name}_loss": value for name, value in self.losses.items()}
        return metrics if self.busiest_expert is None else metrics | {"busiest_expert": self.busiest_expert}


@dataclass(frozen=True, eq=False)
class AuxNotes:
    """The notes of a step's units, on the device, and their numbers once these are read."""

    #: each auxiliary loss's kind, and its value
    kinds: Sequence[AuxLoss]
    values: Sequence[Tensor]
    #: router -> tokens of each expert, of all ranks
    loads: Mapping[str, Tensor]
    #: those of `tensors`
    numbers: Sequence[float] = ()

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The highest load of an expert over the mean of its layer, for each layer, and the values of losses."""
        return [*(load.max() * len(load) / load.sum() for load in self.loads.values()), *self.values]


class AuxLossTracker:
    """The auxiliary losses of a model's units, and the routers that learn once a step from the experts' load.

    These losses arise in the middle of a pipeline, where no rank sees labels. So the factor of each microbatch's main
    loss is sent to all ranks of the pipeline before the first forward, and is passed along with the microbatch.
    Loads are summed over all microbatches and over all ranks that saw other tokens, copies of a bidirectional model
    included, so that every rank moves its routers alike.
    """

    #: stages, grid and recorder
    pipeline: Pipeline
    #: full name of a router on this rank -> the part of it that learns from the load
    _routers: dict[str, Balance]

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._routers = {
            f"{unit}.{name}{stage.suffix}": part
            for stage in pipeline.model.stages.values()
            for unit, module in stage.units
            for name, part in module.named_modules()
            if isinstance(part, Balance)
        }

    def attached_to(self, feeds: Iterable[Feed], microbatches: MicrobatchSource, loss_scale: float) -> list[Feed]:
        """The feeds, each with the factor of its microbatch's loss; all ranks call this at one point.

        A coefficient of a router's loss weighs the mean over tokens, labelled or not: a microbatch without labels
        counts as its tokens would in any other, unless the main loss is divided microbatch by microbatch. So under
        `Normalize.GLOBAL` no loss depends on how the batch is split. (The balance loss of a microbatch compares that
        microbatch's own load, so its value does, though not its weight.)
        """
        factors = self._send_factors([microbatches.factor(number) * loss_scale for number in range(microbatches.num)])
        weight_per_token = sum(microbatches.rank_totals) / microbatches.num_tokens
        attached = []
        for feed, factor in zip(feeds, factors, strict=True):
            aux_losses = AuxLosses(factor, factor * weight_per_token)
            attached.append(replace(feed, sequences=feed.sequences.with_aux_losses(aux_losses)))
        return attached

    def noted(self, feeds: Iterable[Feed]) -> AuxNotes:
        """Gather what the units noted of a step. All ranks call it."""
        aux_losses = [feed.sequences.aux_losses for feed in feeds if feed.sequences.aux_losses is not None]
        notes = [(kind, value) for t in aux_losses for (_, kind), value in t.values.items()]
        return AuxNotes([kind for kind, _ in notes], [value for _, value in notes], self._loads(aux_losses))

    def report(self, notes: AuxNotes, loss_scale: float, learns: bool) -> AuxLossReport:
        """Sum up the notes of all ranks, which all call it; with `learns` the routers learn from them."""
        if learns:
            for name, router in self._routers.items():
                router.update(notes.loads[name])
        num_loads = len(notes.loads)
        # Of all ranks; 0 without experts.
        busiest = torch.tensor(max(notes.numbers[:num_loads], default=0.0), dtype=torch.float64)
        if self.pipeline.grid.control is not None:
            dist.all_reduce(busiest, op=dist.ReduceOp.MAX, group=self.pipeline.grid.control)
        values = list(zip(notes.kinds, notes.numbers[num_loads:], strict=True))
        rank_sums = [sum(number for kind, number in values if kind is wanted) for wanted in AuxLoss]
        sums = self.pipeline.sum_over_ranks("add up the auxiliary losses", *rank_sums)
        losses = {kind.value: value / loss_scale for kind, value in zip(AuxLoss, sums, strict=True) if value}
        return AuxLossReport(losses, float(busiest) or None)

    def _send_factors(self, factors: Sequence[float]) -> list[float]:
        """The factors of all microbatches, from the rank that sees labels to all ranks of its pipeline."""
        pipeline = self.pipeline
        if pipeline.grid.pp_control is None:
            return list(factors)
        sent = torch.tensor(factors, dtype=torch.float64)
        with pipeline.recorder.collective("send the loss's factors", pipeline.grid.pp_control):
            dist.broadcast(sent, group=pipeline.grid.pp_control, group_src=pipeline.placement.output_rank)
        return sent.tolist()

    def _loads(self, aux_losses: Sequence[AuxLosses]) -> dict[str, Tensor]:
        """Tokens of each expert [E] int64 by router, of the whole step; all ranks call it at the same point."""
        pipeline = self.pipeline
        loads = {
            name: sum(
                (t.counts[router] for t in aux_losses if router in t.counts), start=router.no_counts(pipeline.device)
            )
            for name, router in self._routers.items()
        }
        if loads:
            flat = torch.cat(list(loads.values()))
            for group in (pipeline.grid.dp_cp_group, pipeline.grid.tp_group):
                if group is not None:
                    dist.all_reduce(flat, group=group)
            loads = dict(zip(loads, flat.split([len(load) for load in loads.values()]), strict=True))
        if pipeline.placement.num_routes > 1:
            copies = {name: name.removesuffix(SECOND_COPY) for name in loads if name.endswith(SECOND_COPY)}
            copies |= {f"{name}{SECOND_COPY}": name for name in loads if not name.endswith(SECOND_COPY)}
            sum_tied(copies, loads, pipeline.grid.mirror_group)
        return loads
