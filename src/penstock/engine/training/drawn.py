"""Microbatches that ranks of one pipeline draw from iterators of their own, compared with those of the first one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import PackedBatch
from penstock.engine.pipeline import Pipeline
from penstock.model import random_numbers
from penstock.runtime import PipelineError
from penstock.schedule import Op, Program, parts
from penstock.settings.declare import words_of

_END: Any = object()


class Draws:
    """The microbatches of one call, in their order: drawn on this rank, or heard of where it has no iterator.

    Ranks that share microbatches hear of each that the first of them with an iterator draws, before they need it.
    """

    #: this rank's part of the model
    pipeline: Pipeline
    #: this rank's iterator; None where it has none
    iterator: Iterator[Any] | None
    #: how many are drawn
    num: int
    #: refuses a microbatch that cannot be computed, given with its place in words
    check: Callable[[Any, str], None]
    #: the ranks that share them, and the place among these of the one that all others hear
    ranks: Sequence[int]
    leader: int
    #: True if some of them have no iterator
    tells_all: bool
    #: those drawn so far, without their data
    drawn: list[PackedBatch]
    #: puts back the random numbers that the iterator draws from: layers draw from seeds of their own
    _to_its_numbers: Callable[[], None]
    #: what the others hear, while it is under way
    _leaving: list[tuple[Any, Tensor]]

    def __init__(
        self,
        pipeline: Pipeline,
        iterator: Iterator[Any] | None,
        num: int,
        check: Callable[[Any, str], None],
        has_iterator: Sequence[bool],
    ) -> None:
        """has_iterator: of each rank, whether it has one."""
        self.pipeline, self.num, self.check = pipeline, num, check
        self.iterator = None if iterator is None else islice(iterator, num)
        self.ranks = next(ranks for ranks in pipeline.ranks_by_batch if pipeline.grid.rank in ranks)
        have_one = [has_iterator[rank] for rank in self.ranks]
        self.leader, self.tells_all = have_one.index(True), not all(have_one)
        self.drawn, self._leaving = [], []
        self._to_its_numbers = random_numbers(pipeline.device)

    @property
    def is_first(self) -> bool:
        return self.ranks[self.leader] == self.pipeline.grid.rank

    def in_order(self, program: Program) -> Iterator[PackedBatch]:
        """All of them, each drawn when the program first needs it; the first iterator's some before."""
        ahead, waiting = num_ahead(program) if self.is_first else 0, deque[PackedBatch]()
        for number in range(self.num):
            while len(self.drawn) <= min(number + ahead, self.num - 1):
                waiting.append(self._draw())
            yield waiting.popleft()

    def end(self) -> list[PackedBatch]:
        """Wait until the others have heard of all, and go back to the iterator's random numbers; returns all drawn."""
        for work, _ in self._leaving:
            work.wait()
        self._to_its_numbers()
        return self.drawn

    def leave(self) -> None:
        """Leave the iterator, after a call that failed, at the place where it would have ended."""
        if self.iterator is None:
            return
        with suppress(Exception), self.pipeline.recovery.asking("drawing what is left of a call that failed"):
            deque(self.iterator, maxlen=0)

    def _draw(self) -> PackedBatch:
        number = len(self.drawn)
        microbatch = self._heard(None if self.iterator is None else self._next(number), number)
        self.drawn.append(microbatch.without_data())
        return microbatch

    def _next(self, number: int) -> PackedBatch:
        """The iterator's next. Raises: PipelineError or ValueError, which say which one it was."""
        assert self.iterator is not None
        where, to_layers_numbers = f"microbatch {number} of {self.num}", random_numbers(self.pipeline.device)
        self._to_its_numbers()
        try:
            with self.pipeline.recovery.asking(f"drawing {where}"):
                microbatch = next(self.iterator, _END)
        except Exception as error:
            words = f"{type(error).__name__}: {words_of(error)}"
            raise PipelineError(f"the iterator failed at {where}: {words}") from error
        finally:
            self._to_its_numbers = random_numbers(self.pipeline.device)
            to_layers_numbers()
        if microbatch is _END:
            raise PipelineError(
                f"the iterator ended before {where}; let it give as many, or micro_batches ask for fewer"
            )
        self.check(microbatch, where)
        # An iterator may fill the same memory again before this one is computed.
        data = microbatch.data
        return microbatch if data is None else microbatch.with_data({key: data[key].clone() for key in data})

    def _heard(self, microbatch: PackedBatch | None, number: int) -> PackedBatch:
        """The microbatch that this rank has drawn; where it has no iterator, the first rank's without its data.

        Raises: PipelineError where the two differ.
        """
        group = self.pipeline.grid.batch_control
        if group is None:
            assert microbatch is not None
            return microbatch
        row, text = torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        if self.is_first and microbatch is not None:
            if self.tells_all:
                text = torch.frombuffer(bytearray(_described(microbatch)), dtype=torch.uint8)
            row = torch.tensor([*_digests(microbatch), microbatch.num_tokens, len(text)])
        with self.pipeline.recorder.collective(f"hear of microbatch {number}", group):
            self._share(row, group)
            if self.tells_all:
                text = text if self.is_first else torch.empty(int(row[3]), dtype=torch.uint8)
                self._share(text, group)
        if microbatch is None:
            return PackedBatch.from_json(text.numpy().tobytes().decode())
        lengths, contents, num_tokens, _ = row.tolist()
        lengths_here, contents_here = _digests(microbatch)
        if lengths != lengths_here or (contents and contents_here and contents != contents_here):
            what = f"{num_tokens} and {microbatch.num_tokens} tokens"
            if lengths == lengths_here:
                what = "the same lengths and ids, but other values"
            raise PipelineError(
                f"microbatch {number} differs between ranks that share a batch: the iterators of ranks "
                f"{self.ranks[self.leader]} and {self.pipeline.grid.rank} gave {what}; give all the same"
            )
        return microbatch

    def _share(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Send it from the first rank, which does not wait, into that of each other.

        A collective would let some of the others wait for each other, which are elsewhere in their programs: gloo
        passes a broadcast on along a tree.
        """
        if not self.is_first:
            dist.recv(tensor, group=group, group_src=self.leader)
            return
        for member in range(len(self.ranks)):
            if member != self.leader:
                self._leaving.append((dist.isend(tensor, group=group, group_dst=member), tensor))


def _digests(microbatch: PackedBatch) -> tuple[int, int]:
    return microbatch.digest(), microbatch.contents_digest()


def _described(microbatch: PackedBatch) -> bytes:
    """A microbatch as a rank without an iterator needs to know it."""
    return microbatch.with_parts(data=None, metadata={}).to_json().encode()


def num_ahead(program: Program) -> int:
    """The number of microbatches that the first iterator gives ahead, so that no rank waits for one that waits for it.

    Where a rank has done a forward, the first one's has begun with that microbatch. Where a microbatch may begin at the
    pipeline's other end too, only a backward says so.
    """
    schedule, most = program.schedule, 1
    both_ways = schedule.training and schedule.placement.num_routes > 1
    signs = (Op.B, Op.I) if both_ways else (Op.F,)
    for steps in program.ranks:
        needed, begun = -1, 0
        for step in steps:
            microbatch = max(action.microbatch for action in parts(step))
            if microbatch > needed:
                needed = microbatch
                most = max(most, needed - begun)
            begun = max([begun, *(action.microbatch for action in parts(step) if action.op in signs)])
    return most
