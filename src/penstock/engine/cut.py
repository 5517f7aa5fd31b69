"""The cut of a model into stages: by hand, by the units' estimated work, or by their times on this machine.

Shapes: T tokens of a typical microbatch, D hidden size.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.data import labels_of_share, rows_with_label
from penstock.engine.agreement import build_on_all_ranks
from penstock.engine.build import build_stages, recomputes
from penstock.engine.options import EngineOptions
from penstock.engine.precision import parameter_dtype
from penstock.model import Sequences, UnitSpec, drain
from penstock.parallel import Grid, gather_json
from penstock.runtime import Boundary, Message, Stage, Tape
from penstock.runtime.stage import ResultFn
from penstock.schedule import Costs, Placement, balanced_cut, costs_of_cut
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import Quantize

NUM_RUNS = 5


def cut_units(
    units: Sequence[UnitSpec],
    placement: Placement,
    options: EngineOptions,
    times: Sequence[float] | None = None,
) -> tuple[range, ...]:
    """The units of each stage: the options' cut if they give one, else the cut whose slowest rank is fastest.

    times: measured times of the units; left out, their estimated work decides.

    Raises: ValueError for more stages than units, or a cut by hand that leaves units out.
    """
    units_per_layer = Counter(unit.layer for unit in units if unit.layer is not None)
    cut_by_hand = options.choice.cut(len(units), placement.stages_per_route, max(units_per_layer.values(), default=1))
    if cut_by_hand is not None:
        return cut_by_hand
    return balanced_cut(times or [unit.work(options.label_share) for unit in units], placement)


def timed_cut(
    units: Sequence[UnitSpec], placement: Placement, options: EngineOptions, times: Costs
) -> tuple[tuple[range, ...], ScheduleChoice]:
    """The units of each stage of a placement, and the schedule for their times. Raises: ValueError, as `cut_units`."""
    cut = cut_units(units, placement, options, times.totals)
    return cut, options.choice.timed(costs_of_cut(times, cut))


def measure_units(
    units: Sequence[UnitSpec], hidden_size: int, lengths: Sequence[int], options: EngineOptions, grid: Grid
) -> Costs:
    """The units' times on sequences of these lengths, in seconds, the same on every rank.

    The first rank measures for all, so that all ranks cut alike and follow one order.
    """

    def measure() -> dict[str, Any]:
        unit_times = times_here(units, hidden_size, lengths, options, grid.device)
        return {
            name: getattr(unit_times, name) for name in ("forward", "backward_input", "backward_weight", "recompute")
        }

    times = build_on_all_ranks(measure if grid.rank == 0 else dict, grid.control)
    return Costs(**gather_json(times, grid.control)[0])


def times_here(
    units: Sequence[UnitSpec], hidden_size: int, lengths: Sequence[int], options: EngineOptions, device: torch.device
) -> Costs:
    """The units' times in this process in seconds, with the options' precision and recompute: a number for each unit.

    Units that do equal work (the layers of a decoder) are measured once.
    """

    def like_a_loss(output: Tensor) -> Tensor:
        # The work of a cross entropy, whose softmax counts where the vocabulary is large.
        return output.float().logsumexp(-1).sum() if output.is_floating_point() else output.sum()

    # A backward needs the parameters.
    options = replace(options, read_only=False, quantize=Quantize.NONE)
    sequences = Sequences.from_lengths(lengths, device)
    sequences = sequences.with_read_rows(rows_with_label(labels_of_share(sequences.num_tokens, options.label_share)))
    boundary = Boundary(hidden_size, parameter_dtype(options.precision))
    times_by_kind: dict[tuple[str, int, float, bool], list[float]] = {}
    times = []
    for i, unit in enumerate(units):
        is_recomputed = recomputes(unit, options)
        kind = (unit.kind, unit.num_parameters, unit.flops_per_token, is_recomputed)
        if kind not in times_by_kind:
            x = torch.randn(boundary.shape(sequences.num_tokens), device=device, dtype=boundary.dtype)
            if i == 0:
                x = torch.zeros(sequences.num_tokens, device=device, dtype=torch.int64)
            stages = build_stages(units, {0: range(i, i + 1)}, boundary, options, device)
            stages[0].set_training(False)
            times_by_kind[kind] = _least_times(
                stages[0], x, sequences, like_a_loss if i == len(units) - 1 else torch.sum
            )
        forward, backward_input, backward_weight = times_by_kind[kind]
        times.append((forward, backward_input, backward_weight, min(forward, backward_input) if is_recomputed else 0.0))
    forward, backward_input, backward_weight, recompute = zip(*times, strict=True)
    return Costs(forward, backward_input, backward_weight, recompute=recompute)


def _least_times(stage: Stage, x: Tensor, sequences: Sequences, result_fn: ResultFn) -> list[float]:
    """The shortest times of F, I and W after a warm-up: other work on the machine only ever adds."""
    runs = []
    for _ in range(NUM_RUNS + 1):
        tape, moments = Tape(), [_now(x.device)]
        drain(stage.forward(tape, Message((x,)), sequences, result_fn))
        moments.append(_now(x.device))
        drain(stage.backward(tape, None, split=True))
        moments.append(_now(x.device))
        stage.weight_backward(tape)
        moments.append(_now(x.device))
        runs.append([after - before for before, after in pairwise(moments)])
    for _, parameter in stage.named_parameters():
        parameter.grad = None
    return list(map(min, zip(*runs[1:], strict=True)))


def _now(device: torch.device) -> float:
    """Seconds, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
