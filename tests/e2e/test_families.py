"""Models of any family, and of any dtype, from the command line: trained, scored, continued and written back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.main import main
from penstock.engine import Engine
from penstock.engine.folders.model_folder import open_model
from penstock.engine.folders.run_check import with_pretrained
from penstock.engine.folders.runs import RUN_FILE
from penstock.model.transformers.units import BeforeLayers
from penstock.settings import ModelConfig, ParallelConfig, Precision, RunConfig, TrainConfig, read_config
from tests.e2e.training import run
from tests.hugging_face import make_model, make_tokenizer, stored_tensors

CLOSE = 1e-4
TEXTS = ["the cat sat on the mat", "so what, then?"]
PROMPT = "the cat sat on the mat"
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "block_size": 8,
    },
    "phi3": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 16,
    },
}
# Why some cannot generate; the others can.
REFUSED: dict[str, str] = dict.fromkeys(("lfm2", "minimax"), "cannot generate here: it keeps more than keys and values")
# Answers of 10 tokens end before the factors change, answers of 20 do not.
CHANGES = {"phi3": "would pass 16, where the model's rotary factors change"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a family."""
    root = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        if not (root / name).exists():
            make_model(name, vocab_size=300, **FAMILIES[name]).save_pretrained(root / name)
            make_tokenizer(root / name)
        return root / name

    return make


def scores(folder: Path, tmp_path: Path, *words: str) -> list[list[float]]:
    """The log-probabilities that the command gives for the texts."""
    texts, output = tmp_path / "texts.jsonl", tmp_path / "scores.jsonl"
    texts.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    output.unlink(missing_ok=True)
    assert main(["score", str(folder), str(texts), "--output", str(output), *words]) == 0
    return [json.loads(line)["log_probs"] for line in output.read_text().splitlines()]


def scores_of_transformers(folder: Path) -> list[list[float]]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            log_probs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        found.append(log_probs.gather(1, ids[0, 1:, None]).squeeze(1).tolist())
    return found


def assert_close(ours: list[list[float]], theirs: list[list[float]], tolerance: float = CLOSE) -> None:
    assert [len(own) for own in ours] == [len(own) for own in theirs]
    for own, expected in zip(ours, theirs, strict=True):
        assert own == pytest.approx(expected, abs=tolerance)


@pytest.mark.shows(121)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_family_is_scored_and_continued_or_refused_before_anything_is_computed(
    name: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(name)
    assert_close(scores(folder, tmp_path), scores_of_transformers(folder))
    told = capsys.readouterr().err
    assert f"transformers' own layers run {folder}: the decoder is none of" in told
    few = 16 - len(AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"])
    words = ["generate", str(folder), PROMPT, "--temperature", "0", "--ignore-end", "--json", "--max-new-tokens"]
    if name not in REFUSED:
        assert main([*words, str(few)]) == 0
        [answer] = json.loads(capsys.readouterr().out)["answers"]
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        prompt = AutoTokenizer.from_pretrained(folder)(PROMPT)
        ids = torch.tensor([prompt["input_ids"]])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=few, eos_token_id=None
        )
        assert answer["tokens"] == expected[0, ids.shape[1] :].tolist()
    reason = REFUSED.get(name) or CHANGES.get(name)
    if reason is not None:
        monkeypatch.setattr(BeforeLayers, "decode", lambda *_: pytest.fail("something was computed"))
        assert main([*words, "20"]) == 2
        assert reason in capsys.readouterr().err
    if name in CHANGES:
        # A server, which cuts answers to what is possible, takes no more.
        assert open_model(folder).max_generated_length() == 16
        assert main(["serve", str(folder), "--max-length", "17"]) == 2
        assert "--max-length 17 is more than the 16 tokens" in capsys.readouterr().err


def train(folder: Path, tmp_path: Path, *words: str) -> Path:
    """Train a model of a folder for three steps; returns the folder of the run."""
    corpus, output = tmp_path / "chat.jsonl", tmp_path / "out"
    lines = [{"prompt": f"the cat {n}", "completion": " sat on the mat"} for n in range(8)]
    corpus.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    ended = run(
        *("--model.pretrained", str(folder), "--data.corpus", str(corpus), "--output", str(output)),
        *("--data.validation_fraction", "0", "--data.cache", "none", "--parallel.timeout_s", "60"),
        *("--train.steps", "3", "--train.num_microbatches", "4", "--log.timeline", "false"),
        *("--log.tensorboard", "false", *words),
    )
    assert ended.exit_code == 0, ended.err
    assert ("transformers' own layers run" in ended.err) == (read_config(output / RUN_FILE).model.native is False)
    return output


# ---- dtypes


def pretrained(tmp_path: Path, dtype: torch.dtype) -> Path:
    folder = tmp_path / "base"
    made: Any = make_model("llama", vocab_size=300)
    made.to(dtype).save_pretrained(folder)
    make_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return folder


@pytest.mark.shows(120)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pretrained_run_keeps_tokenizer_end_tokens_and_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = pretrained(tmp_path, dtype)
    output = train(folder, tmp_path)
    precision = Precision.BF16 if dtype is torch.bfloat16 else Precision.FP16
    assert read_config(output / RUN_FILE).train.precision is precision
    base, model = open_model(folder), open_model(output)
    assert model.tokenizer and base.tokenizer and model.tokenizer.fingerprint == base.tokenizer.fingerprint
    assert model.end_tokens == base.end_tokens == (2, 4)
    for opened in (base, model):
        assert opened.arguments(ParallelConfig()).options.precision is precision
    assert main(["convert", str(output), str(tmp_path / "written")]) == 0
    written = stored_tensors(tmp_path / "written")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    before = stored_tensors(folder)
    assert any(not torch.equal(before[name], written[name]) for name in before), "nothing was learned"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written").dtype is dtype
    again = open_model(tmp_path / "written")
    assert again.tokenizer and again.tokenizer.fingerprint == base.tokenizer.fingerprint
    assert again.end_tokens == base.end_tokens


@pytest.mark.parametrize("native", [True, False])
def test_a_folder_runs_in_its_dtype_unless_told_otherwise(native: bool, tmp_path: Path) -> None:
    folder = pretrained(tmp_path, torch.bfloat16)
    engine = Engine.from_hf(folder, native=native)
    assert {parameter.dtype for parameter in engine.pipeline.model.parameters().values()} == {torch.bfloat16}
    told = Engine.from_hf(folder, native=native, precision="fp32")
    assert {parameter.dtype for parameter in told.pipeline.model.parameters().values()} == {torch.float32}
    engine.save_hf(tmp_path / "written")
    assert {tensor.dtype for tensor in stored_tensors(tmp_path / "written").values()} == {torch.bfloat16}
    run = RunConfig(
        model=ModelConfig(pretrained=str(folder), native=native), train=TrainConfig(precision=Precision.FP32)
    )
    assert with_pretrained(run).train.precision is Precision.FP32
    ours = scores(folder, tmp_path, "--precision", "fp32", "--native", str(native).lower())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "exact")
    make_tokenizer(tmp_path / "exact")
    assert_close(ours, scores_of_transformers(tmp_path / "exact"))
    in_bf16 = scores(folder, tmp_path, "--native", str(native).lower())
    assert_close(in_bf16, ours, tolerance=0.2)
    assert in_bf16 != ours
