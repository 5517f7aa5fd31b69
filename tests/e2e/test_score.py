"""`penstock score`: what it writes is what the model says, whole, once, and the same however it came to be."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.cli.output import ResultsFile
from penstock.data import PackedBatch
from penstock.engine import Engine
from penstock.engine.folders.model_folder import open_model
from penstock.model import Sequences, decoder_units
from penstock.settings import ParallelConfig, read_config
from tests.e2e.training import result_of, run, write_run

TEXTS = [
    {"id": "whole", "text": "def f(x): return x * 4"},
    {"prompt": "def f1", "completion": "(x):\n"},
    {"id": 7, "tokens": [1, 200, 3, 4]},
    {"prompt": [100, 101], "completion": [102], "other": "left aside"},
    {"text": "?"},
    *({"text": "return x" * (1 + i % 5)} for i in range(30)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run and texts."""
    folder = tmp_path_factory.mktemp("score")
    assert main(["train", str(write_run(folder, "run", 6)), "--parallel.pp", "1"]) == 0
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, TEXTS)) + "\n\n")
    return folder


def tokens_of(text: dict[str, Any]) -> tuple[list[int], int]:
    """Token ids, and how many of them are not scored."""

    def ids(value: Any) -> list[int]:
        return list(value.encode()) if isinstance(value, str) else value

    if "prompt" in text:
        return ids(text["prompt"]) + ids(text["completion"]), len(ids(text["prompt"]))
    return ids(text.get("tokens", text.get("text"))), 1


@torch.no_grad()
def expected_log_probs(run: Path) -> list[list[float]]:
    """One text after another through the run's last weights."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    weights = {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}
    modules = []
    for unit in decoder_units(read_config(run / "run.toml").model.whole(256)):
        modules.append(unit.build())
        for name, parameter in modules[-1].named_parameters():
            full_name = f"{unit.name}.{name}"
            parameter.copy_(weights[unit.tied.get(name, full_name)])
    found = []
    for text in TEXTS:
        tokens, num_left = tokens_of(text)
        h = torch.tensor(tokens)
        for module in modules:
            h = module(h, Sequences.from_lengths([len(tokens)]))
        log_p = h.double().log_softmax(-1)
        found.append([float(log_p[i - 1, tokens[i]]) for i in range(num_left, len(tokens))])
    return found


def score(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """Score the texts in this process into a file of that name."""
    output = folder / name
    assert main(["score", str(folder / "run"), str(folder / "texts.jsonl"), "--output", str(output), *words]) == 0
    return lines_of(output)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_token_has_the_log_probability_that_the_model_gives_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = score(folder, "plain.jsonl", "--json")
    summary = json.loads(capsys.readouterr().out)
    expected = expected_log_probs(folder / "run")
    assert [line["line"] for line in lines] == list(range(1, len(TEXTS) + 1))
    assert [line.get("id") for line in lines] == [text.get("id") for text in TEXTS]
    for line, text, log_probs in zip(lines, TEXTS, expected, strict=True):
        tokens, num_left = tokens_of(text)
        assert line["tokens"] == tokens[num_left:]
        assert line["log_probs"] == pytest.approx(log_probs, abs=1e-5)
        assert line["log_prob"] == pytest.approx(sum(log_probs), abs=1e-4)
        if log_probs:
            assert line["perplexity"] == pytest.approx(math.exp(-sum(log_probs) / len(log_probs)), rel=1e-5)
    assert lines[4]["log_probs"] == [] and lines[4]["perplexity"] is None, "one token has none before it"
    every = [value for log_probs in expected for value in log_probs]
    assert (summary["num_lines"], summary["num_scored_tokens"]) == (len(TEXTS), len(every))
    assert summary["perplexity"] == pytest.approx(math.exp(-sum(every) / len(every)), rel=1e-5)
    hotter = score(folder, "hotter.jsonl", "--temperature", "2")
    assert hotter[0]["log_probs"] != lines[0]["log_probs"]


def load(folder: Path) -> Engine:
    model = open_model(folder)
    engine = Engine(*model.arguments(ParallelConfig()))
    model.load(engine)
    return engine


def test_a_model_that_is_scored_holds_its_weights_alone(folder: Path) -> None:
    engine = load(folder / "run")
    held = engine.state_bytes()
    assert (held.gradients, held.optimizer) == (0, 0)
    own = {p.data_ptr(): p.nbytes for p in engine.parameters().values()}  # a tied weight lies there once
    assert held.parameters == sum(own.values()) > 0
    with pytest.raises(ValueError, match="learns=False"):
        engine.train_batch(PackedBatch.from_documents([[1, 2, 3]]))


def test_two_pipelines_of_two_stages_write_the_same_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert sum(len(tokens_of(text)[0]) for text in TEXTS) > 2 * 8 * 44, "more than a batch for each pipeline"
    score(folder, "one.jsonl", "--max-tokens", "44")
    words = ["run", "texts.jsonl", "--output", "two.jsonl", "--max-tokens", "44", "--pp", "2", "--dp", "2", "--json"]
    assert result_of(run(*words, command="score"))["num_lines"] == len(TEXTS)
    assert (folder / "two.jsonl").read_bytes() == (folder / "one.jsonl").read_bytes()


def test_a_call_that_was_stopped_is_continued_to_the_same_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["score", str(folder / "run"), str(folder / "texts.jsonl"), "--max-tokens", "44", "--json", "--output"]
    assert main([*words, str(folder / "never_stopped.jsonl")]) == 0
    capsys.readouterr()
    half = folder / "half.jsonl"
    written: list[int] = []
    write = ResultsFile.write

    def stop_in_the_second_batch(file: ResultsFile, lines: Any, *, to_disk: bool) -> None:
        written.append(len(lines))
        write(file, lines if len(written) == 1 else lines[:1], to_disk=to_disk)
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultsFile, "write", stop_in_the_second_batch)
        assert main([*words, str(half)]) == 130
    [unfinished] = folder.glob(".half.jsonl.*.unfinished")
    assert not half.exists() and len(unfinished.read_text().splitlines()) == written[0] + 1
    with unfinished.open("a") as file:
        file.write('{"line": ')
    capsys.readouterr()
    assert main([*words, str(half)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["resumed_from"] == written[0] > 0
    assert half.read_bytes() == (folder / "never_stopped.jsonl").read_bytes()
    assert not unfinished.exists()


REFUSED = {
    "no model": (["FOLDER/nowhere", "FOLDER/texts.jsonl"], "there is no folder"),
    "a folder without a model": (
        ["FOLDER/bad", "FOLDER/texts.jsonl"],
        r"neither a run \(run.toml\) nor a Hugging Face model",
    ),
    "a run without a checkpoint": (["FOLDER/empty run", "FOLDER/texts.jsonl"], "holds no checkpoint yet"),
    "no file": (["FOLDER/run", "FOLDER/nowhere.jsonl"], "nowhere.jsonl': No such file"),
    "an empty file": (["FOLDER/run", "FOLDER/bad/empty.jsonl"], "has no line to score"),
    "no JSON": (["FOLDER/run", "FOLDER/bad/words.jsonl"], "words.jsonl, line 2: is not JSON"),
    "no object": (["FOLDER/run", "FOLDER/bad/list.jsonl"], "line 1: is a JSON list"),
    "no text": (["FOLDER/run", "FOLDER/bad/fields.jsonl"], "line 1: has only 'txt'"),
    "an empty text": (["FOLDER/run", "FOLDER/bad/nothing.jsonl"], "line 1: 'text' has no token"),
    "an empty completion": (["FOLDER/run", "FOLDER/bad/completion.jsonl"], "line 1: 'completion' has no token"),
    "a token outside the vocabulary": (["FOLDER/run", "FOLDER/bad/outside.jsonl"], "token 256 is outside .* 0 to 255"),
    "tokens that are none": (["FOLDER/run", "FOLDER/bad/halves.jsonl"], "'tokens' must be a list of token ids"),
    "a text that is too long": (["FOLDER/run", "FOLDER/bad/long.jsonl"], "has 2049 tokens, .* at most 2048"),
    "a budget below a text": (["FOLDER/run", "FOLDER/texts.jsonl", "--max-tokens", "9"], "give at least that"),
    "no stages": (
        ["FOLDER/run", "FOLDER/texts.jsonl", "--pp", "0"],
        "parallel.pp = 0 is not possible; it must be at least 1",
    ),
    "more stages than units": (["FOLDER/run", "FOLDER/texts.jsonl", "--pp", "7"], "7 stages.* 6 units"),
    "no temperature": (
        ["FOLDER/run", "FOLDER/texts.jsonl", "--temperature", "nan"],
        "score.temperature = nan is not a finite number",
    ),
    "an output that exists": (
        ["FOLDER/run", "FOLDER/texts.jsonl", "--output", "FOLDER/corpus.py"],
        "was left as it is",
    ),
    "no folder for the output": (["FOLDER/run", "FOLDER/texts.jsonl", "--output", "FOLDER/a/b"], "there is no folder"),
}
BAD = {
    "empty": "\n",
    "words": '{"text": "a"}\nhello',
    "list": "[1, 2]",
    "fields": '{"txt": "a"}',
    "nothing": '{"text": ""}',
    "completion": '{"prompt": "a", "completion": ""}',
    "outside": '{"tokens": [1, 256]}',
    "halves": '{"tokens": [0.5]}',
    "long": json.dumps({"text": "a" * 2049}),
}


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, bytes]:
    """All files there are, once those to be refused have been written."""
    (folder / "bad").mkdir()
    for name, text in BAD.items():
        (folder / "bad" / f"{name}.jsonl").write_text(text)
    (folder / "empty run").mkdir()
    (folder / "empty run" / "run.toml").write_bytes((folder / "run.toml").read_bytes())
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words, told", REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_told_in_one_sentence_and_changes_nothing(
    words: list[str], told: str, folder: Path, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert os.environ.get("RANK") is None
    code = main(["score", *(word.replace("FOLDER", str(folder)) for word in words)])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.startswith("penstock: ") and err.count("\n") == 1
    assert re.search(told, err), err
    assert files_of(folder) == files
