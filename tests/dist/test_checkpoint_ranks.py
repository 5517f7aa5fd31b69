"""Checkpoints of several ranks: read under other layouts, and whole after a kill at any moment of any rank."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.checkpoint import AnotherRun, Checkpointer, CheckpointError
from penstock.parallel import Grid, connect
from penstock.settings import Layout
from tests.dist.launch import run_outcomes, run_ranks

IDENTITY = {"seed": 1}
NAMES = [f"layers.{i}.weight" for i in range(6)]
CPU = torch.device("cpu")


def _tensor(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + NAMES.index(name))
    return torch.randn(NAMES.index(name) + 3, 40, generator=generator)


def _tensors(names: list[str], step: int) -> dict[str, Tensor]:
    return {name: _tensor(name, step) for name in names}


def _checkpointer(grid: Grid, folder: Path, keep: int = 2, **options: Any) -> Checkpointer:
    return Checkpointer(folder, grid, IDENTITY, keep, **options)


def _assert_intact(folder: Path, steps: set[int]) -> int:
    """Open the folder as a run of one process does, and compare every tensor of the newest checkpoint."""
    checkpointer = _checkpointer(connect(Layout(), "cpu"), folder)
    info = checkpointer.latest()
    assert info is not None and info.step in steps and not checkpointer.refused
    loaded = {name: torch.zeros_like(_tensor(name, 0)) for name in NAMES}
    checkpointer.load(info, loaded)
    assert all(torch.equal(loaded[name], _tensor(name, info.step)) for name in NAMES)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return info.step


# ---- layouts


def _save_replicated(rank: int, folder: Path) -> list[str]:
    checkpointer = _checkpointer(connect(Layout(dp=2), "cpu"), folder)
    checkpointer.save(5, {**_tensors(NAMES, 5), f"rng.{rank}": torch.full((4,), rank)}, wait=True)
    info = checkpointer.latest()
    assert info is not None
    own = {f"rng.{rank}": torch.full((4,), -1)}
    checkpointer.load(info, own)
    assert own[f"rng.{rank}"].tolist() == [rank] * 4
    return sorted(info.files)


def test_what_replicas_hold_alike_is_written_once_and_by_both_in_turn(tmp_path: Path) -> None:
    files = run_ranks(2, _save_replicated, tmp_path)
    assert files[0] == files[1] and len(files[0]) == 2
    sizes = [(tmp_path / "step-00000005" / name).stat().st_size for name in files[0]]
    total = sum(_tensor(name, 5).nbytes for name in NAMES)
    assert total < sum(sizes) < 1.5 * total and max(sizes) < 0.75 * sum(sizes)


# ---- all ranks fail alike


def _fail_alike(rank: int, folder: Path) -> list[str]:
    grid = connect(Layout(pp=2), "cpu")
    checkpointer = _checkpointer(grid, folder)
    messages = []

    def expect(kind: type[Exception], act: Any) -> None:
        try:
            act()
        except kind as error:
            messages.append(str(error))

    expect(ValueError, lambda: checkpointer.save(rank, {}))
    expect(ValueError, lambda: checkpointer.save(1, {"a": torch.zeros(rank + 1)}))
    checkpointer.save(1, {f"a{rank}": torch.zeros(3)}, wait=True)
    info = checkpointer.latest()
    assert info is not None
    expect(ValueError, lambda: checkpointer.load(info, {"a1": torch.zeros(3 + rank)}))
    expect(AnotherRun, lambda: Checkpointer(folder, grid, {"seed": 2}))
    if rank == 1:
        # Rank 1 cannot write what rank 0 has prepared.
        sys.modules[Checkpointer.__module__].write_tensors = None  # type: ignore[attr-defined]
    checkpointer.save(2, {f"a{rank}": torch.zeros(3)})
    expect(CheckpointError, checkpointer.finish)
    assert checkpointer.latest() == info
    return messages


def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for messages in run_ranks(2, _fail_alike, tmp_path):
        steps, shapes, loaded, run, written = messages
        assert "different steps: [0, 1]" in steps
        assert "a is [1] of float32 on rank 0 and [2] of float32 on rank 1" in shapes
        assert "a1 has the shape (4,)" in loaded
        assert "seed (2 here, 1 there)" in run
        assert "step 2 could not be saved: rank 1: TypeError" in written


# ---- killed at any moment

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")


class _KillSwitch:
    """Kills this process at its n-th access to the checkpoint folder's files, wherever in the code that is."""

    def __init__(self, folder: Path, at: int | None) -> None:
        self.count = 0
        self._folder, self._at = str(folder), at
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and str(args[0]).startswith(self._folder)):
            self.count += 1
            if self.count == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


def _save_until_killed(rank: int, folder: Path, kills: dict[int, int | None]) -> int:
    """Save step 1 in peace; then 2, 2 once more over itself, and 3, which removes 1."""
    grid = connect(Layout(pp=dist.get_world_size()), "cpu")
    checkpointer = _checkpointer(grid, folder)
    names = NAMES[rank :: grid.world_size]
    checkpointer.save(1, _tensors(names, 1), wait=True)
    switch = _KillSwitch(folder, kills.get(rank))
    for step in (2, 2, 3):
        checkpointer.save(step, _tensors(names, step), wait=True)
    return switch.count


def _sweep(tmp_path: Path, world: int, rank: int, stride: int, others_too: bool = False) -> None:
    """Kill one rank (or all) at its 1st, (1+stride)th, ... access; what is found afterwards never goes back."""
    (tmp_path / "whole").mkdir()
    num_accesses = run_ranks(world, _save_until_killed, tmp_path / "whole", {})[rank]
    assert num_accesses >= 6 and _assert_intact(tmp_path / "whole", {3}) == 3
    found = []
    for at in range(1, num_accesses + 1, stride):
        folder = tmp_path / f"killed-at-{at}"
        kills = dict.fromkeys(range(world), at) if others_too else {rank: at}
        outcomes = run_outcomes(world, _save_until_killed, folder, kills, timeout_s=30)
        assert outcomes[rank].exit_code == -signal.SIGKILL
        assert all(outcome.error and "had not ended" not in outcome.error for outcome in outcomes)
        found.append(_assert_intact(folder, {1, 2, 3}))
    assert found == sorted(found) and {1, 2} <= set(found)


@pytest.mark.shows(97)
def test_a_kill_at_any_access_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    _sweep(tmp_path, world=1, rank=0, stride=1)


@pytest.mark.shows(97)
@pytest.mark.parametrize("rank, stride, others_too", [(0, 5, False), (1, 2, False), (0, 7, True)])
def test_a_kill_of_any_rank_leaves_an_intact_checkpoint(
    tmp_path: Path, rank: int, stride: int, others_too: bool
) -> None:
    _sweep(tmp_path, world=2, rank=rank, stride=stride, others_too=others_too)
