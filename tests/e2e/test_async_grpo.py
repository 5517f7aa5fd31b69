"""The example that generates and trains at the same time: it learns, from no answer that is older than its bound."""

import ast
import importlib.util
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import PackedBatch
from tests.e2e.scripts import run_ranks_of
from tests.e2e.test_own_layers import ROOT

pytestmark = pytest.mark.subject("examples/**/*", "src/penstock/**/*.py")
EXAMPLE = ROOT / "examples" / "async_grpo.py"
LINE = r"(\w+) round +(\d+), +\d+ s: +(\d+\.\d)% right, answers by age (\{.*\}), (\d+) too old; \S+ \+ \S+ s a round"
BOUND = 5


def example() -> Any:
    spec = importlib.util.spec_from_file_location("async_grpo", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.shows(127)
def test_both_loops_learn_and_answers_stay_within_their_bounds() -> None:
    given = ("--compare", "--goal", "0.3", "--token-s", "0.02", "--step-s", "0.05", "--bound", str(BOUND))
    *lines, last = run_ranks_of(EXAMPLE, 4, *given).splitlines()
    told = [found.groups() for line in lines if (found := re.fullmatch(LINE, line))]
    assert len(told) == len(lines) >= 4
    for name, bound in (("synchronous", 0), ("asynchronous", BOUND)):
        shares = [float(line[2]) for line in told if line[0] == name]
        ages = ast.literal_eval([line[3] for line in told if line[0] == name][-1])
        assert shares[0] < 30 <= shares[-1], "it starts out knowing little, and reaches the goal"
        assert set(ages) <= set(range(bound + 1)) and ages[0] > 0
        assert (max(ages) > 0) == (name == "asynchronous"), "answers are drawn while others are learned from"
    assert [line[4] for line in told] == ["0"] * len(told), "no answer is drawn in vain"
    assert re.fullmatch(r"time to 30% right: \d+ s and \d+ s, \d+\.\d\d times", last)


class OldAnswers:
    """A store with answers of all ages, and an engine that notes which it is to learn from."""

    def __init__(self, module: Any, bound: int, version: int) -> None:
        self.bound, self.version, self.grid = bound, version, SimpleNamespace(rank=0)
        self.module, self.learned = module, list[tuple[int, set[int]]]()

    def get(self, key: str) -> str:
        # The first token of each answer is its age as of now.
        every = [([1], [age], [0.0], 1.0, self.version - age) for age in range(2 * self.bound)]
        return json.dumps([1.0, 0.0, every])

    def train_batch(self, batch: PackedBatch, *given: Any, **named: Any) -> None:
        if given:
            self.learned.append((self.version, set(batch["labels"][batch["labels"] >= 0].tolist())))
            self.version += 1

    def ignore(self, *given: Any) -> None:
        """Take any call."""

    set = delete_key = send_weights = ignore


def test_answers_older_than_the_bound_are_never_learned_from() -> None:
    module = example()
    old = OldAnswers(module, bound=3, version=10)
    run = module.Run("run", old.bound, 0.5, 0.0, 0.0, old)
    module.learn(run, old, old)
    assert len(old.learned) == 5 * module.UPDATES
    for number, (_, ages) in enumerate(old.learned):
        # By a further step on them all have grown older by one.
        assert ages == set(range(old.bound + 1 - number % module.UPDATES))
