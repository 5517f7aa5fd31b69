"""Everything that ranks do together is bit for bit the same where all that is asynchronous is as late as it may be."""

from pathlib import Path
from typing import Any

import pytest

from tests.late.faults import GENERATION
from tests.late.jobs import JOBS, Job, first_difference, late, plain
from tests.late.operations import Lateness, Operation


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, list[dict[str, Any]]]:
    """What real processes make of the jobs of four ranks."""
    jobs = [job for job in JOBS if job.layout.world_size == 4]
    return dict(zip(jobs, plain(jobs, tmp_path_factory.mktemp("plain")), strict=True))


@pytest.mark.shows(151)
@pytest.mark.parametrize("number", range(len(JOBS)), ids=[str(job) for job in JOBS])
def test_a_late_world_gives_the_bits_of_a_plain_one(
    number: int, by_processes: dict[Job, list[dict[str, Any]]], tmp_path: Path
) -> None:
    job = JOBS[number]
    expected = by_processes.get(job) or late(job, tmp_path / "prompt", Lateness(prompt=True))
    found = late(job, tmp_path / "late", Lateness.of(number % 4))
    assert all(len(of_rank["weights"]) > 3 for of_rank in found)
    assert first_difference(expected, found) is None


def test_a_seed_decides_in_which_order_operations_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    end = Operation.end
    monkeypatch.setattr(Operation, "end", lambda operation: (ended.append(operation.name), end(operation)))
    orders = []
    for seed in (3, 3, 5):
        late(GENERATION, tmp_path, Lateness.of(seed))
        orders.append(tuple(ended))
        ended.clear()
    first, again, other = orders
    assert len(first) > 50 and first == again
    assert first != other and sorted(first) == sorted(other)
