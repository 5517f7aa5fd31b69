"""The launcher itself: results in order, failures with their traceback, and no process left behind."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.dist.launch import RankFailure, run_outcomes, run_ranks


def _sum_of_ranks(rank: int, base: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([base + rank])
    dist.all_reduce(total)
    return rank, total


def _rank_one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("no such stage")
    dist.barrier()


def _rank_zero_is_killed(rank: int) -> int:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _sleeps_forever(rank: int) -> None:
    threading.Event().wait()


def _own_pid(rank: int) -> int:
    return os.getpid()


def test_results_come_in_rank_order() -> None:
    results = run_ranks(2, _sum_of_ranks, 10.0)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(total, torch.tensor([21.0])) for _, total in results)


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*_rank_one_raises.*no such stage"):
        run_ranks(2, _rank_one_raises, timeout_s=30)


def test_a_killed_rank_is_reported_with_its_signal() -> None:
    outcomes = run_outcomes(2, _rank_zero_is_killed)
    assert outcomes[0].exit_code == -signal.SIGKILL and outcomes[0].error is not None
    assert outcomes[1].value == 1 and outcomes[1].error is None


def test_a_hanging_rank_ends_with_the_time_limit() -> None:
    with pytest.raises(RankFailure, match=r"had not ended after \d+ s"):
        run_ranks(1, _sleeps_forever, timeout_s=1)


def test_no_process_survives() -> None:
    for pid in run_ranks(2, _own_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
