"""How long units take, measured: for a cut that is balanced on the machine it runs on.

Shapes: T tokens of a typical microbatch, D hidden size.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.build import build_stages
from penstock.engine.options import EngineOptions
from penstock.model import Sequences, UnitSpec
from penstock.parallel import Grid, gather_json
from penstock.runtime import Boundary, Stage, Tape, drain
from penstock.runtime.stage import Finish

NUM_RUNS = 5


def measure_units(
    units: Sequence[UnitSpec], hidden_size: int, lengths: Sequence[int], options: EngineOptions, grid: Grid
) -> list[float]:
    """Seconds of each unit's forward and backward on sequences of these lengths, the same on every rank.

    The first rank measures for all, so that all cut alike. Units that do equal work (the layers of a decoder) are
    measured once, with the options' precision and recompute.
    """
    times = _measure(units, hidden_size, lengths, options, grid.device) if grid.rank == 0 else None
    return gather_json(times, grid.control)[0]


def _measure(
    units: Sequence[UnitSpec], hidden_size: int, lengths: Sequence[int], options: EngineOptions, device: torch.device
) -> list[float]:
    sequences = Sequences.from_lengths(lengths, device)
    boundary = Boundary(hidden_size, options.precision.parameter_dtype)
    known: dict[tuple[str, int, float], float] = {}
    found = []
    for i, unit in enumerate(units):
        kind = (unit.name.rpartition(".")[2], unit.num_parameters, unit.flops_per_token)
        if kind not in known:
            x = torch.randn(boundary.shape(sequences.num_tokens), device=device, dtype=boundary.dtype)
            if i == 0:
                x = torch.zeros(sequences.num_tokens, device=device, dtype=torch.int64)
            stages = build_stages(units, (range(i, i + 1),), (0,), boundary, options, device)
            finish = _like_a_loss if i == len(units) - 1 else torch.sum
            known[kind] = _seconds(stages[0], x, sequences, finish)
        found.append(known[kind])
    return found


def _like_a_loss(output: Tensor) -> Tensor:
    """The work of a cross entropy on the logits, whose softmax counts where the vocabulary is large."""
    return output.float().logsumexp(-1).sum() if output.is_floating_point() else output.sum()


def _seconds(stage: Stage, x: Tensor, sequences: Sequences, finish: Finish) -> float:
    """The least time of a forward and backward, the first one not counted: other work only ever adds."""
    times = []
    for _ in range(NUM_RUNS + 1):
        _synchronise(x.device)
        start, tape = time.perf_counter(), Tape()
        drain(stage.forward(tape, x, sequences, finish))
        drain(stage.backward(tape, None))
        _synchronise(x.device)
        times.append(time.perf_counter() - start)
    for _, parameter in stage.named_parameters():
        parameter.grad = None
    return min(times[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
