"""Tapes that are computed again ahead of their backward, or go to host memory and back, with the bits of a plain step.

Where in an order such actions stand is drawn by chance; what the proof accepts is run.
"""

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch, schedule
from penstock.model import decoder_units
from penstock.runtime import offload
from penstock.schedule import Action, Op, Pair, Schedule, Step, parts
from tests.covering import EVERY
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks

NUM = 5
DRAWS = 12 if EVERY else 3
#: builder, ranks, stages a rank
SHAPES = [
    ("1f1b", 1, 1),
    ("1f1b", 3, 1),
    ("interleaved", 2, 2),
    ("zb-h1", 2, 1),
    ("zb-v", 2, 2),
    ("combined-1f1b", 2, 1),
]
MODELS = ("own", "dense", "tensor-parallel", "experts")


class Drawing(nn.Module):
    """A layer of a user's own with random numbers, and a buffer that each training forward changes."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(64, 64), nn.Dropout(0.3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.tanh(self.drop(self.linear(x)) + 0.01 * self.count)


def with_moves(plain: Schedule, rng: random.Random) -> Schedule:
    """The schedule with some R, O and L, each at a place where its tape is in the state that it takes."""
    last = {plain.placement.stages_per_route - 1, plain.placement.num_stages - 1}
    orders = []
    for order in plain.orders:
        steps: list[Step] = list(order)
        tapes = sorted({(a.stage, a.microbatch) for step in order for a in parts(step)})
        for stage, microbatch in tapes:
            kinds = rng.choice([[], ["R"], ["O", "L"], ["R", "O", "L"], ["O", "L", "R"], ["O", "L", "O", "L"]])
            if stage in last:
                kinds = [kind for kind in kinds if kind != "R"]
            for kind in kinds:
                own = [
                    (place, a)
                    for place, step in enumerate(steps)
                    for a in parts(step)
                    if (a.stage, a.microbatch) == (stage, microbatch)
                ]
                # After all that its tape has had, before its backward.
                end = next(place for place, a in own if a.op in (Op.B, Op.I))
                begin = max(place for place, a in own if a.op not in (Op.B, Op.I, Op.W)) + 1
                steps.insert(rng.randint(begin, end) if begin <= end else end, Action(Op[kind], stage, microbatch))
        orders.append(tuple(steps))
    return replace(plain, orders=tuple(orders))


def engine_of(model: str, own: Schedule | str, layout: Layout, recompute: str) -> Engine:
    options = EngineOptions(own, device="cpu", timeout_s=60.0, recompute=recompute)
    if model == "own":
        torch.manual_seed(0)
        layers = [nn.Embedding(VOCABULARY, 64), *(Drawing() for _ in range(6)), nn.Linear(64, VOCABULARY)]
        return Engine.from_layers(layers, 64, layout, options)
    config = SPARSE if model == "experts" else DENSE
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)


def batch_of() -> PackedBatch:
    generator = torch.Generator().manual_seed(5)
    return PackedBatch.from_documents([torch.randint(0, VOCABULARY, (n,), generator=generator) for n in range(29, 41)])


def some_steps(model: str, own: Schedule | str, layout: Layout, recompute: str) -> tuple[Any, ...]:
    engine = engine_of(model, own, layout, recompute)
    losses = [engine.train_batch(batch_of(), micro_batches=MicroBatchSpec(num=NUM)).loss for _ in range(3)]
    state = {name: p.detach().clone() for name, p in (engine.parameters() | engine.buffers()).items()}
    engine.close()
    engine.grid.close()
    return losses, state


def drawn(rank: int, shape: tuple[str, int, int], model: str) -> list[tuple[int, int, bool]]:
    """Of each draw the R of all ranks, the bytes that this rank moved, and whether all bits were a plain step's."""
    (name, pp, stages), found = shape, []
    layout = Layout(pp=pp, tp=2 if model == "tensor-parallel" else 1)
    plain = schedule.build(name, ranks=pp, microbatches=NUM, **({"stages_per_rank": stages} if stages > 1 else {}))
    expected, moved = some_steps(model, plain, layout, "none"), 0
    put = offload.Arena.put

    def counted(arena: offload.Arena, block: Tensor) -> offload.HostPlace:
        nonlocal moved
        moved += block.nbytes
        return put(arena, block)

    offload.Arena.put = counted  # type: ignore[method-assign]
    for draw in range(DRAWS):
        rng = random.Random(f"{shape} {model} {draw}")
        own, recompute, moved = with_moves(plain, rng), rng.choice(["full", "full", "none"]), 0
        num = sum(a.op is Op.R for order in own.orders for step in order for a in parts(step))
        if recompute == "none":
            own = replace(own, orders=tuple(tuple(s for s in order if not _is(s, Op.R)) for order in own.orders))
        losses, state = some_steps(model, own, layout, recompute)
        equal = losses == expected[0] and all(torch.equal(state[key], expected[1][key]) for key in expected[1])
        found.append((num * (recompute == "full"), moved, equal and len(state) > 1))
    offload.Arena.put = put  # type: ignore[method-assign]
    return found


def _is(step: Step, op: Op) -> bool:
    return not isinstance(step, Pair) and step.op is op


def ranks_of(shape: tuple[str, int, int], model: str) -> int:
    return shape[1] * (2 if model == "tensor-parallel" else 1)


@pytest.mark.shows(210)
@pytest.mark.parametrize(("shape", "model"), [c for c in product(SHAPES, MODELS) if ranks_of(*c) <= 4], ids=str)
def test_bits_do_not_depend_on_where_tapes_are_and_when_they_are_computed(
    shape: tuple[str, int, int], model: str
) -> None:
    results = run_ranks(ranks_of(shape, model), drawn, shape, model, timeout_s=300.0)
    assert all(equal for of_rank in results for _, _, equal in of_rank), results
    assert sum(moved for of_rank in results for _, moved, _ in of_rank) > 0
    assert shape[1] == 1 or any(num for num, _, _ in results[0])
