"""Microbatches that a user's own source gives, drawn one by one in the course of a step, in its order.

Each rank of a pipeline has a source of its own, or none where it holds neither end of the model. What the first one
draws, all others hear of ahead: its lengths, which they need for messages, and digests, by which theirs is compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import PackedBatch
from penstock.engine.pipeline import Pipeline, StartReduction
from penstock.engine.training.loss import check_total
from penstock.engine.training.microbatches import (
    AgreedSplit,
    BatchCall,
    check_given,
    checked_weight,
    split_of,
)
from penstock.model import random_numbers
from penstock.runtime import PipelineError
from penstock.schedule import Op, Program, parts
from penstock.settings.declare import words_of

_END: Any = object()


@dataclass(eq=False)
class DrawnMicrobatches:
    """The microbatches of one call, drawn as this rank's program first needs them; iterated over once."""

    #: this rank's part of the model
    pipeline: Pipeline
    #: where they come from, and the call that they are for
    agreed: AgreedSplit
    call: BatchCall
    #: the ranks that share them, and the place among these of the one whose source all others' are compared with
    ranks: Sequence[int]
    leader: int
    #: True if some of them have no source
    tells_all: bool
    #: how many the first rank with a source draws before they are needed
    ahead: int = 0
    #: those drawn so far, without their data, and their loss weights where labels are seen
    microbatches: list[PackedBatch] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    #: those that are not needed yet
    _waiting: deque[PackedBatch] = field(default_factory=deque)
    #: what the others hear, while it is under way
    _leaving: list[tuple[Any, Tensor]] = field(default_factory=list)
    #: in training, puts back the random numbers from which the source draws: layers draw from seeds of their own
    _to_own_numbers: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[PackedBatch]:
        for number in range(self.agreed.num):
            while len(self.microbatches) <= min(number + self.ahead, self.agreed.num - 1):
                self._draw()
            yield self._waiting.popleft()

    def keep_numbers_apart(self) -> None:
        """Let the source draw random numbers as if no layer did in between; until the call is `finished`."""
        self._to_own_numbers = random_numbers(self.pipeline.device)

    def skip(self) -> None:
        """Draw what is left of a call that failed: so the sources of all ranks stand at one place."""
        with suppress(Exception), self.pipeline.recovery.asking("drawing what is left of a call that failed"):
            for _ in range(len(self.microbatches), self.agreed.num if self.agreed.source else 0):
                next(self.agreed.source)  # pyright: ignore[reportArgumentType]

    def finished(self, agreed: AgreedSplit, needs_weight: bool = False) -> AgreedSplit:
        """The same, now that all is known; all ranks call it after the program.

        Raises: ZeroLossWeight, where there has to be some.
        """
        for work, _ in self._leaving:
            work.wait()
        pipeline, own = self.pipeline, (0.0, 0.0)
        if pipeline.grid.rank in pipeline.output_ranks:
            own = sum(self.weights), float(sum(own.num_tokens for own in self.microbatches))
        weight, num_tokens = pipeline.sum_over_ranks(*own)
        if needs_weight:
            check_total(weight, pipeline.layout.dp)
        if self._to_own_numbers is not None:
            self._to_own_numbers()
        return replace(agreed, split=split_of(self.microbatches), rank_totals=[weight], num_tokens=int(num_tokens))

    def _draw(self) -> None:
        number, own = len(self.microbatches), None
        if self.agreed.source is not None:
            own = self._next(number)
        own = self._compared(own, number)
        if self.pipeline.holds_last_stage and (weight_fn := self.call.loss_weight_fn) is not None:
            self.weights.append(checked_weight(weight_fn, own, number))
        self.microbatches.append(own.without_data())
        self._waiting.append(own)

    def _next(self, number: int) -> PackedBatch:
        """The source's next. Raises: PipelineError or ValueError, which say which one it was."""
        assert self.agreed.source is not None
        where, to_layers_numbers = f"microbatch {number} of {self.agreed.num}", None
        if self._to_own_numbers is not None:
            to_layers_numbers = random_numbers(self.pipeline.device)
            self._to_own_numbers()
        try:
            with self.pipeline.recovery.asking(f"drawing {where}"):
                own = next(self.agreed.source, _END)
        except Exception as error:
            words = f"{type(error).__name__}: {words_of(error)}"
            raise PipelineError(f"the source of microbatches failed at {where}: {words}") from error
        finally:
            if to_layers_numbers is not None:
                self._to_own_numbers = random_numbers(self.pipeline.device)
                to_layers_numbers()
        if own is _END:
            raise PipelineError(
                f"the source of microbatches ended before {where}; let it give as many, or micro_batches ask for fewer"
            )
        check_given(self.pipeline, own, where, self.agreed.max_tokens, self.call.reads_labels)
        # A source may fill the same memory again before this one is computed.
        return own if own.data is None else own.with_data({key: values.clone() for key, values in own.data.items()})

    def _compared(self, own: PackedBatch | None, number: int) -> PackedBatch:
        """This rank's own, or of the first rank's what all may know. Raises: PipelineError where the two differ."""
        group, leader = self.pipeline.grid.batch_control, self.leader
        if group is None:
            assert own is not None
            return own
        row, text = torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        leads = group.rank() == leader
        if own is not None and leads:
            if self.tells_all:
                text = torch.frombuffer(bytearray(_described(own)), dtype=torch.uint8)
            row = torch.tensor([*_digests(own), own.num_tokens, len(text)])
        with self.pipeline.recorder.collective(f"hear of microbatch {number}", group):
            work = dist.broadcast(row, group=group, group_src=leader, async_op=True)
            if leads:
                self._leaving.append((work, row))
            else:
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
                text = torch.empty(int(row[3]), dtype=torch.uint8)
            if self.tells_all:
                work = dist.broadcast(text, group=group, group_src=leader, async_op=True)
                if leads:
                    self._leaving.append((work, text))
                else:
                    work.wait()  # pyright: ignore[reportOptionalMemberAccess]
        if own is None:
            return PackedBatch.from_json(text.numpy().tobytes().decode())
        digest, contents, num_tokens, _ = row.tolist()
        mine = _digests(own)
        if digest != mine[0] or (contents and mine[1] and contents != mine[1]):
            what = "the same lengths and ids, but other values" if digest == mine[0] else f"{num_tokens} tokens"
            first, this = self.ranks[leader], self.pipeline.grid.rank
            raise PipelineError(
                f"microbatch {number} differs between ranks that share a batch: the source of rank {first} gave "
                f"{what}, that of rank {this} {own.num_tokens} tokens; give all the same"
            )
        return own


def _digests(own: PackedBatch) -> tuple[int, int]:
    return own.digest(), own.contents_digest()


def drawn_one_by_one(
    pipeline: Pipeline, agreed: AgreedSplit, call: BatchCall, reduce: StartReduction | None, after: ExitStack
) -> AgreedSplit:
    """The same, with microbatches that are drawn as the program of a step asks, or without `reduce` that of forwards.

    `after` ends when the call has ended and, if it failed, has been undone.
    """
    ranks = next(ranks for ranks in pipeline.ranks_by_batch if pipeline.grid.rank in ranks)
    have_one = [agreed.has_source[rank] for rank in ranks]
    # A rank that has ended draws nothing, and hears of the others' totals.
    leader = have_one.index(True) if agreed.num else 0
    drawn = DrawnMicrobatches(pipeline, agreed, call, ranks, leader, tells_all=not all(have_one))
    if agreed.num and ranks[leader] == pipeline.grid.rank:
        drawn.ahead = _lead(pipeline.executor(agreed.num, reduce).program)
    if reduce is not None:
        drawn.keep_numbers_apart()
    after.push(lambda kind, error, traceback: drawn.skip() if kind else None)
    return replace(agreed, microbatches=drawn, weights=drawn.weights)


def _described(own: PackedBatch) -> bytes:
    """A microbatch as a rank without a source needs to know it."""
    parts = {part.name: getattr(own, part.name) for part in fields(own)}
    return PackedBatch.trusted(**{**parts, "data": None, "metadata": {}}).to_json().encode()


def _lead(program: Program) -> int:
    """The number of microbatches that the first source gives ahead, so that no rank waits for one that waits for it.

    Where a rank has done a forward, the first source's has begun with that microbatch. Where a microbatch may begin at
    the pipeline's other end too, only a backward says so.
    """
    schedule, most = program.schedule, 1
    both_ways = schedule.training and schedule.placement.num_routes > 1
    tells = (Op.B, Op.I) if both_ways else (Op.F,)
    for steps in program.ranks:
        needed, begun = -1, 0
        for step in steps:
            microbatch = max(action.microbatch for action in parts(step))
            if microbatch > needed:
                needed = microbatch
                most = max(most, needed - begun)
            begun = max([begun, *(action.microbatch for action in parts(step) if action.op in tells)])
    return most
