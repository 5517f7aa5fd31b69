"""Tokens as a folder's tokenizer means them: special tokens, end tokens, defaults of generation, and bytes."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from penstock.cli.models.input_lines import InputReader
from penstock.data.corpus import load_corpus
from penstock.data.tokenizer import ByteTokenizer, load_tokenizer, save_byte_tokenizer
from penstock.engine.folders.model_folder import open_model
from penstock.engine.folders.run_check import with_pretrained
from penstock.engine.run_data import RunData
from penstock.settings import ConfigError, DataConfig, ModelConfig, RunConfig, SamplingParams
from tests.hugging_face import make_model, make_tokenizer
from tests.unit.data.corpora import corpus_spec

TEXTS = ["the cat sat", "so what,\nthen?", "the mat"]


@pytest.fixture(params=["with BOS", "without BOS"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model whose tokenizer has special tokens of that kind."""
    make_model("llama", vocab_size=300).save_pretrained(tmp_path)
    make_tokenizer(tmp_path, adds_bos=request.param == "with BOS")
    return tmp_path


@pytest.mark.shows(119)
def test_prompts_texts_and_documents_have_the_special_tokens_of_transformers(folder: Path, tmp_path: Path) -> None:
    model, theirs = open_model(folder), AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text)["input_ids"] for text in TEXTS]
    plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [prompt.tokens for prompt in InputReader(model).prompts_of(TEXTS)] == expected
    assert [prompt.tokens for prompt in InputReader(model.without_special_tokens()).prompts_of(TEXTS)] == plain
    assert InputReader(model).tokens_of_word(TEXTS[0])[0] == tuple(plain[0])
    lines = tmp_path / "lines.jsonl"
    pair = {"prompt": TEXTS[0], "completion": TEXTS[1]}
    lines.write_text("".join(f"{json.dumps(line)}\n" for line in [*({"text": text} for text in TEXTS), pair]))
    *texts, completed = InputReader(model).texts(lines)
    assert [list(text.tokens) for text in texts] == expected
    assert (list(completed.tokens), completed.num_prompt_tokens) == (expected[0] + plain[1], len(expected[0]))
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    for special, documents in ((True, expected), (False, plain)):
        spec = corpus_spec(str(corpus), validation_fraction=0.0, tokenizer=str(folder), special_tokens=special)
        store = load_corpus(spec).training
        assert [store.document(n).tolist() for n in range(store.num_documents)] == documents


def test_the_kinds_of_tokenizers_differ(tmp_path: Path) -> None:
    assert make_tokenizer(tmp_path / "a")("the")["input_ids"][0] == 1
    assert make_tokenizer(tmp_path / "b", adds_bos=False)("the")["input_ids"][0] != 1


def test_a_run_begins_with_the_tokenizer_of_its_pretrained_model(tmp_path: Path) -> None:
    make_model("llama", vocab_size=300).save_pretrained(tmp_path)
    config = RunConfig(model=ModelConfig(pretrained=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"300 tokens and no tokenizer.json; give data.tokenizer"):
        with_pretrained(config)
    make_tokenizer(tmp_path)
    assert with_pretrained(config).data.tokenizer == str(tmp_path)
    told = RunConfig(model=config.model, data=DataConfig(tokenizer="bytes"))
    assert with_pretrained(told).data.tokenizer == "bytes"
    assert with_pretrained(RunConfig()).data.tokenizer == "bytes"


def test_defaults_of_generation_are_those_of_the_folder(tmp_path: Path) -> None:
    make_model("llama", vocab_size=300).save_pretrained(tmp_path)
    content = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 4]}
    content["repetition_penalty"] = 1.1
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    model = open_model(tmp_path)
    assert model.end_tokens == (2, 4)
    expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, chained=True, repetition_penalty=1.1)
    assert SamplingParams(**model.sampling) == expected
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "top_k": 0}))
    assert SamplingParams(**open_model(tmp_path).sampling) == SamplingParams(temperature=0)


@pytest.mark.parametrize("end_token", [False, True])
def test_bytes_are_written_as_a_tokenizer_of_transformers(tmp_path: Path, end_token: bool) -> None:
    save_byte_tokenizer(tmp_path, end_token)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    text = "".join(map(chr, range(0x180))) + " \N{GREEK SMALL LETTER OMEGA}  don't\n\n\N{PILE OF POO} 1,234"
    assert theirs(text)["input_ids"] == list(text.encode()) == ours.encode([text])[0].tolist()
    assert theirs.decode(list(text.encode())) == text
    assert (len(theirs), theirs.eos_token_id) == (ByteTokenizer(end_token).vocab_size, 256 if end_token else None)


@pytest.mark.parametrize("end_token, last", [(None, 2), ("", None), ("<pad>", 0)])
def test_rows_of_text_end_with_the_token_of_a_pretrained_model(
    end_token: str | None, last: int | None, folder: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps({'text': text})}\n" for text in TEXTS))
    data = DataConfig(str(corpus), validation_fraction=0.0, end_token=end_token, cache=None, sequence_length=4)
    loaded = RunData.load(with_pretrained(RunConfig(model=ModelConfig(pretrained=str(folder)), data=data)))
    store, theirs = loaded.corpus.training, AutoTokenizer.from_pretrained(folder)
    expected = [[*theirs(text)["input_ids"], *([] if last is None else [last])] for text in TEXTS]
    assert [store.document(n).tolist() for n in range(store.num_documents)] == expected
