"""The launcher itself: results in order, failures with their traceback, and no process left behind."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from tests.dist.launch import RankFailure, run_ranks


def _rank_one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("no such stage")
    dist.barrier()


def _sleeps_forever(rank: int) -> None:
    threading.Event().wait()


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*_rank_one_raises.*no such stage"):
        run_ranks(2, _rank_one_raises, timeout_s=30)


def test_a_hanging_rank_ends_with_the_time_limit() -> None:
    with pytest.raises(RankFailure, match=r"had not ended after \d+ s"):
        run_ranks(1, _sleeps_forever, timeout_s=1)
