"""The README's example with a user's own layers: it runs as shown, and its stages change no bit."""

import re
from pathlib import Path

from tests.e2e.scripts import run_ranks_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_layers.py"
LINE = r"step 60: (\d\.\d{3}) nats a byte, gradient norm (\d\.\d{3})\n"


def test_the_readme_shows_the_example() -> None:
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    readme = (ROOT / "README.md").read_text()
    assert code and f'```python title="examples/own_layers.py"\n{code}```' in readme
    assert len(code.splitlines()) <= 22


def test_two_stages_learn_what_one_learns(tmp_path: Path) -> None:
    found = re.fullmatch(LINE, run_ranks_of(EXAMPLE, 2))
    assert found and float(found[1]) < 3.0
    alone = tmp_path / "own_layers.py"
    text = EXAMPLE.read_text()
    assert "layout=Layout(pp=2)" in text
    # The example learns its own text, so that must stay: what changes is where the layout comes from.
    alone.write_text(text.replace("Path(__file__)", f"Path({str(EXAMPLE)!r})").replace("Layout(pp=2)", "Layout(pp=1)"))
    assert run_ranks_of(alone, 1) == found[0]
