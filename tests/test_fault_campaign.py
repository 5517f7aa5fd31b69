"""tools/faults.py: it finds whatever a disturbed run has lost."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import faults  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.subject("tools/*.py", "src/penstock/**/*.py")
NUM_STEPS = 4


@pytest.fixture
def runs(tmp_path: Path) -> tuple[faults.Run, Path]:
    """A run, and the undisturbed one, which are the same."""
    undisturbed = tmp_path / "undisturbed"
    checkpoint = undisturbed / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    lines = [json.dumps({"step": 1 + i, "loss": 3.0 - i, "step_time_s": 0.1}) for i in range(NUM_STEPS)]
    (undisturbed / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    save_file({"weight": torch.arange(6.0)}, checkpoint / "model-00001-of-00001.safetensors")
    (checkpoint / "manifest.json").write_text(json.dumps({"extras": [{"loader": {"position": 8}}]}))
    shutil.copytree(undisturbed, tmp_path / "run")
    return faults.Run(tmp_path / "run.toml", tmp_path / "run", ()), undisturbed


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return act


def nudged(folder: Path) -> None:
    file = folder / "checkpoints/step-00000004/model-00001-of-00001.safetensors"
    tensors = load_file(file)
    tensors["weight"][3] += 2.0**-20
    save_file(tensors, file)


@pytest.mark.shows(154)
def test_a_small_campaign_tells_its_faults_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["faults.py", "--faults", "2", "--seed", "6", "--layouts", "pp 2"])
    assert faults.main() == 0
    told = capsys.readouterr().out
    assert told.count("  pp 2 ") == 2 and "| fault | pp 2 |" in told
    assert "2 faults in 1 runs of 150 steps, none with a number or a bit lost" in told


@pytest.mark.shows(154)
def test_a_run_that_lost_nothing_is_told_as_such_whatever_its_times(runs: tuple[faults.Run, Path]) -> None:
    run, undisturbed = runs
    replaced("metrics.jsonl", "0.1", "0.7")(run.output)
    assert faults.differences(run, undisturbed, whole=True) is None


@pytest.mark.shows(154)
@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (replaced("metrics.jsonl", "2.0", "2.0000002"), "step 2: loss is 2.0000002, not 2.0"),
        (replaced("metrics.jsonl", '"step": 3', '"step": 4'), "1 numbers are missing"),
        (nudged, "model-00001-of-00001.safetensors differs"),
        (replaced("checkpoints/step-00000004/manifest.json", "8", "9"), "manifest.json differs"),
    ],
)
def test_whatever_is_lost_is_found(runs: tuple[faults.Run, Path], lose: Callable[[Path], None], says: str) -> None:
    run, undisturbed = runs
    lose(run.output)
    assert says in str(faults.differences(run, undisturbed, whole=True))
