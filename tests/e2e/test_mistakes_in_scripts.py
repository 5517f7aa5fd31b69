"""A user's mistake in a script of his own, on eight ranks: one traceback, and one line for each other rank."""

import os
import re
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

SCRIPT = """\
import os
import sys

import penstock as ps
import torch
import torch.distributed as dist
from torch import nn

mistake, rank, last = sys.argv[1], int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1


class Layer(nn.Module):
    def forward(self, x):
        if mistake == "layer":
            raise ArithmeticError("made to fail")  # HERE: layer
        return x


def loss_fn(logits, microbatch):
    if mistake == "loss":
        raise ArithmeticError("made to fail")  # HERE: loss
    return ps.token_cross_entropy(logits, microbatch)


if last > 0:
    dist.init_process_group("gloo")
inner = [Layer() if number == 3 else nn.Linear(4, 4) for number in range(1, 7)]
layers = [nn.Embedding(16, 4), *inner, nn.Linear(4, 16)]
engine = ps.Engine.from_layers(layers, 4, ps.Layout(pp=last + 1), device="cpu", timeout_s=60.0)
batch = ps.PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
if mistake == "verb" and rank == 1:
    engine.train_batch([1, 2])  # HERE: verb
if mistake == "between" and rank == last:
    {}["a key"]  # HERE: between
if mistake == "exit" and rank == 1:
    sys.exit(7)
engine.train_batch(batch, loss_fn)  # HERE: call
"""


class Ended(NamedTuple):
    errs: list[str]
    codes: list[int | None]


def run(mistake: str, folder: Path, num_ranks: int = NUM_RANKS, agents_store: bool = True) -> Ended:
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
        Forked(run_script, str(script), [mistake], environ=shared | {"RANK": str(rank)}) for rank in range(num_ranks)
    ]
    try:
        errs = [rank.communicate(LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return Ended(errs, [rank.returncode for rank in ranks])


def line_of(mistake: str) -> int:
    """The line of the script that is at fault, or at which the mistake of another rank is met."""
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# HERE: {mistake}" in line)


TOLD = {
    # mistake: ranks, and whether torchrun has the store; who made it, and what is told of it
    "layer": (8, True, 3, "StepError: rank 3 failed in 3F0, step 1: ArithmeticError"),
    "verb": (8, True, 1, "microbatch 0 of 2: batch: an int; give a PackedBatch"),
    "between": (8, True, 7, "KeyError: 'a key'"),
    "loss": (2, False, 1, "StepError: rank 1 failed in 1F0, step 1: ArithmeticError"),
}


@pytest.mark.shows(190)
@pytest.mark.parametrize("mistake", TOLD)
def test_a_mistake_is_told_by_the_rank_that_made_it_and_by_each_other_in_a_line(mistake: str, tmp_path: Path) -> None:
    num_ranks, agents_store, failed, message = TOLD[mistake]
    ended = run(mistake, tmp_path, num_ranks, agents_store)
    own = ended.errs.pop(failed)
    assert "Traceback (most recent call last)" in own and message in own, own
    assert f'script.py", line {line_of(mistake)}' in own, own
    for err in ended.errs:
        assert re.fullmatch(rf"(\[rank\d\]: )?\w+Error: .*script\.py, line {line_of('call')}\)\n", err), err
    assert ended.codes == [1] * num_ranks


@pytest.mark.shows(190)
def test_a_rank_that_exits_keeps_its_code_and_the_others_tell_whom_they_miss(tmp_path: Path) -> None:
    errs, codes = run("exit", tmp_path, 3)
    assert codes == [1, 7, 1]
    for err in (errs[0], errs[2]):
        assert err.count("\n") == 1 and "ranks that have ended, or closed this engine: 1 (" in err, err


@pytest.mark.shows(190)
def test_torchruns_report_begins_with_the_rank_that_failed_and_has_its_traceback(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, str(script), "loss"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    report = ended.stderr.partition("Root Cause (first observed failure):")[2]
    assert re.findall(r"  rank +: (\d)", report)[:1] == ["1"], ended.stderr
    assert f'script.py", line {line_of("loss")}' in report, ended.stderr


@pytest.mark.shows(190)
def test_a_hook_of_the_users_own_stands() -> None:
    program = "import sys; own = sys.excepthook = lambda *_: None; import penstock; assert sys.excepthook is own"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
