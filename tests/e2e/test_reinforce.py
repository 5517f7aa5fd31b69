"""The example that needs training, scoring and generation: it runs as shown and learns; here to a lower goal."""

import re
from pathlib import Path

import pytest

from tests.e2e.scripts import run_ranks_of
from tests.e2e.test_own_layers import ROOT

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLE = ROOT / "examples" / "reinforce.py"
LINE = r"round +(\d+), +\d+ s: +(\d+\.\d)% right, entropy (\d\.\d\d), importance weights 1 ± (\S+)"


def test_two_stages_learn_sums_from_reward(tmp_path: Path) -> None:
    lines = [re.fullmatch(LINE, line) for line in run_ranks_of(EXAMPLE, 2, "--goal", "0.5").splitlines()]
    told = [[float(value) for value in line.groups()] for line in lines if line]
    assert len(told) == len(lines) >= 2
    assert told[0][0] == 1 and told[0][1] < 30, "it starts out knowing little"
    assert told[-1][1] > 50
    assert all(off < 1e-5 for *_, off in told), "an unchanged model is as likely to say what it said"
