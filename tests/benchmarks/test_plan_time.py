"""Planning for clusters of three sizes: the same plan every time, within its seconds and bytes."""

import resource
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.plan_time import BYTES_ALLOWED, SECONDS_ALLOWED, SIZES, PlanSize, plan_twice

from benchmarks import plan_time
from penstock.planner.search import Plan, plan

pytestmark = pytest.mark.subject(
    "src/penstock/planner/*.py",
    "src/penstock/schedule/**/*.py",
    "src/penstock/settings/layout.py",
    "benchmarks/plan_time.py",
)


@pytest.mark.shows(145)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.devices} devices")
def test_plans_are_the_same_every_time_and_take_less_than_is_allowed(size: PlanSize):
    """With the whole of the usual effort, and of processor time: how long it takes depends on what else is running."""
    (row,) = plan_twice([size], 1.0)
    assert row["same_plan"] and row["simulated"] > 20
    assert 0 < row["seconds"] < SECONDS_ALLOWED and 0 < row["peak_bytes"] < BYTES_ALLOWED


def test_what_a_plan_leaves_to_other_processes_counts(monkeypatch: pytest.MonkeyPatch):
    more = 64 * 2**20
    before = plan_time.peak_bytes()
    held = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 + more
    work = f"import time; held = b'1' * {held}\nwhile time.process_time() < 1.0: pass"

    def leaves_it(*arguments: Any, **options: Any) -> Plan:
        subprocess.run([sys.executable, "-c", work], check=True)
        return plan(*arguments, **options)

    monkeypatch.setattr(plan_time, "plan", leaves_it)
    found = plan_time._plan(SIZES[0], 0.01)
    assert found["seconds"] > 1.0 and found["peak_bytes"] >= before + more
