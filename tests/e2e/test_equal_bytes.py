"""Runs with the same settings leave the same bytes: nothing in a checkpoint depends on when or where it was written."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.training import exact_metrics, run, write_run

STEPS = 6
WITHOUT_TIMES = ("--exclude", "metrics.jsonl")


def trained(folder: Path, words: Sequence[str], again_from: int | None = None) -> Path:
    """The folder of a run under another name, so that the next has its own; with a step, the run goes on from it."""
    file, output = write_run(folder, "run", STEPS), folder / "run"
    given = [str(file), *words, "--checkpoint.every", "2", "--validation.every", "0"]
    if again_from is not None:
        ended = run(*given)
        assert ended.exit_code == 0, ended.err
        for step in range(again_from + 2, STEPS + 1, 2):
            shutil.rmtree(output / "checkpoints" / f"step-{step:08d}")
    ended = run(*given)
    assert ended.exit_code == 0, ended.err
    assert f"after step {again_from}" in ended.out or again_from is None
    return output.rename(folder / f"{len(list(folder.iterdir()))}-times-moved")


@pytest.mark.shows(170)
@pytest.mark.parametrize(
    "words",
    [
        ("--parallel.pp", "1"),
        ("--parallel.pp", "2"),
        ("--parallel.pp", "1", "--parallel.dp", "2", "--optimizer.name", "adamw", "--train.precision", "bf16"),
    ],
    ids=("one rank", "two stages", "ZeRO in bf16"),
)
def test_runs_with_the_same_settings_leave_the_same_bytes_also_where_one_was_resumed(
    tmp_path: Path, words: Sequence[str]
):
    one, other = trained(tmp_path, words), trained(tmp_path, words, again_from=2)
    assert len(list((one / "checkpoints").rglob("*.safetensors"))) >= 3
    found = subprocess.run(["diff", "-r", *WITHOUT_TIMES, one, other], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    assert exact_metrics(one) == exact_metrics(other) != {}
