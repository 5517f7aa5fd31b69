"""The processes of a benchmark: they answer by rank, and one that fails ends them all at once and says why."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks.common import main
from benchmarks.ranks import Job, RankFailed, Team, jobs_in_turns

from penstock import schedule

# How long the ranks of a failed team would wait for each other, if nobody ended them.
LIMIT_S = 100.0


def sum_of_ranks(rank: int, more: int) -> tuple[int, int]:
    total = torch.tensor(rank + more)
    dist.all_reduce(total)
    return rank, int(total)


def fail_beside_a_waiting_rank(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("made to fail")
    dist.barrier()


def die_beside_a_waiting_rank(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    dist.barrier()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (fail_beside_a_waiting_rank, r"(?s)rank 1 .* failed:\nTraceback.*ZeroDivisionError: made to fail"),
        (die_beside_a_waiting_rank, "rank 1 .* died with exit code 3"),
    ],
)
def test_a_rank_that_fails_ends_the_benchmark_at_once(function, told: str):
    with pytest.raises(RankFailed, match=told), Team(2, limit_s=LIMIT_S) as team:
        assert team.call(sum_of_ranks, 10) == [(0, 21), (1, 21)]
        processes = team._processes
        start = time.monotonic()
        team.call(function)
    assert time.monotonic() - start < LIMIT_S / 4
    assert [process.is_alive() for process in processes] == [False, False]


KILLED_BENCHMARK = """
import os, sys
from benchmarks.ranks import Team
with Team(2) as team:
    team.sleep()
    print(*(process.pid for process in team._processes), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody ends what is stopped")
def test_no_stopped_rank_outlives_a_benchmark_that_is_killed():
    killed = subprocess.run([sys.executable, "-c", KILLED_BENCHMARK], stdout=subprocess.PIPE, text=True, timeout=300)
    assert killed.returncode == -9
    started = [Path("/proc") / pid for pid in killed.stdout.split()]
    assert len(started) == 2
    deadline = time.monotonic() + LIMIT_S
    while any(rank.exists() for rank in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(rank.exists() for rank in started)


class Counted:
    """A turn that tells how often it was called, and whether the one before it was closed."""

    closed = 0

    def __init__(self, side: str, rank: int, start: int) -> None:
        self.told, self.number = (side, rank, start), 0

    def __call__(self) -> tuple[str, int, int, int, int]:
        self.number += 1
        return (*self.told, self.number, Counted.closed)

    def close(self) -> None:
        Counted.closed += 1


def test_sides_take_turns_job_after_job_in_the_same_processes():
    jobs = [Job(("a", "b"), (0,)), Job(("b",), (7,))]
    first, second = jobs_in_turns(2, Counted, jobs, num_rounds=2)
    assert first == {side: [[(side, rank, 0, n, 0) for n in (2, 3)] for rank in (0, 1)] for side in ("a", "b")}
    assert second == {"b": [[("b", rank, 7, n, 1) for n in (2, 3)] for rank in (0, 1)]}


def test_one_command_measures_several_schedules_and_sizes(capfd: pytest.CaptureFixture[str]):
    words = ["--ranks", "2", "--microbatches", "2", "3", "--schedules", "1f1b", "dualpipe"]
    times = ["--forward-ms", "1", "--backward-ms", "2", "--steps", "1"]
    assert main("schedules", [*words, *times, "--json"]) == 0
    out, err = capfd.readouterr()
    rows = json.loads(out)
    sizes = [(name, microbatches) for microbatches in (2, 3) for name in ("1f1b", "dualpipe")]
    assert [(row["schedule"], row["microbatches"]) for row in rows] == sizes
    assert f"{len(sizes)}/{len(sizes)}" in err
    for row in rows:
        program = schedule.lower(schedule.build(row["schedule"], ranks=2, microbatches=row["microbatches"]))
        costs = schedule.Costs(1e-3, 1e-3, 1e-3)
        assert row["penstock"]["simulated_s"] == schedule.simulate(program, costs).makespan
        assert row["penstock"]["ratio"] >= 1
        assert ("torch" in row) == (row["schedule"] != "dualpipe")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "combined-1f1b"])
def test_the_overhead_of_an_action_is_measured_both_ways(name: str, capsys: pytest.CaptureFixture[str]):
    words = ["--schedule", name, "--ranks", "2", "--microbatches", "4", "--steps", "2", "--json"]
    assert main("overhead", words) == 0
    found = json.loads(capsys.readouterr().out)
    for side in ("gloo_us", "in_process_us"):
        least, most = found[side]["range"]
        assert 0 < least <= found[side]["median"] <= most


def test_the_hosts_time_is_measured_beside_plain_loops(capsys: pytest.CaptureFixture[str]):
    words = ["--layers", "1", "--microbatches", "2", "--length", "4", "--tokens", "3", "--rounds", "3", "--json"]
    assert main("host_time", words) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"step_of_own_blocks", "step_of_decoder", "token"}
    for job in found.values():
        quotient = job["engine_ms"]["median"] / job["plain_ms"]["median"]
        assert job["ratio"]["range"][0] / 3 < quotient < 3 * job["ratio"]["range"][1]
