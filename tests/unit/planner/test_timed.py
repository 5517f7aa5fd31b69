"""Planning for clusters of three sizes: the same plan every time, within its seconds and bytes."""

import pytest

from penstock.planner.timed import BYTES_ALLOWED, SECONDS_ALLOWED, SIZES, measure


@pytest.mark.shows(145)
def test_plans_are_the_same_every_time_and_take_less_than_is_allowed():
    """A twentieth of the usual effort, in a twentieth of what the usual one may take and the time of the bounds."""
    rows = list(measure(SIZES, 0.05, lambda line: None))
    assert [row["devices"] for row in rows] == [64, 1024, 10_240]
    for row in rows:
        assert row["same_plan"] and row["simulated"] > 1
        assert row["seconds"] < SECONDS_ALLOWED / 20 + 10.0 and 0 < row["peak_bytes"] < BYTES_ALLOWED
