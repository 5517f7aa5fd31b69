"""A run whose settings name an optimizer with groups, and LoRA adapters, from its file to what peft loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.main import main
from penstock.engine import Engine
from penstock.engine.folders.runs import METRICS_FILE, read_metrics
from tests.e2e.training import CORPUS, run
from tests.hugging_face import SIZES, make_model, stored_tensors

RUN_FILE = """
output = "{folder}/out"
model.pretrained = "{folder}/base"
data.corpus = "{folder}/corpus.txt"
data.cache = "{folder}/cache"
data.sequence_length = 32
data.num_sequences = 8
parallel.pp = 2
parallel.timeout_s = 60
optimizer.name = "sgd"
optimizer.learning_rate = 0.5
optimizer.decay = "constant"
optimizer.arguments = {{ momentum = 0.5 }}
optimizer.groups = [{{ pattern = "*.lora_B.*", name = "muon", learning_rate = 0.02 }}]
adapter.rank = 4
adapter.target_modules = ["q_proj", "up_proj"]
train.steps = {steps}
train.num_microbatches = 4
checkpoint.every = 2
log.tensorboard = false
log.timeline = false
"""


def train(run_file: Path, *words: str) -> None:
    ended = run(str(run_file), *words)
    assert ended.exit_code == 0, ended.out + ended.err


def losses(folder: Path) -> list[Any]:
    return [entry["loss"] for entry in read_metrics(folder / METRICS_FILE) if "loss" in entry]


@pytest.mark.shows(106, 108)
def test_a_run_of_settings_trains_adapters_resumes_and_leaves_what_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (tmp_path / "corpus.txt").write_text(CORPUS)
    make_model("llama", vocab_size=256, pad_token_id=0).save_pretrained(tmp_path / "base")
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=tmp_path, steps=6))
    train(run_file)
    train(run_file, "--output", str(tmp_path / "halves"), "--train.steps", "3")
    train(run_file, "--output", str(tmp_path / "halves"), "--resume")
    whole, halves = losses(tmp_path / "out"), losses(tmp_path / "halves")
    assert len(whole) == 6 and whole == halves
    adapters, others = (stored_tensors(tmp_path / run / "adapter-6") for run in ("out", "halves"))
    assert len(adapters) == 2 * 2 * SIZES["num_hidden_layers"]
    assert adapters.keys() == others.keys() and all(torch.equal(a, others[name]) for name, a in adapters.items())
    assert all(adapter.abs().max() > 0 for adapter in adapters.values())
    # Base weights keep their bits through a run and its checkpoints.
    assert run(str(tmp_path / "out"), str(tmp_path / "converted"), command="convert").exit_code == 0
    before, after = stored_tensors(tmp_path / "base"), stored_tensors(tmp_path / "converted")
    assert before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "out" / "adapter-6" / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = torch.arange(20)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter-6")).eval()(tokens[None]).logits[0]
    engine = Engine.from_config(run_of_one_rank(tmp_path))
    engine.load(tmp_path / "out" / "checkpoints")
    from penstock import PackedBatch

    ours = engine.forward(PackedBatch.from_documents([tokens]))
    torch.testing.assert_close(ours if isinstance(ours, torch.Tensor) else ours[0], theirs, rtol=0, atol=3e-4)
    # What is written for transformers has the adapters too: beside the base, or merged into it.
    beside = stored_tensors(tmp_path / "converted" / "adapter")
    assert beside.keys() == adapters.keys() and all(torch.equal(own, adapters[name]) for name, own in beside.items())
    words = (str(tmp_path / "out"), str(tmp_path / "merged"), "--merge-adapters")
    assert run(*words, command="convert").exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(tokens[None]).logits[0], theirs, rtol=0, atol=3e-4)


def test_adapters_are_never_left_behind_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "run.toml").write_text("[adapter]\nrank = 4\n")
    plain = tmp_path / "plain"
    make_model("llama", vocab_size=256).save_pretrained(plain)
    for command, words, told in (
        ("train", ("--model.pretrained", run_folder), "has adapters, which another model cannot begin with"),
        ("convert", (plain, tmp_path / "new", "--merge-adapters"), "has no adapters to merge"),
    ):
        assert main([command, *map(str, words)]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match="has adapters, which another model cannot begin with"):
        Engine.from_hf(run_folder)


def run_of_one_rank(folder: Path) -> Path:
    text = RUN_FILE.format(folder=folder, steps=6).replace("pp = 2", "pp = 1").replace("/out", "/alone")
    path = folder / "alone.toml"
    path.write_text(text)
    return path
