"""The cost of each unit of a rank by itself: one microbatch's forward, and its backward, whole and in two parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.engine.build import recomputes
from penstock.engine.rehearsal.pipeline import RehearsedPipeline
from penstock.model import drain
from penstock.runtime import Feed, Stage
from penstock.runtime.tape import Tape
from penstock.schedule import Op
from penstock.schedule.rehearsal import ActionCost, MemoryKind, UnitCost


def unit_costs(pipeline: RehearsedPipeline, feed: Feed) -> tuple[UnitCost, ...]:
    """The costs of this rank's units for a microbatch, in the order of its stages; equal units are run once."""
    known: dict[Hashable, tuple[ActionCost, ...]] = {}
    found = []
    for number, stage in pipeline.stages.items():
        members = [pipeline.units[i] for i in pipeline.cut[number % len(pipeline.cut)]]
        for spec, (name, module) in zip(members, stage.units, strict=True):
            kind = _kind(spec.build), recomputes(name, pipeline.options), spec is pipeline.units[-1]
            if kind not in known:
                alone = Stage(
                    number,
                    [(name, module)],
                    stage.boundary,
                    stage.weight_gradients,
                    stage.autocast,
                    {name} if recomputes(name, pipeline.options) else (),
                )
                last, first = spec is pipeline.units[-1], spec is pipeline.units[0]
                run = _UnitRun(alone, pipeline, feed.finish if last else None, feed.tokens if first else None)
                known[kind] = run.costs(feed)
            num_bytes = sum(parameter.nbytes for parameter in module.parameters())
            found.append(UnitCost(name, number, num_bytes, known[kind]))
    return tuple(found)


def _kind(build: Callable[..., Any]) -> Hashable:
    """A key that two units share if they do the same: the function that makes them, with equal arguments."""
    if not isinstance(build, partial):
        return build
    arguments = (*build.args, *sorted(build.keywords.items()))
    return _kind(build.func), *(_kind(part) if callable(part) else part for part in arguments)


@dataclass(frozen=True, eq=False)
class _UnitRun:
    """One unit, as a stage of its own, with what it takes and gives at the model's ends."""

    stage: Stage
    pipeline: RehearsedPipeline
    finish: Callable[[Tensor], Tensor] | None
    tokens: Tensor | None

    def costs(self, feed: Feed) -> tuple[ActionCost, ...]:
        """The costs of F, of a whole backward B, and of its parts I and W."""
        boundary = self.stage.boundary
        with self.pipeline.traffic.apart():
            tape = Tape()
            forward = self._measured(Op.F, partial(self._forward, tape, feed))
            grad = None
            if self.finish is None:
                grad = torch.empty(boundary.shape(feed.num_tokens), dtype=boundary.dtype, device=self.pipeline.device)
            whole = self._measured(Op.B, partial(self._backward, tape, grad))
            tape = Tape()
            self._forward(tape, feed)
            inputs = self._measured(Op.I, partial(self._backward, tape, grad, split=True))
            weights = self._measured(Op.W, partial(self.stage.weight_backward, tape))
        return forward, whole, inputs, weights

    def _forward(self, tape: Tape, feed: Feed) -> None:
        x, boundary = self.tokens, self.stage.boundary
        if x is None:
            x = torch.empty(boundary.shape(feed.num_tokens), dtype=boundary.dtype, device=self.pipeline.device)
        drain(self.stage.forward(tape, x, feed.sequences, self.finish, feed.given))

    def _backward(self, tape: Tape, grad: Tensor | None, split: bool = False) -> None:
        drain(self.stage.backward(tape, grad, split))

    def _measured(self, op: Op, run: Callable[[], object]) -> ActionCost:
        """The cost of an act."""
        meter, traffic = self.pipeline.meter, self.pipeline.traffic
        traffic.restart()
        meter.restart()
        before = sum(meter.point("before").after.values())
        run()
        point = meter.point(op.name)
        return ActionCost(
            op,
            point.flops,
            point.read_bytes,
            point.written_bytes,
            point.after.get(MemoryKind.TAPE, 0),
            point.peak_bytes - before,
            traffic.collectives,
        )
