"""`penstock convert --quantize`: a folder of 8-bit weights, which loads as that, and others that are refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock import Engine, SamplingParams
from penstock.cli.main import main
from penstock.engine.folders.model_folder import open_model
from penstock.model.cpu import quantized
from penstock.settings import ParallelConfig, Quantize
from tests.hugging_face import make_model, make_tokenizer

PROMPTS = [[5, 9, 2], [7, 1, 1, 30, 60], [1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model("llama", vocab_size=300, tie_word_embeddings=False).save_pretrained(path)
    make_tokenizer(path)
    return path


def answers(folder: Path, quantize: Quantize | None = None) -> list[tuple[int, ...]]:
    engine = Engine(*open_model(folder, quantize=quantize).arguments(ParallelConfig()))
    found = [answer.tokens for answer in engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=0))]
    assert not any(name.endswith("down.weight") for name in engine.parameters()), "weights are packed"
    engine.close()
    return found


@pytest.mark.parametrize("shards", [[], ["--max-shard-size", "20KB"]])
def test_a_folder_of_8_bit_weights_gives_the_tokens_of_the_weights_it_was_made_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shards: list[str]
) -> None:
    text, made = tmp_path / "text.jsonl", tmp_path / "small"
    text.write_text(8 * (json.dumps({"text": "some words that were kept aside "}) + "\n"))
    assert main(["convert", str(folder), str(made), "--quantize", "int8", *shards]) == 0

    def perplexity(of: Path) -> float:
        capsys.readouterr()
        assert main(["score", str(of), str(text), "--output", str(tmp_path / f"{of.name}.jsonl"), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["perplexity"]

    before, after = perplexity(folder), perplexity(made)
    assert before != after == pytest.approx(before, rel=0.05)
    stored = {name: tensor for file in made.glob("*.safetensors") for name, tensor in load_file(file).items()}
    eight = [name for name, tensor in stored.items() if str(tensor.dtype) == "torch.int8"]
    assert len(eight) == 3 * 7 + 1 and all(f"{name}_scale" in stored for name in eight)
    assert answers(made) == answers(folder, Quantize.INT8)
    described = json.loads((made / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "compressed-tensors"


def test_weights_quantized_in_another_form_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"quantized as 'gptq', which is not read.*convert --quantize int8"):
        open_model(tmp_path)


@pytest.mark.shows(175)
def test_a_kind_that_is_slower_here_is_named_once_and_auto_takes_the_faster(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, found = tmp_path / "prompts.jsonl", {}
    prompts.write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in PROMPTS))
    seconds = {"int8 by FBGEMM": [0.5, 0.5], "int8 by oneDNN": [1.5, 1.5], "int8-weights": [4.0, 1.0]}
    for kind, fp32 in (
        ("int8", 2.0),
        ("int8", 0.5),
        ("int8-weights", 2.0),
        ("auto", 2.0),
        ("auto", 0.5),
        ("none", 2.0),
    ):
        monkeypatch.setattr(quantized, "measured_seconds", lambda *_, own=fp32: [seconds | {"fp32": [own, 0.0]}] * 2)
        output = tmp_path / f"{kind}-{fp32}.jsonl"
        words = ["generate", str(folder), "--file", str(prompts), "--output", str(output), "--quantize", kind]
        assert main([*words, "--temperature", "0", "--max-new-tokens", "8", "--ignore-end"]) == 0
        answers = [tuple(json.loads(line)["tokens"]) for line in output.read_text().splitlines()]
        lines = [line for line in capsys.readouterr().err.splitlines() if "slower" in line]
        found[kind, fp32] = answers, lines
    assert {key: len(lines) for key, (_, lines) in found.items() if lines} == {
        ("int8", 0.5): 1,
        ("int8-weights", 2.0): 1,
    }
    assert (
        "int8-weights is slower on this machine than fp32 without it: products take 2.50 times as long"
        in (found["int8-weights", 2.0][1][0])
    )
    assert found["int8", 2.0][0] != found["none", 2.0][0]
    # To score is to read alone, where 8-bit weights take half the time.
    monkeypatch.setattr(quantized, "measured_seconds", lambda *_: [seconds | {"fp32": [0.0, 2.0]}] * 2)
    words = ["score", str(folder), str(prompts), "--output", str(tmp_path / "scores.jsonl")]
    assert main([*words, "--quantize", "int8-weights"]) == 0 and "slower" not in capsys.readouterr().err
    assert found["auto", 2.0][0] == found["int8", 2.0][0] and found["auto", 0.5][0] == found["none", 2.0][0]


def test_a_folder_of_8_bit_weights_is_run_as_asked(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "small"
    assert main(["convert", str(folder), str(made), "--quantize", "int8"]) == 0
    kept, found = {}, {}
    for kind in (None, *Quantize):
        # This model's widths do not allow int4.
        if kind not in (Quantize.INT4, Quantize.AUTO):
            model = open_model(made, quantize=kind)
            engine = Engine(*model.arguments(ParallelConfig()))
            kept[kind] = engine.parameters().keys()
            params = SamplingParams(max_new_tokens=8, temperature=0)
            found[kind] = [answer.log_probs for answer in engine.generate(PROMPTS, params)]
            engine.close()
    assert found[None] == found[Quantize.INT8] != found[Quantize.NONE] != found[Quantize.INT8_WEIGHTS]
    assert kept[None] == kept[Quantize.INT8], "packed"
    assert open_model(made, quantize=Quantize.NONE).weight_bytes() > 2 * open_model(made).weight_bytes()
