"""A user's mistake in a script of his own, on eight ranks: one traceback, on his lines, and one line for the others."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.e2e.scripts import LOOPBACK, free_port
from tests.fork_server import Forked, run_script

NUM_RANKS = 8
LIMIT_S = 240.0
# A mistake is told on one screen.
MOST_LINES = 40

SCRIPT = """\
import os
import signal
import sys

import penstock as ps
from penstock.runtime import uncaught

mistake, rank, last = sys.argv[1], int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1
uncaught.PATIENCE_S = float(sys.argv[2])
if mistake == "import":
    import no_such_module  # HERE: import

import torch
import torch.distributed as dist
from torch import nn


class Layer(nn.Module):
    def forward(self, x):
        if mistake == "layer":
            raise ArithmeticError("made to fail")  # HERE: layer
        return x


def loss_fn(logits, microbatch):
    if mistake == "interrupted loss":
        signal.raise_signal(signal.SIGINT)  # HERE: interrupted loss
    if mistake == "loss":
        raise ArithmeticError("made to fail")  # HERE: loss
    return ps.token_cross_entropy(logits, microbatch)


if last > 0:
    dist.init_process_group("gloo")
inner = [Layer() if number == 3 else nn.Linear(4, 4) for number in range(1, 7)]
layers = [nn.Embedding(16, 4), *inner, nn.Linear(4, 16)]
if mistake == "argument":
    ps.Engine.from_layers(layers, 4, schedul="1f1b")  # HERE: argument
if mistake == "two mistakes" and rank in (1, 2):
    {}[rank]  # HERE: two mistakes
if mistake == "interrupt":
    signal.raise_signal(signal.SIGINT)  # HERE: interrupt
engine = ps.Engine.from_layers(layers, 4, ps.Layout(pp=last + 1), device="cpu", timeout_s=60.0)
batch = ps.PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
if mistake == "verb" and rank == 1:
    engine.train_batch([1, 2])  # HERE: verb
if mistake == "between" and rank == last:
    {}["a key"]  # HERE: between
if mistake == "exit" and rank == 1:
    sys.exit(7)
engine.train_batch(batch, loss_fn)  # HERE: layer, loss, interrupted loss, exit
"""


class Ended(NamedTuple):
    err: str
    codes: list[int | None]


def run(
    mistake: str, folder: Path, num_ranks: int = NUM_RANKS, agents_store: bool = True, patience_s: float = LIMIT_S
) -> Ended:
    """The ranks of the script, which end by themselves; `agents_store` as under torchrun, or else rank 0 has it."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    shared = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": LOOPBACK}
    shared |= {"WORLD_SIZE": str(num_ranks)}
    if agents_store:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
        shared |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    else:
        shared |= {"MASTER_PORT": str(free_port())}
    ranks = [
        Forked(run_script, str(script), [mistake, str(patience_s)], environ=shared | {"RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        err = "".join(rank.communicate(LIMIT_S)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return Ended(err, [rank.returncode for rank in ranks])


def check_told_once(err: str, mistake: str, message: str) -> None:
    """One traceback, with all of the caller's lines and none of the package's; then a line for the other ranks."""
    text = re.sub(r"^\[rank\d+\]: ", "", err, flags=re.MULTILINE)
    assert text.count("Traceback (most recent call last)") == 1, err
    assert len(text.splitlines()) <= MOST_LINES, err
    assert f"{os.sep}penstock{os.sep}" not in text, err
    lines = {
        number
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if re.search(rf"# HERE:(.*,)? {mistake}(,|$)", line)
    }
    assert {int(found) for found in re.findall(r'script\.py", line (\d+)', text)} == lines, err
    assert message in text, err


TOLD = {
    # mistake: ranks, and whether torchrun has the store; what is told; of the others
    "import": (8, True, "ModuleNotFoundError: No module named 'no_such_module'", "ranks .* failed in the same way"),
    "argument": (8, True, "ConfigError: an engine has no option 'schedul'", "ranks .* failed in the same way"),
    "interrupt": (8, True, "KeyboardInterrupt", "ranks .* failed in the same way"),
    "layer": (
        8,
        True,
        "StepError: rank 3 failed in 3F0, step 1: ArithmeticError",
        "ranks 0-2, 4-7 ended because of it",
    ),
    "verb": (8, True, "microbatch 0 of 2: batch: an int; give a PackedBatch", "ranks 0, 2-7 ended because of it"),
    "between": (8, False, "KeyError: 'a key'", "ranks 0-6 ended because of it"),
    "loss": (2, False, "StepError: rank 1 failed in 1F0, step 1: ArithmeticError", "rank 0 ended because of it"),
}


@pytest.mark.shows(190)
@pytest.mark.parametrize("mistake", TOLD)
def test_a_mistake_is_told_by_one_rank_in_the_callers_lines(mistake: str, tmp_path: Path) -> None:
    num_ranks, agents_store, message, others = TOLD[mistake]
    ended = run(mistake, tmp_path, num_ranks, agents_store)
    check_told_once(ended.err, mistake, message)
    assert re.fullmatch(rf"(\[rank\d\]: )?penstock: {others}", ended.err.splitlines()[-1]), ended.err
    assert ended.codes == [1] * num_ranks


@pytest.mark.shows(190)
def test_mistakes_of_two_ranks_are_one_traceback_and_one_line(tmp_path: Path) -> None:
    err, _ = run("two mistakes", tmp_path, 3, patience_s=2.0)
    check_told_once(err, "two mistakes", "KeyError: ")
    assert re.search(r"rank (1|2) failed too: KeyError: (1|2) \(script\.py, line \d+\)$", err, re.MULTILINE), err


@pytest.mark.shows(190)
def test_a_rank_that_exits_keeps_its_code_and_the_others_tell_once_whom_they_miss(tmp_path: Path) -> None:
    err, codes = run("exit", tmp_path, 3, patience_s=2.0)
    assert codes == [1, 7, 1]
    check_told_once(err, "exit", "TransportError: ")
    assert "ranks that have ended, or closed this engine: 1\n" in err


@pytest.mark.shows(190)
def test_torchruns_report_begins_with_the_rank_that_failed(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, str(script), "loss", "60"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    ours = "".join(line for line in ended.stderr.splitlines(keepends=True) if line.startswith("[rank"))
    check_told_once(ours, "loss", "StepError: rank 1 failed in 1F0, step 1: ArithmeticError")
    assert len(ours.splitlines()) < 12
    assert ended.stderr.count("Traceback (most recent call last)") == 2, "the other one is torchrun's own"
    assert re.findall(r"  rank +: (\d)", ended.stderr)[-1] == "1", "the first failure comes last in torchrun's report"


@pytest.mark.shows(190)
def test_one_process_alone_ends_by_its_interrupt_and_shows_everything_where_asked(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    ends = [
        subprocess.run(
            [sys.executable, str(script), "interrupted loss", "2"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | environ,
            check=False,
        )
        for environ in ({}, {"PENSTOCK_TRACEBACK": "1"})
    ]
    assert [ended.returncode for ended in ends] == [-signal.SIGINT] * 2
    check_told_once(ends[0].stderr, "interrupted loss", "KeyboardInterrupt")
    assert len(ends[0].stderr.splitlines()) < 10
    assert ends[1].stderr.count(f"{os.sep}penstock{os.sep}") > 10
