"""The example that brings a plain training loop: its losses are Penstock's, in one process and in stages."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "bring_your_script.py"


@pytest.mark.shows(118)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_loop_and_penstock_print_equal_losses(num_ranks: int) -> None:
    shown = run_ranks_of(EXAMPLE, num_ranks)
    losses = re.findall(r"step (\d+): (\d\.\d{4}) plain, (\d\.\d{4}) with Penstock", shown)
    assert [int(step) for step, _, _ in losses] == list(range(1, 11))
    assert all(plain == ours for _, plain, ours in losses)
    assert float(losses[-1][2]) < float(losses[0][2]) - 0.5
