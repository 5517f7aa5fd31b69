"""The examples of models whose layers take and give more than one tensor: they learn, and stages change no bit."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.shows(105)
@pytest.mark.parametrize(
    "name, num_ranks, steps, bound",
    [
        # Letters that nothing is known of cost about 3 nats.
        ("encoder_decoder", 4, 20, 2.7),
        # One of four corners costs 1.39.
        ("vision_language", 2, 40, 0.7),
    ],
)
def test_an_example_learns_in_stages_what_it_learns_in_one_process(
    name: str, num_ranks: int, steps: int, bound: float, tmp_path: Path
) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 100
    staged, alone = tmp_path / f"{name}.py", tmp_path / "alone.py"
    assert f"Layout(pp={num_ranks})" in text and "in range(80):" in text
    staged.write_text(text.replace("in range(80):", f"in range({steps}):"))
    shown = run_ranks_of(staged, num_ranks)
    found = re.fullmatch(rf"step {steps}: (\d\.\d{{4}}) nats a \w+, gradient norm \d+\.\d{{4}}\n", shown)
    assert found and float(found[1]) < bound, shown
    alone.write_text(staged.read_text().replace(f"Layout(pp={num_ranks})", "Layout()"))
    assert run_ranks_of(alone, 1) == shown
