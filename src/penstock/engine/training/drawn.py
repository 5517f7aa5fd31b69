"""Microbatches that ranks of one pipeline draw from iterators of their own, compared with those of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.data import PackedBatch
from penstock.engine.pipeline import Pipeline
from penstock.runtime import PipelineError
from penstock.schedule import Op, Program, parts


@dataclass(eq=False)
class Comparison:
    """Ranks that share microbatches hear of each that the first of them with an iterator draws, before they need it."""

    #: this rank's part of the model
    pipeline: Pipeline
    #: the ranks that share them, and the place among these of the one that all others hear
    ranks: Sequence[int]
    leader: int
    #: True if some of them have no iterator
    tells_all: bool
    #: what the others hear, while it is under way
    _leaving: list[tuple[Any, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, pipeline: Pipeline, has_iterator: Sequence[bool]) -> Self:
        """The comparison for this rank's microbatches. has_iterator: of each rank, whether it has one."""
        ranks = next(ranks for ranks in pipeline.ranks_by_batch if pipeline.grid.rank in ranks)
        have_one = [has_iterator[rank] for rank in ranks]
        return cls(pipeline, ranks, have_one.index(True), tells_all=not all(have_one))

    @property
    def is_first(self) -> bool:
        return self.ranks[self.leader] == self.pipeline.grid.rank

    def heard(self, microbatch: PackedBatch | None, number: int) -> PackedBatch:
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
            what = "the same lengths and ids, but other values" if lengths == lengths_here else f"{num_tokens} tokens"
            first, this = self.ranks[self.leader], self.pipeline.grid.rank
            raise PipelineError(
                f"microbatch {number} differs between ranks that share a batch: the iterator of rank {first} gave "
                f"{what}, that of rank {this} {microbatch.num_tokens} tokens; give all the same"
            )
        return microbatch

    def wait(self) -> None:
        """Wait until the others have heard."""
        for work, _ in self._leaving:
            work.wait()

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
