"""No command ends without a word: a slow report is waited for, and whatever ended a process is named."""

import builtins
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main as penstock
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.meeting import find_group
from penstock.cli.processes.session import work_together
from penstock.engine.engine import Engine
from tests.fork_server import Forked
from tests.hugging_face import make_model

# Longer than a launcher lets others go on once one worker has failed.
SLOW_S = 2.5


def main(words: Sequence[str]) -> int:
    """What each worker does."""
    group = find_group(os.environ)
    assert group is not None
    if words == ["killed"]:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return 0
    own_print = builtins.print

    def slowly(*given: Any, **arguments: Any) -> None:
        time.sleep(SLOW_S)
        own_print(*given, **arguments)

    builtins.print = slowly

    def refuse(store: object) -> int:
        raise ValueError("there is no such text")

    return work_together(group, 1, 30.0, refuse)


def launched(word: str) -> int:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    return launch(WorkerCommand(__name__, "does it again", ()), [word], 2, 1)


@pytest.mark.parametrize(
    "word, code, told",
    [
        ("refused", 2, r"penstock: there is no such text\n"),
        ("killed", 1, r"penstock: rank 1 \(process \d+\) was killed by SIGTERM; the same command does it again\n"),
    ],
)
def test_a_command_that_fails_says_why(word: str, code: int, told: str) -> None:
    process = Forked(launched, word, environ=dict(os.environ))
    _, err = process.communicate(60)
    assert process.returncode == code
    assert re.fullmatch(told, err), err


def test_scores_stay_where_closing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"tokens": [5, 6, 7]}\n')
    close = Engine.close

    def fails(engine: Engine) -> None:
        close(engine)
        raise RuntimeError("a peer has gone")

    monkeypatch.setattr(Engine, "close", fails)
    assert penstock(["score", str(tmp_path / "model"), str(tmp_path / "texts.jsonl")]) == 1
    assert len((tmp_path / "texts.scores.jsonl").read_text().splitlines()) == 1
