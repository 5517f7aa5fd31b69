"""Faults that a quick network hides are found in a late world, and most of them by name."""

import re
from pathlib import Path

import pytest

from tests.late.faults import FAULTS
from tests.late.jobs import first_difference, late
from tests.late.operations import Lateness


@pytest.mark.shows(151)
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    with fault.planted():
        try:
            outcome = late(fault.job, tmp_path / "late", Lateness())
        except Exception as error:
            assert re.search(fault.words, str(error)), str(error)
            return
    assert fault.words == "differs"
    clean = late(fault.job, tmp_path / "clean", Lateness(prompt=True))
    assert first_difference(clean, outcome) is not None
