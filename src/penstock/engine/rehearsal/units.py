"""The cost of each unit alone: one microbatch's forward, and its backward, whole and in two parts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.engine.build import recomputes
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal.place import RehearsedPlace
from penstock.model import UnitSpec, drain
from penstock.model.attention.tiles import forget_masks
from penstock.runtime import Feed, Message, Stage, Tape
from penstock.schedule import Op
from penstock.schedule.rehearsal import ActionCost, UnitCost


@contextmanager
def without_values() -> Iterator[FakeTensorMode]:
    """Within this context tensors have no values, and cached masks are made anew."""
    forget_masks()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        forget_masks()


def rehearsed_costs(
    units: Sequence[UnitSpec],
    stages: Mapping[int, Stage],
    options: EngineOptions,
    feed: Feed,
    place: RehearsedPlace,
) -> tuple[UnitCost, ...]:
    """The costs of these stages' units for a microbatch, in order; equal units are run once."""
    costs_by_kind: dict[Hashable, tuple[ActionCost, ...]] = {}
    unit_costs, specs = [], {unit.name: unit for unit in units}
    for index, stage in stages.items():
        for name, module in stage.units:
            spec = specs[name]
            is_recomputed = recomputes(spec, options)
            kind = _kind(spec.build), is_recomputed, spec is units[-1]
            if kind not in costs_by_kind:
                unit_stage = Stage(
                    index,
                    [(name, module)],
                    stage.boundary,
                    stage.weight_gradients,
                    stage.autocast,
                    {name} if is_recomputed else (),
                )
                tokens = feed.tokens if spec is units[0] else None
                result_fn = feed.result_fn if spec is units[-1] else None
                costs_by_kind[kind] = _costs_alone(unit_stage, replace(feed, tokens=tokens, result_fn=result_fn), place)
            num_bytes = sum(parameter.nbytes for parameter in module.parameters())
            unit_costs.append(UnitCost(name, index, num_bytes, costs_by_kind[kind]))
    return tuple(unit_costs)


def _kind(build: Any) -> Hashable:
    """A key that equal units share: the function that makes them, with its arguments."""
    if isinstance(build, UnitSpec):
        return _kind(build.build)
    if isinstance(build, partial):
        return tuple(
            map(_kind, (build.func, *build.args, *(x for item in sorted(build.keywords.items()) for x in item)))
        )
    try:
        hash(build)
    except TypeError:
        return id(build)
    return build


def _costs_alone(stage: Stage, feed: Feed, place: RehearsedPlace) -> tuple[ActionCost, ...]:
    """The costs of F, of a whole backward B, and of its parts I and W, for one unit as a stage of its own."""
    meter, traffic = place.meter, place.traffic

    def alive_bytes() -> int:
        return sum(meter.point("").after.values())

    def stream() -> Message:
        """The plain stream, as stages pass it on."""
        boundary = stage.boundary
        return Message((torch.empty(boundary.shape(feed.num_tokens), dtype=boundary.dtype, device=place.device),))

    def forward(tape: Tape) -> None:
        x = stream() if feed.tokens is None else Message((feed.tokens,))
        drain(stage.forward(tape, x, feed.sequences, feed.result_fn, feed.given))

    def arriving() -> list[Message]:
        """The gradient that a backward takes out of the list; empty for the model's last unit."""
        return [stream()] if feed.result_fn is None else []

    def backward(tape: Tape, arrived: list[Message], split: bool = False) -> None:
        drain(stage.backward(tape, arrived.pop() if arrived else None, split))

    def measured(op: Op, run: Callable[[], object], empty_bytes: int) -> ActionCost:
        """The cost of an action; empty_bytes: those alive without a tape."""
        traffic.restart()
        meter.restart()
        before = alive_bytes()
        run()
        point = meter.point(op.name)
        return ActionCost(
            op,
            point.flops,
            point.read_bytes,
            point.written_bytes,
            sum(point.after.values()) - empty_bytes,
            point.peak_bytes - before,
            traffic.collectives,
        )

    empty_bytes, tape = alive_bytes(), Tape()
    costs = [
        measured(Op.F, partial(forward, tape), empty_bytes),
        measured(Op.B, partial(backward, tape, arriving()), empty_bytes),
    ]
    # Tensors that layers derive from the sequences are not part of the tape.
    tape = Tape()
    empty_bytes = alive_bytes()
    forward(tape)
    costs += [
        measured(Op.I, partial(backward, tape, arriving(), split=True), empty_bytes),
        measured(Op.W, partial(stage.weight_backward, tape), empty_bytes),
    ]
    return tuple(costs)
