"""The examples that learn from preferences and from reward run as shown, in two stages, and learn."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_stages_learn_a_preference() -> None:
    shown = run_ranks_of(EXAMPLES / "dpo.py", 2)
    found = re.search(r"(\d+)% of answers counted up, (\d+)% do now\n$", shown)
    assert found, shown
    before, after = map(int, found.groups())
    assert before < 75 and after > before + 15


@pytest.mark.shows(128)
@pytest.mark.parametrize("temperature", ["1.0", "0.8"])
def test_two_stages_learn_from_the_rewards_of_groups_whose_importance_ratios_are_exactly_1(
    temperature: str, tmp_path: Path
) -> None:
    example, text = tmp_path / "grpo.py", (EXAMPLES / "grpo.py").read_text()
    assert "TEMPERATURE = 1.0" in text
    example.write_text(text.replace("TEMPERATURE = 1.0", f"TEMPERATURE = {temperature}"))
    shown = run_ranks_of(example, 2, "--goal", "0.15", "--reproducible")
    rows = re.findall(r"round +\d+, +\d+ s: reward (\d\.\d+), importance ratios 1 ± (\S+), (\d+\.\d+) nats", shown)
    assert len(rows) == len(shown.splitlines()) >= 2
    rewards, ratios, divergences = (list(map(float, column)) for column in zip(*rows, strict=True))
    assert rewards[0] < 0.05 and rewards[-1] > 0.15
    assert max(ratios) == 0, "an unchanged model is as likely to say what it said, to the bit"
    assert min(divergences) > 0


def test_two_stages_learn_rewards_from_comparisons(tmp_path: Path) -> None:
    short = tmp_path / "reward_model.py"
    text = (EXAMPLES / short.name).read_text()
    assert "STEPS, NUM_PAIRS = 80, 32" in text
    short.write_text(text.replace("STEPS, NUM_PAIRS = 80, 32", "STEPS, NUM_PAIRS = 20, 32"))
    shown = run_ranks_of(short, 2)
    found = re.search(r"(\d+)% of new pairs right\n.*: \+\d\.\d\d, .*: -\d\.\d\d\n$", shown)
    assert found, shown
    assert int(found[1]) > 90
