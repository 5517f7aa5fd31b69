"""Checkpoints of one rank: what is read is what was saved, and what was damaged is refused by name."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.checkpoint import AnotherRun, Checkpointer
from penstock.engine.checkpoint.manifest import (
    CheckpointError,
    CheckpointInfo,
    DamagedCheckpoint,
    check_files,
    read_manifest,
)
from penstock.parallel import connect
from penstock.settings import Layout
from tests.forged import forge
from tests.plain_user import plain_user

IDENTITY = {"model.num_layers": 2, "optimizer.learning_rate": 0.001}


def _checkpointer(folder: Path, keep: int = 3, **options: Any) -> Checkpointer:
    return Checkpointer(folder, connect(Layout(), "cpu"), IDENTITY, keep, **options)


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {
        "layers.0.mlp.up.weight": draw(16, 24),
        "optimizer.exp_avg.layers.0.mlp.up.weight": draw(16, 24),
        "norm.weight": draw(24).to(torch.bfloat16),
        "half": draw(5).to(torch.float16),
        "double": draw(3, 1, 2).to(torch.float64),
        "rng.rank0": torch.randint(0, 256, (5056,), generator=generator, dtype=torch.uint8),
        "count": torch.tensor(seed, dtype=torch.int64),
        "nothing": torch.empty(0, 7),
        # Neither contiguous nor at the head of its storage.
        "view": draw(8, 8)[2:, 1:4].t(),
    }


def _save(folder: Path, steps: list[int], keep: int = 9) -> None:
    checkpointer = _checkpointer(folder, keep)
    for step in steps:
        checkpointer.save(step, _tensors(step), {"step": step})
    checkpointer.finish()


def _load(checkpointer: Checkpointer, info: CheckpointInfo) -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in _tensors(0).items()}
    checkpointer.load(info, tensors)
    return tensors


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- round trip


@pytest.mark.shows(96)
def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    extra = {"loader": {"epoch": 3, "position": [1, 2]}, "text": "é", "none": None, "rate": 0.1}
    checkpointer = _checkpointer(tmp_path / "deep" / "checkpoints", standalone=True)
    assert checkpointer.latest() is None
    checkpointer.save(7, _tensors(7), extra, wait=True)
    resumed = _checkpointer(tmp_path / "deep" / "checkpoints", standalone=True)
    info = resumed.latest()
    assert info is not None and (info.step, info.extra, info.identity) == (7, extra, IDENTITY)
    assert _equal(_load(resumed, info), _tensors(7))
    assert {name: record.shape for name, record in info.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in _tensors(7).items()
    }
    part = {"view": torch.zeros(3, 6)}
    resumed.load(info, part)
    assert torch.equal(part["view"], _tensors(7)["view"])


def test_loading_is_in_place_into_parameters_and_views(tmp_path: Path) -> None:
    _save(tmp_path, [1])
    flat = torch.zeros(1000)
    tensors = {"layers.0.mlp.up.weight": torch.nn.Parameter(torch.zeros(16, 24)), "double": flat[10:16].view(3, 1, 2)}
    checkpointer = _checkpointer(tmp_path)
    info = checkpointer.latest()
    assert info is not None
    checkpointer.load(info, tensors)
    assert torch.equal(tensors["layers.0.mlp.up.weight"], _tensors(1)["layers.0.mlp.up.weight"])
    assert torch.equal(flat[10:16], _tensors(1)["double"].flatten().float()) and not flat[16:].any()


def test_a_tensor_may_have_another_type_or_shape_at_each_save(tmp_path: Path) -> None:
    checkpointer, weight = _checkpointer(tmp_path), torch.randn(4, 6, dtype=torch.float64)
    for step, tensor in enumerate((weight, weight.float(), weight.half(), weight.half()[:1], weight.half())):
        checkpointer.save(step, {"weight": tensor}, wait=True)
        info, found = checkpointer.latest(), torch.zeros_like(tensor)
        assert info is not None and info.step == step
        checkpointer.load(info, {"weight": found})
        assert torch.equal(found, tensor)


def test_training_may_change_tensors_while_they_are_written(tmp_path: Path) -> None:
    checkpointer, tensors, extra = _checkpointer(tmp_path), _tensors(1), {"position": 1}
    checkpointer.save(1, tensors, extra)
    for tensor in tensors.values():
        tensor.fill_(9)
    extra["position"] = 9
    checkpointer.finish()
    info = checkpointer.latest()
    assert info is not None and info.extra == {"position": 1} and _equal(_load(checkpointer, info), _tensors(1))


def test_aliases_are_saved_once_and_loaded_into_both(tmp_path: Path) -> None:
    aliases = {"head.weight": "embedding.weight"}
    weight = torch.randn(4, 3)
    checkpointer = _checkpointer(tmp_path, aliases=aliases)
    checkpointer.save(1, {"embedding.weight": weight, "head.weight": weight.clone()}, wait=True)
    info = checkpointer.latest()
    assert info is not None and list(info.tensors) == ["embedding.weight"]
    for names in (["embedding.weight", "head.weight"], ["head.weight"]):
        loaded = {name: torch.zeros(4, 3) for name in names}
        checkpointer.load(info, loaded)
        assert all(torch.equal(tensor, weight) for tensor in loaded.values())


@pytest.mark.shows(97)
def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"} and len(files) == 5
    for path in files:
        assert not zipfile.is_zipfile(path)
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError, AttributeError)):
            # Of bytes this test has written itself.
            pickle.loads(path.read_bytes())


# ---- what cannot be loaded


@pytest.mark.shows(97)
def test_a_file_that_has_gone_is_named_with_its_path(tmp_path: Path) -> None:
    _save(tmp_path, [1])
    checkpointer = _checkpointer(tmp_path)
    info = checkpointer.latest()
    assert info is not None
    gone = info.path / next(iter(info.files))
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=str(gone)):
        _load(checkpointer, info)


def test_missing_names_and_other_shapes_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    _save(tmp_path, [1])
    checkpointer = _checkpointer(tmp_path)
    info = checkpointer.latest()
    assert info is not None
    double = torch.zeros(3, 1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors asked for: \['absent'\]"):
        checkpointer.load(info, {"double": double, "absent": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"half has the shape \(6,\).*\(5,\)"):
        checkpointer.load(info, {"double": double, "half": torch.zeros(6)})
    assert not double.any()


def _first_file(path: Path) -> Path:
    return sorted(path.glob("*.safetensors"))[0]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path, at: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def _change_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "file cut short": (lambda path: _truncate(_first_file(path)), "model-.*bytes instead of"),
    "file altered": (lambda path: _flip(_first_file(path)), "model-.*checksum"),
    "file missing": (lambda path: _first_file(path).unlink(), "model-.*is missing"),
    "file too many": (lambda path: shutil.copy(_first_file(path), path / "x.safetensors"), "x.safetensors is not in"),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    "manifest cut short": (lambda path: _truncate(path / "manifest.json"), "manifest.json cannot be read"),
    "manifest altered": (lambda path: _change_step(path / "manifest.json"), "manifest.json was altered"),
    "manifest of something else": (lambda path: (path / "manifest.json").write_text("[]"), "not of the format"),
}


@pytest.mark.shows(97)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, [1, 2, 3])
    inflict, reason = DAMAGE[damage]
    inflict(tmp_path / "step-00000003")
    checkpointer = _checkpointer(tmp_path)
    with caplog.at_level(logging.WARNING):
        info = checkpointer.latest()
    assert info is not None and info.step == 2 and _equal(_load(checkpointer, info), _tensors(2))
    assert list(checkpointer.refused) == [tmp_path / "step-00000003"]
    [record] = caplog.records
    assert "step-00000003 is refused" in record.getMessage()
    assert re.search(reason, record.getMessage())


def test_a_checkpoint_that_has_part_of_a_tensor_alone_is_a_damaged_one(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2])
    newest = tmp_path / "step-00000002"
    forge(newest, lambda content: content["tensors"]["half"].update(of="half", start=[0], of_shape=[9]))
    checkpointer = _checkpointer(tmp_path)
    info = checkpointer.latest()
    assert info is not None and info.step == 1 and _equal(_load(checkpointer, info), _tensors(1))
    assert "hold 5 elements of half, which has 9" in checkpointer.refused[newest]


@pytest.mark.shows(97)
def test_damage_to_any_one_file_is_found_however_many_ranks_share_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.checkpoint.checkpointer._FILE_BYTES", 600)
    _save(tmp_path, [1, 2])
    newest = tmp_path / "step-00000002"
    info = read_manifest(newest)
    assert len(info.files) >= 5
    for name in info.files:
        # Its size stays, so that only its checksum can tell.
        _flip(newest / name)
        found = _checkpointer(tmp_path).latest()
        assert found is not None and found.step == 1, name
        for num_shares in range(1, len(info.files) + 2):
            refused = []
            for share in range(num_shares):
                try:
                    check_files(info, share, num_shares)
                except DamagedCheckpoint as error:
                    refused.append(str(error))
            assert refused == [f"its {name} was altered: the checksum differs"], "one rank, and it names the file"
        _flip(newest / name)
        found = _checkpointer(tmp_path).latest()
        assert found is not None and found.step == 2


@pytest.mark.shows(97)
def test_without_an_intact_one_there_is_none(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2])
    for step in (1, 2):
        _truncate(_first_file(tmp_path / f"step-{step:08d}"))
    checkpointer = _checkpointer(tmp_path)
    assert checkpointer.latest() is None and len(checkpointer.refused) == 2


@pytest.mark.shows(97)
def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2])
    _truncate(_first_file(tmp_path / "step-00000002"))
    checkpointer = _checkpointer(tmp_path, keep=1)
    info = checkpointer.latest()
    assert info is not None and info.step == 1
    checkpointer.save(2, _tensors(2), wait=True)
    assert not checkpointer.refused
    info = checkpointer.latest()
    assert info is not None and info.step == 2 and _names(tmp_path) == ["run.json", "step-00000002"]


# ---- what stays in the folder


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    _save(tmp_path, [5, 10, 20, 100], keep)
    kept = [5, 10, 20, 100][-keep:]
    assert _names(tmp_path) == ["run.json", *(f"step-{step:08d}" for step in kept)]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2, 3, 4])
    for step in (2, 4):
        _truncate(_first_file(tmp_path / f"step-{step:08d}"))
    checkpointer = _checkpointer(tmp_path, keep=2)
    info = checkpointer.latest()
    assert info is not None and info.step == 3
    # Step 4 is damaged and would count; steps 1 and 2 are older than the two that are intact.
    checkpointer.save(5, _tensors(5), wait=True)
    assert _names(tmp_path) == ["run.json", *(f"step-{step:08d}" for step in (3, 4, 5))]
    checkpointer.save(6, _tensors(6), wait=True)
    assert _names(tmp_path) == ["run.json", *(f"step-{step:08d}" for step in (5, 6))]


@pytest.mark.parametrize("standalone", [False, True])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_save_at_an_earlier_step_keeps_itself_and_the_newest_before_it(
    tmp_path: Path, keep: int, standalone: bool
) -> None:
    """Checkpoints of later steps do not count among those kept: they stay as they are, or all go."""
    there = [1, 2, 3, 8, 9]
    _save(tmp_path, there)
    checkpointer = _checkpointer(tmp_path, keep=keep, standalone=standalone)
    # The last one takes the place of the one before.
    for seed, step in enumerate((5, 4, 4), start=20):
        checkpointer.save(step, _tensors(seed), wait=True)
        before, later = ([n for n in there if n < step], [n for n in there if n > step])
        there = [*[*before, step][-keep:], *([] if standalone else later)]
        assert _names(tmp_path) == ["run.json", *(f"step-{number:08d}" for number in there)]
        assert _equal(_load(checkpointer, read_manifest(tmp_path / f"step-{step:08d}")), _tensors(seed))
        info = checkpointer.latest()
        assert info is not None and info.step == there[-1]
    assert there == ([1, 2, 3, 4][-keep:] if standalone else [*[1, 2, 3, 4][-keep:], 5, 8, 9])


def test_leftovers_of_a_killed_run_are_cleared_away_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    _save(tmp_path, [1, 2])
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".saving-step-00000003")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".deleting-step-00000000")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".replaced-step-00000001")
    # Killed between moving the old one away and moving the new one in.
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")
    (tmp_path / "notes.txt").write_text("somebody's own")
    info = _checkpointer(tmp_path).latest()
    assert info is not None and info.step == 2
    assert _names(tmp_path) == ["notes.txt", "run.json", "step-00000001", "step-00000002"]


# ---- whose folder it is


def test_the_folder_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    _save(tmp_path, [1])
    before = _names(tmp_path)
    grid = connect(Layout(), "cpu")
    with pytest.raises(AnotherRun, match=r"holds another run: optimizer.learning_rate \(0.002 here, 0.001 there\)"):
        Checkpointer(tmp_path, grid, IDENTITY | {"optimizer.learning_rate": 0.002})
    with pytest.raises(AnotherRun, match=r"seed \(1 here, None there\)"):
        Checkpointer(tmp_path, grid, IDENTITY | {"seed": 1})
    assert _names(tmp_path) == before


def test_a_run_file_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(AnotherRun, match=r"run\.json cannot be read"):
        _checkpointer(tmp_path)
    assert (tmp_path / "run.json").read_text() == "{"


def test_a_checkpoint_copied_from_another_run_is_refused_by_name(tmp_path: Path) -> None:
    _save(tmp_path / "ours", [1])
    theirs = Checkpointer(tmp_path / "theirs", connect(Layout(), "cpu"), {"model.num_layers": 3})
    theirs.save(2, _tensors(2), wait=True)
    shutil.copytree(tmp_path / "theirs" / "step-00000002", tmp_path / "ours" / "step-00000002")
    checkpointer = _checkpointer(tmp_path / "ours")
    info = checkpointer.latest()
    assert info is not None and info.step == 1
    assert "another run: model.num_layers (2 here, 3 there)" in next(iter(checkpointer.refused.values()))


# ---- failures


def test_a_failed_save_surfaces_at_the_next_call_and_leaves_the_one_before(tmp_path: Path) -> None:
    checkpointer = _checkpointer(tmp_path)
    checkpointer.save(1, _tensors(1), wait=True)
    # What stands at the final name cannot be moved out of the way: a file does not replace a folder.
    (tmp_path / "step-00000002").write_text("in the way")
    (tmp_path / ".replaced-step-00000002").mkdir()
    checkpointer.save(2, _tensors(2))
    with pytest.raises(CheckpointError, match=f"step 2 could not be saved: rank 0: {tmp_path}/step-00000002: "):
        checkpointer.save(3, _tensors(3))
    info = checkpointer.latest()
    assert info is not None and info.step == 1
    checkpointer.save(3, _tensors(3), wait=True)
    info = checkpointer.latest()
    assert info is not None and info.step == 3


def test_a_folder_that_cannot_be_written_is_named_before_a_step_is_taken(tmp_path: Path) -> None:
    _save(tmp_path / "saved", [1])
    (tmp_path / "saved").chmod(0o555)
    with plain_user(tmp_path), pytest.raises(CheckpointError, match=r"^saved cannot be written: permission denied"):
        _checkpointer(Path("saved"))
