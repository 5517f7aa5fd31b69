"""The example of a loop taken over: it prints the same in any number of stages, and goes on in another one."""

from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "from_a_training_loop.py"


@pytest.mark.shows(189)
def test_the_example_is_the_same_in_any_number_of_stages_and_goes_on(tmp_path: Path) -> None:
    shown = {}
    for num_ranks in (1, 2, 3):
        (folder := tmp_path / str(num_ranks)).mkdir()
        shown[num_ranks] = run_ranks_of(EXAMPLE, num_ranks, "10", folder=folder)
    lines = shown[1].splitlines()
    assert shown[1] == shown[2] == shown[3] and [line.partition(":")[0] for line in lines] == ["step 5", "step 10"]
    assert run_ranks_of(EXAMPLE, 1, "15", folder=tmp_path / "3").startswith("step 15: loss 2.5")
