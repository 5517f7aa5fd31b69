"""The examples of models whose layers take and give more than one tensor: they learn, and stages change no bit."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.shows(105)
@pytest.mark.parametrize("name, num_ranks, bound", [("encoder_decoder", 4, 2.2), ("vision_language", 2, 0.1)])
def test_an_example_learns_in_stages_what_it_learns_in_one_process(
    name: str, num_ranks: int, bound: float, tmp_path: Path
) -> None:
    path = EXAMPLES / f"{name}.py"
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    shown = run_ranks_of(path, num_ranks)
    found = re.fullmatch(r"step 80: (\d\.\d{4}) nats a \w+, gradient norm \d+\.\d{4}\n", shown)
    assert found and float(found[1]) < bound, shown
    assert f"Layout(pp={num_ranks})" in text
    alone = tmp_path / path.name
    alone.write_text(text.replace(f"Layout(pp={num_ranks})", "Layout()"))
    assert run_ranks_of(alone, 1) == shown
