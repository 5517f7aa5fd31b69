"""The examples of models whose layers take and give more than one tensor: they learn, and stages change no bit."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.shows(105)
@pytest.mark.parametrize("name, num_ranks, bound", [("encoder_decoder", 4, 2.2), ("vision_language", 2, 0.1)])
def test_an_example_learns_in_stages_what_it_learns_in_one_process(
    name: str, num_ranks: int, bound: float, tmp_path: Path
) -> None:
    path, few, shown = EXAMPLES / f"{name}.py", 20, dict[str, str]()
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    of_one = text.replace(f"Layout(pp={num_ranks})", "Layout()")
    assert of_one != text and "range(80)" in text
    for kind, script, ranks in (
        ("stages", text.replace("range(80)", f"range({few})"), num_ranks),
        ("one process", of_one.replace("range(80)", f"range({few})"), 1),
        ("to the end", of_one, 1),
    ):
        (file := tmp_path / path.name).write_text(script)
        shown[kind] = run_ranks_of(file, ranks)
    assert shown["stages"] == shown["one process"] != ""
    found = re.fullmatch(r"step 80: (\d\.\d{4}) nats a \w+, gradient norm \d+\.\d{4}\n", shown["to the end"])
    assert found and float(found[1]) < bound, shown
