"""Mistakes end a run before it starts: one sentence, exit code 2, nothing written; silent peers end it in time."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.model import decoder_units
from penstock.settings import read_config
from tests.e2e.scripts import free_port
from tests.e2e.training import Ended, Started, last_step, wait_until, write_run


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file but the cache of tokenised text, which is nobody's result."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def is_one_sentence(text: str) -> bool:
    return text.startswith("penstock: ") and text.endswith("\n") and text.count("\n") == 1


NEW = ["--output", "FOLDER/new"]
REFUSED = {
    "missing corpus": ([*NEW, "--data.corpus", "nowhere.txt"], "no corpus at 'nowhere.txt'"),
    "empty corpus": ([*NEW, "--data.corpus", "FOLDER/empty.txt"], "is empty"),
    "short corpus": ([*NEW, "--data.corpus", "FOLDER/short.txt"], "holds .* tokens; a window of 32 needs at least 33"),
    "corpus of an unknown kind": ([*NEW, "--data.corpus", "FOLDER/photo.jpeg"], r"'.jpeg'; a corpus ends in one of"),
    "missing tokenizer": ([*NEW, "--data.tokenizer", "nowhere.json"], "no tokenizer at 'nowhere.json'"),
    "token outside the vocabulary": ([*NEW, "--model.vocab_size", "65"], r"token \d+ .*outside .*65; .* at least \d+"),
    "more stages than units": (["--parallel.pp", "7"], "7 stages.* 6 units .*at most 6"),
    "heads": (["--model.num_heads", "3"], "num_heads = 3 does not divide"),
    "microbatches": (["--train.num_microbatches", "9"], "9 is more than the 8 sequences"),
    "unknown setting": (["--train.step", "3"], "no setting train.step; the nearest one is train.steps"),
    "wrong type": (["--train.steps", "many"], "train.steps = 'many': expected int"),
    "no run to resume": (["--resume", "--output", "FOLDER/new"], "holds no run to continue"),
    "another run": (["--train.seed", "1"], r"holds another run: train.seed \(1 here, 0 there\)"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of two steps and things that are no run."""
    folder = tmp_path_factory.mktemp("refusals")
    for name in ("empty.txt", "photo.jpeg"):
        (folder / name).touch()
    (folder / "short.txt").write_text("too little")
    assert main(["train", str(write_run(folder, "run", 8)), "--parallel.pp", "1"]) == 0
    return folder


@pytest.mark.parametrize("words, told", REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_told_in_one_sentence_and_changes_nothing(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    before = files_of(folder)
    assert "run/run.toml" in before
    capsys.readouterr()
    code = main(["train", str(folder / "run.toml"), *(word.replace("FOLDER", str(folder)) for word in words)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert is_one_sentence(err), err
    assert re.search(told, err), err
    assert files_of(folder) == before


def test_a_dry_run_says_what_would_be_and_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]):
    before = files_of(folder)
    file = folder / "run.toml"
    plans = {}
    for recompute in ("none", "full"):
        assert main(["train", str(file), "--dry-run", "--json", "--train.recompute", recompute]) == 0
        plans[recompute] = json.loads(capsys.readouterr().out)
    plan = plans["none"]
    units = decoder_units(read_config(file).model.whole(256))
    assert [name for stage in plan["stages"] for name in stage["units"]] == [unit.name for unit in units]
    assert sum(stage["num_parameters"] for stage in plan["stages"]) == sum(unit.num_parameters for unit in units)
    assert plan["num_parameters"] == sum(unit.num_parameters for unit in units) - 256 * 16, "a tied head has no own"
    assert sum(stage["share_of_work"] for stage in plan["stages"]) == pytest.approx(1.0)
    assert (plan["world_size"], plan["schedule"], plan["peak_live_microbatches"]) == (2, "1f1b", [2, 1])
    for plain, recomputed in zip(plan["stages"], plans["full"]["stages"], strict=True):
        assert 0 < recomputed["microbatch_bytes"] < plain["microbatch_bytes"]
    assert main(["train", str(file), "--dry-run"]) == 0
    assert "embedding ... layers.0.mlp (3)" in capsys.readouterr().out
    assert files_of(folder) == before


def run_as_group(file: Path, words_of_ranks: list[list[str]]) -> list[Ended]:
    """Start each rank as torchrun or Kubernetes would, with words of its own."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(words_of_ranks))}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(Started([str(file), *words], {**shared, "RANK": str(rank)}))
            for rank, words in enumerate(words_of_ranks)
        ]
        return [rank.end() for rank in ranks]


def test_ranks_with_different_settings_are_refused_by_name(tmp_path: Path):
    file = write_run(tmp_path, "run", 8)
    before = files_of(tmp_path)
    ended = run_as_group(file, [[], ["--optimizer.beta1", "0.8"]])
    assert [rank.exit_code for rank in ended] == [2, 2]
    told = [rank.err for rank in ended if rank.err]
    assert len(told) == 1, "one rank tells for all"
    assert is_one_sentence(told[0]), told[0]
    assert "these differ: optimizer.beta1 (0.8 on rank 1, 0.9 on rank 0)" in told[0]
    assert files_of(tmp_path) == before


@pytest.mark.shows(148)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--parallel.pp", "8000", "--model.num_layers", "16384"],
            "needs 8000 processes, but there are 2; start as many",
        ),
        (["--model.vocab_size", "2000000000"], "model.vocab_size = 2000000000, .* need at least"),
    ],
)
def test_a_group_refuses_sizes_before_any_work(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file, group = write_run(tmp_path, "run", 8), {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    began = time.process_time()
    assert main(["train", str(file), "--parallel.device", "cpu", *words]) == 2
    assert time.process_time() - began < 2
    err = capsys.readouterr().err
    assert is_one_sentence(err), err
    assert re.search(told, err), err


@pytest.mark.shows(99)
def test_when_a_rank_hangs_every_other_tells_where_it_waits_and_ends_in_time(tmp_path: Path):
    timeout_s = 4.0
    file, output = write_run(tmp_path, "run", 100000), tmp_path / "run"
    with Started([str(file), "--parallel.pp", "3", "--parallel.timeout_s", str(timeout_s)]) as started:
        wait_until(lambda: last_step(output) >= 5, started)
        hanging = started.workers()[1]
        os.kill(hanging, signal.SIGSTOP)
        stopped_at = time.monotonic()
        wait_until(lambda: started.workers() == [hanging], started)
        taken_s = time.monotonic() - stopped_at
        os.kill(hanging, signal.SIGKILL)
        ended = started.end()
    # The watchdog allows the backend's own timeout a margin of 2 s; the rest is this machine's own.
    assert taken_s < timeout_s + 2 + 10
    assert ended.exit_code == 1
    assert "Traceback" not in ended.err
    for rank in (0, 2):
        lines = [line for line in ended.err.splitlines() if line.startswith(f"penstock: process {rank}:")]
        assert len(lines) == 1, ended.err
        line = lines[0]
        waits = rf"rank {rank}, step \d+: in \d(F|B)\d+ for .*microbatch \d+ from rank 1.* after [\d.]+ s"
        between = rf"rank {rank}, step \d+: while the ranks .*gave up after [\d.]+ s"
        assert re.search(f"{waits}|{between}", line), line
