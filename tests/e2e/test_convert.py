"""`penstock convert`, and training that begins with a model which is already there."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock import Engine
from penstock.cli.main import main
from penstock.engine import EngineOptions
from tests.e2e.training import CORPUS, run
from tests.hugging_face import CLOSE, make_model, make_sequences, reference_logits, stored_tensors

RUN = """
output = "{folder}/run"
model.pretrained = "{pretrained}"
data.corpus = "{folder}/corpus.py"
data.tokenizer = "bytes"
data.cache = "{folder}/cache"
data.sequence_length = 32
data.num_sequences = 4
parallel.pp = 2
parallel.timeout_s = 60
train.steps = 2
train.num_microbatches = 2
log.tensorboard = false
log.timeline = false
"""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied model whose rotary positions are stretched, and something beside it to be copied."""
    folder = tmp_path_factory.mktemp("model")
    made = make_model("llama", vocab_size=260, tie_word_embeddings=True, rope_parameters=LLAMA3)
    made.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    return folder


def write_run(folder: Path, pretrained: Path) -> Path:
    (folder / "corpus.py").write_text(CORPUS)
    path = folder / "run.toml"
    path.write_text(RUN.format(folder=folder, pretrained=pretrained))
    return path


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.shows(98)
def test_a_model_is_written_bit_for_bit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back, half = tmp_path / "back", tmp_path / "half"
    assert main(["convert", str(model), str(back), "--max-shard-size", "20KB", "--json"]) == 0
    assert len(list(back.glob("*.safetensors"))) > 1
    assert same(stored_tensors(back), stored_tensors(model))
    assert (back / "special_tokens_map.json").exists()
    sequences = make_sequences((7, 1, 40))
    expected = reference_logits(model, sequences)
    torch.testing.assert_close(reference_logits(back, sequences), expected, rtol=0, atol=CLOSE)

    assert main(["convert", str(model), str(half), "--dtype", "bf16"]) == 0
    rounded = {name: tensor.bfloat16() for name, tensor in stored_tensors(model).items()}
    assert same(stored_tensors(half), rounded)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    capsys.readouterr()


def test_a_model_that_gives_no_numbers_is_not_scored(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, texts = tmp_path / "broken", tmp_path / "texts.jsonl"
    shutil.copytree(model, broken)
    weights = stored_tensors(model)
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    texts.write_text('{"tokens": [1]}\n{"tokens": [1, 2, 3]}\n')
    capfd.readouterr()
    assert main(["score", str(broken), str(texts), "--output", str(tmp_path / "scores.jsonl")]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "penstock: the scores of line 2 are not numbers: a weight or an activation is NaN or infinite, so nothing can "
        "be scored"
    )
    assert not (tmp_path / "scores.jsonl").exists()


def test_nothing_is_overwritten_and_mistakes_are_one_sentence(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken, new = tmp_path / "taken", tmp_path / "new"
    taken.mkdir()
    (taken / "precious").write_text("x")
    for arguments, named in (
        ([model, taken], str(taken)),
        ([tmp_path / "no", new], str(tmp_path / "no")),
        ([tmp_path, new], "config.json"),
        ([model, new, "--max-shard-size", "big"], "big"),
        ([model, new, "--dtype", "int3"], "int3"),
    ):
        assert main(["convert", *map(str, arguments)]) == 2
        message = capsys.readouterr().err.strip()
        assert named in message
        assert "\n" not in message
        assert not new.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert [path.name for path in taken.iterdir()] == ["precious"]


@pytest.mark.shows(98)
def test_training_begins_with_the_pretrained_weights_and_is_exported(model: Path, tmp_path: Path) -> None:
    ended = run(str(write_run(tmp_path, model)))
    assert ended.exit_code == 0, ended.err
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "trained")]) == 0
    before, after = stored_tensors(model), stored_tensors(tmp_path / "trained")
    assert before.keys() == after.keys()
    # Two steps of Adam move no weight further than twice the rate, and decay it a little.
    assert all(0 < (after[name] - before[name]).abs().max() < 3e-3 + 1e-3 * before[name].abs().max() for name in before)
    assert torch.isfinite(reference_logits(tmp_path / "trained", make_sequences((5,)))).all()
    # A run's folder is as good a beginning as the folder that it began with.
    again = Engine.from_hf(tmp_path / "run", options=EngineOptions(device="cpu"))
    assert torch.equal(again.parameters()["head.norm.weight"], after["model.norm.weight"])
