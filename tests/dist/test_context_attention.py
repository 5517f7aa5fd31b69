"""Attention over sequences that several ranks share equals attention of one process, forward and gradients."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.model import drain, zip_lanes
from penstock.model.attention.context_parallel import ContextAttention, RingAttention
from penstock.model.attention.kernels import AttentionKernel
from penstock.model.lanes import Grads, Lane, Segment, State, Undo
from penstock.model.sequences import Sequences, Spread, cut_sequences
from penstock.parallel.collectives import Collectives, Handle
from penstock.schedule.recording import CollectiveKind
from penstock.settings import ContextForm
from tests.attention_reference import masked_attention
from tests.dist.launch import run_ranks

LENGTHS = [(16,), (5, 11, 11, 4), (1, 9, 2, 30), (8, 8, 8)]
WINDOWS = [None, 1, 4, 6, 100]
HEADS = [(4, 4), (4, 2), (4, 1)]


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    window: int | None


def cases() -> Iterator[Case]:
    for lengths, heads, window in itertools.product(LENGTHS, HEADS, WINDOWS):
        yield Case(lengths, heads, window)


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(case.lengths))

    def heads(count: int) -> Tensor:
        return torch.randn(sum(case.lengths), count, 8, generator=generator, dtype=torch.float64).to(dtype)

    q, kv = case.heads
    return heads(q), heads(kv), heads(kv), heads(q)


def expected(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k, v, grad = (x.double() for x in inputs(case, dtype))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = masked_attention(q, k, v, case.lengths, case.window)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def own_rows(case: Case, spread: Spread) -> Tensor:
    starts = itertools.accumulate(case.lengths[:-1], initial=0)
    held = zip(starts, spread.pieces[spread.rank], strict=True)
    return torch.tensor([start + position for start, pieces in held for piece in pieces for position in piece])


def walk(row: Sequence[Segment], state: State, undo: list[Undo] | None) -> Lane[State]:
    for segment in row:
        state = yield from segment.forward(state, undo)
    return state


def walk_back(undo: list[Undo], grads: Grads) -> Lane[Grads]:
    while undo:
        grads = yield from undo.pop()(grads)
    return grads


def attended(case: Case, spread: Spread, form: ContextForm, dtype: torch.dtype) -> list[Tensor]:
    """This rank's rows, and its part of output and gradients: alone, and beside another lane as in a combined run."""
    rows = own_rows(case, spread)
    sequences = Sequences.of_spread(spread)
    assert sequences.num_tokens == len(rows) > 0
    q, k, v, grad = (x[rows] for x in inputs(case, dtype))
    collectives = Collectives(dist.group.WORLD)
    kernel = AttentionKernel(*case.heads, 8, case.window)
    row = ContextAttention(form, collectives, *case.heads).segments(sequences, kernel)
    undo: list[Undo] = []
    out, beside = drain(walk(row, (q, k, v, q), undo))
    grads, (again, _) = zip_lanes(walk_back(undo, (grad, beside)), walk(row, (q, k, v, q), None))
    assert torch.equal(again, out) and torch.equal(beside, q) and torch.equal(grads[3], q)
    assert {x.dtype for x in (out, *grads)} == {dtype}
    return [rows, out, *grads[:3]]


def errors_in_float64(rank: int, world: int, form: ContextForm) -> list[float]:
    """The largest error of each case, over output and gradients."""
    found = []
    # Every case for two ranks; for more, those in which ranks and pieces are what is new.
    for case in list(cases())[:: 1 if world == 2 else 3]:
        if form is ContextForm.ALL_TO_ALL and case.heads[1] % world:
            continue
        spread = Spread(rank, cut_sequences(case.lengths, world))
        rows, *parts = attended(case, spread, form, torch.float64)
        wholes = expected(case)
        found.append(max(float((mine - whole[rows]).abs().max()) for mine, whole in zip(parts, wholes, strict=True)))
    return found


@pytest.mark.shows(86)
@pytest.mark.parametrize(("form", "world"), [("ring", 2), ("ring", 3), ("ring", 4), ("all-to-all", 2)])
def test_output_and_gradients_are_those_of_full_attention(form: str, world: int) -> None:
    for errors in run_ranks(world, errors_in_float64, world, ContextForm(form)):
        assert len(errors) >= 20
        assert max(errors) < 1e-10


def errors_in_16_bit(rank: int, form: ContextForm) -> list[float]:
    found = []
    for lengths, heads in itertools.product(LENGTHS, [(4, 4), (4, 2)]):
        case = Case(lengths, heads, None)
        rows, *parts = attended(case, Spread(rank, cut_sequences(lengths, 2)), form, torch.bfloat16)
        for mine, whole in zip(parts, expected(case, torch.bfloat16), strict=True):
            found.append(float((mine - whole[rows]).abs().max() / whole.abs().max()))
    return found


@pytest.mark.shows(86)
@pytest.mark.parametrize("form", ContextForm)
def test_in_16_bit_the_error_is_a_few_roundings(form: ContextForm) -> None:
    # Inputs are the same 16-bit numbers. The softmax's weights, each part's output and the result are rounded, and
    # gradients see the rounded result: against the largest element that is a few units of the last place.
    for errors in run_ranks(2, errors_in_16_bit, form):
        assert len(errors) == 4 * 2 * 4
        assert max(errors) < 4 * torch.finfo(torch.bfloat16).eps


def num_bytes_sent(rank: int) -> int:
    """What the ring sends in a forward, with one key head for eight queries."""
    seen: list[int] = []

    class Watch:
        def follow(
            self, kind: CollectiveKind, num_bytes: int, work: Handle[object], group: object = None
        ) -> Handle[object]:
            seen.append(num_bytes)
            return work

    q, k, v = torch.randn(8, 8, 4), torch.randn(8, 1, 4), torch.randn(8, 1, 4)
    ring = RingAttention(Collectives(dist.group.WORLD, Watch()), Spread(rank, cut_sequences([24], 3)), None)
    drain(ring.forward((q, k, v), None))
    return sum(seen)


def test_key_heads_travel_as_they_are() -> None:
    assert run_ranks(3, num_bytes_sent) == [2 * (2 * 8 * 1 * 4) * 4] * 3
