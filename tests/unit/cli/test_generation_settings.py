"""A model's own settings of generation: turned off on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.models.generate import Generate
from penstock.model.hf.families import GENERATION_CONFIG
from penstock.settings import SamplingParams
from tests.hugging_face import make_model, make_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("llama", vocab_size=300, max_position_embeddings=128).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    return tmp_path


def own(folder: Path, **fields: Any) -> None:
    (folder / GENERATION_CONFIG).write_text(json.dumps(fields))


def params(folder: Path, *words: str) -> SamplingParams:
    command = Generate([str(folder), "the cat", *words])
    command.read()
    return command.params


def test_each_of_a_models_own_settings_can_be_turned_off(folder: Path) -> None:
    kept = {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 0.6, "min_new_tokens": 3}
    own(folder, do_sample=True, **kept)
    found = params(folder)
    assert {name: getattr(found, name) for name in kept} == kept and found.chained
    words = "--top-k 0 --top-p 1 --min-p 0 --repetition-penalty 1 --temperature 1 --min-new-tokens 0 --no-chained"
    found, plain = params(folder, *words.split()), SamplingParams(top_k=0)
    assert {name: getattr(found, name) for name in (*kept, "chained")} == {
        name: getattr(plain, name) for name in (*kept, "chained")
    }
    assert found.recipe[:5] == SamplingParams().recipe[:5], "it draws as if nothing had been asked for"


def test_a_prompt_that_is_too_long_is_named_by_its_line_and_id(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ['{"tokens": [1, 2]}', "", json.dumps({"id": "q7", "tokens": [3] * 125}), '{"tokens": [300]}']
    prompts.write_text("\n".join(lines))
    with pytest.raises(ValueError) as refused:
        Generate([str(folder), "--file", str(prompts), "--max-new-tokens", "8"]).read()
    assert f"{prompts}, line 3 (\"id\": 'q7'): has 125 tokens, and with max_new_tokens=8" in str(refused.value)
    prompts.write_text(lines[-1])
    with pytest.raises(ValueError, match=r"prompts.jsonl, line 1: holds the token 300; the model knows 0 to 299"):
        Generate([str(folder), "--file", str(prompts)]).read()


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "phi"])
def test_a_model_that_cannot_be_quantized_is_refused(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(family, vocab_size=300).save_pretrained(tmp_path)
    for words in (
        ["generate", str(tmp_path), "a", "--quantize", "int8"],
        ["convert", str(tmp_path), str(tmp_path / "new"), "--quantize", "int8"],
    ):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert f"{tmp_path} cannot be quantized; only dense models" in err
        assert "AfterLayers" not in err and "ExpertBlock" not in err
