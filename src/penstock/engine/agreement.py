"""What all ranks must know of a batch before they start on it, by one small collective."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.parallel import Coordinates
from penstock.runtime import PipelineError


@dataclass(frozen=True)
class BatchReport:
    """One rank's view of its batch.

    `counts` are what the data-parallel ranks need to split alike, `num_microbatches` what the rank has split into so
    far. `digest` covers ids, keys and lengths. `weight` is the sum of the loss weights. `failed`: the rank can not go
    on with its batch. `stop`: somebody asked this rank to end after the step.
    """

    num_tokens: int = 0
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    num_microbatches: int = 0
    digest: int = 0
    weight: float = 0.0
    failed: bool = False
    stop: bool = False

    def pack(self) -> list[int]:
        weight_bits = struct.unpack("<q", struct.pack("<d", self.weight))[0]
        flags = int(self.failed) | int(self.stop) << 1
        return [self.num_tokens, *self.counts, self.num_microbatches, self.digest, weight_bits, flags]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> "BatchReport":
        num_tokens, *counts, num_microbatches, digest, weight_bits, flags = row
        weight = struct.unpack("<d", struct.pack("<q", weight_bits))[0]
        wanted, needed, num_items, longest = counts
        counts = (wanted, needed, num_items, longest)
        return cls(num_tokens, counts, num_microbatches, digest, weight, bool(flags & 1), bool(flags & 2))


def gather_reports(report: BatchReport, group: dist.ProcessGroup | None) -> list[BatchReport]:
    """Every rank's report, by rank; `group` carries host memory (None: there is one rank)."""
    if group is None:
        return [report]
    row = torch.tensor(report.pack(), dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return [BatchReport.unpack(r.tolist()) for r in rows]


def check_reports(
    reports: Sequence[BatchReport],
    coordinates: Callable[[int], Coordinates],
    own_error: Exception | None = None,
) -> None:
    """Raise on every rank alike if the ranks can not go on together.

    Ranks with the same place on the dp axis share a batch. `own_error` is what this rank failed with; it is raised as
    it is here and told as a PipelineError elsewhere.

    Raises:
        PipelineError: a rank failed, or ranks that share a batch hold different ones; all coordinates are listed.
    """
    if own_error is not None:
        raise own_error
    failed = [rank for rank, report in enumerate(reports) if report.failed]
    if failed:
        raise PipelineError(f"rank(s) {', '.join(map(str, failed))} can not use their batch; their message says why")
    pipelines: dict[int, list[int]] = {}
    for rank in range(len(reports)):
        pipelines.setdefault(coordinates(rank).dp, []).append(rank)
    for ranks in pipelines.values():
        if len({(reports[r].digest, reports[r].counts) for r in ranks}) > 1:
            views = "; ".join(
                f"({coordinates(r)}) has {reports[r].counts[2]} items, {reports[r].num_tokens} tokens, "
                f"digest {reports[r].digest:x}"
                for r in ranks
            )
            raise PipelineError(f"ranks that share a batch were given different ones: {views}")
