"""`penstock generate` from a saved run: on the command line, over processes, from files, and its refusals."""

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.main import main
from penstock.cli.output import ResultsFile
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.generation.answers import AnswerText
from tests.e2e.training import run, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run."""
    folder = tmp_path_factory.mktemp("generate")
    ended = run(str(write_run(folder, "run", 10)), "--parallel.pp", "1", "--validation.every", "0")
    assert ended.exit_code == 0, ended.err
    return folder / "run"


def call(*words: str) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["generate", *words])
    return code, out.getvalue(), err.getvalue()


def answers(out: str) -> list[dict[str, object]]:
    content = json.loads(out)
    assert content["num_tokens"] == sum(len(answer["tokens"]) for answer in content["answers"]) > 0
    return content["answers"]


@pytest.mark.shows(129)
def test_two_pipelines_of_two_processes_give_the_same_answers_as_one_process(model: Path) -> None:
    words = [str(model), "def f1", "return", "--max-new-tokens", "12", "--samples", "2", "--json", "--raw-log-probs"]
    words += ["--repetition-penalty", "1.2", "--min-p", "0.01", "--top-log-probs", "2", "--seed", "3"]
    words += [word for letter in "aeinot" for word in ("--stop", letter)]
    words += ["--bad-word", "re", "--logit-bias", "32=-1.5", "--frequency-penalty", "0.1"]
    code, alone, _ = call(*words)
    assert code == 0
    two = run(*words, "--pp", "2", "--dp", "2", "--rows", "1", command="generate")
    assert two.exit_code == 0, two.err
    assert answers(two.out) == answers(alone)
    assert any(answer["ending"] == "stopped" for answer in answers(alone)), "no stop string was met"
    assert [(answer["prompt"], answer["sample"]) for answer in answers(alone)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_where_no_layout_is_given_a_small_model_has_one_thread_and_it_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(model), "def f1", "return", "--max-new-tokens", "8", "--json"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        code, alone, err = call(*words)
        assert code == 0 and torch.get_num_threads() == 1
        assert "penstock: --pp 1 --threads 1 fits this machine" in err
        code, shared, err = call(*words, "--threads", "2")
        assert code == 0 and torch.get_num_threads() == 2 and "thread" not in err
    finally:
        torch.set_num_threads(before)
    assert answers(shared) == answers(alone)


def test_a_file_of_prompts_becomes_a_file_of_answers_in_its_order(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "def f1", "id": "a"}, {"tokens": [100, 101, 102]}, {"prompt": "x" * 50}]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, out, _ = call(str(model), "--file", str(prompts), "--max-new-tokens", "4")
    assert code == 0 and "3 answers" in out
    found = [json.loads(line) for line in (tmp_path / "prompts.answers.jsonl").read_text().splitlines()]
    assert [(line["line"], line.get("id"), len(line["tokens"])) for line in found] == [
        (1, "a", 4),
        (2, None, 4),
        (3, None, 4),
    ]
    code, _, err = call(str(model), "--file", str(prompts))
    assert code == 2 and "exists already" in err


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of six prompts, two of them alike."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(f"{json.dumps({'prompt': text})}\n" for text in ("def f1", "return", "a", "a", "if", "x ="))
    )
    return path


def stop_in_the_middle(model: Path, prompts: Path, patch: pytest.MonkeyPatch, *words: str) -> list[Path]:
    """The command, which dies once three answers are there; gives what it has left."""
    write = ResultsFile.write

    def write_three(file: ResultsFile, answers: list[Mapping[str, Any]], *, to_disk: bool) -> None:
        if len(file.read()) == 3:
            raise KeyError("made to stop")
        write(file, answers, to_disk=to_disk)

    with patch.context() as patched, pytest.raises(KeyError, match="made to stop"):
        patched.setattr(ResultsFile, "write", write_three)
        patched.setattr("penstock.cli.processes.session._report_failure", fail)
        main(["generate", str(model), "--file", str(prompts), "--max-new-tokens", "5", *words])
    return sorted(prompts.parent.glob(".*.unfinished"))


def fail(group: object, error: Exception) -> None:
    raise error


def test_a_stopped_call_goes_on_with_the_answers_that_are_not_there_yet(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [str(model), "--file", str(prompts), "--max-new-tokens", "5", "--samples", "2", "--rows", "2"]
    assert call(*words, "--output", str(tmp_path / "whole.jsonl"))[0] == 0
    [left] = stop_in_the_middle(model, prompts, monkeypatch, "--samples", "2", "--rows", "2")
    kept = left.read_text()
    assert kept.count("\n") == 3
    left.write_text(kept + '{"prompt": 5, "sam')  # what a kill may leave of a line
    code, out, _ = call(*words)
    assert code == 0 and "12 answers (3 of them there already), 45 tokens" in out
    found, whole = ((tmp_path / name).read_text().splitlines() for name in ("prompts.answers.jsonl", "whole.jsonl"))
    assert set(kept.splitlines()) < set(found) and not left.exists()
    assert len({json.loads(line)["text"] for line in whole}) > 6
    for one, other in zip(map(json.loads, found), map(json.loads, whole), strict=True):
        # Which rows are read beside others may change a product's last bit.
        assert one.pop("log_probs") == pytest.approx(other.pop("log_probs"), abs=1e-5)
        assert one == other


def test_what_a_stopped_call_has_left_is_not_mixed_with_other_answers(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [left] = stop_in_the_middle(model, prompts, monkeypatch)
    content = left.read_bytes()
    code, out, _ = call(str(model), "--file", str(prompts), "--max-new-tokens", "5", "--temperature", "0")
    assert code == 0 and "6 answers, 30 tokens" in out
    assert sorted(prompts.parent.glob(".*.unfinished")) == [left] and left.read_bytes() == content
    assert len((prompts.parent / "prompts.answers.jsonl").read_text().splitlines()) == 6


def test_an_answer_ends_before_its_stop_string(model: Path) -> None:
    words = [str(model), "def f1", "--max-new-tokens", "40", "--json"]
    [whole] = answers(call(*words)[1])
    text = str(whole["text"])
    stop = text[5:7]
    assert len(stop) == 2
    [cut] = answers(call(*words, "--stop", stop)[1])
    assert cut["text"] == text[: text.index(stop)]
    assert cut["ending"] == "stopped"
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]  # type: ignore[index,arg-type]


def test_answers_are_printed_one_after_another_behind_their_prompts(model: Path) -> None:
    [answer] = answers(call(str(model), "def f1", "--max-new-tokens", "9", "--json")[1])
    assert call(str(model), "def f1", "--max-new-tokens", "9")[1] == f"def f1{answer['text']}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([""], "prompt 0 is empty"),
        (["a", "--top-p", "2"], "sampling.top_p = 2.0"),
        (["a", "--temperature", "-1"], "sampling.temperature = -1.0"),
        (["a", "--max-new-tokens", "5000"], "max_length=2048"),
        (["a", "--end-token", "999"], "end_tokens holds the token 999; the model knows 0 to"),
        (["a", "--pp", "99"], "at most 6 are possible"),
        (["a", "--file", "b.jsonl"], "given twice"),
        (["a", "--stop", ""], "sampling.stop holds an empty text"),
        (["a", "--bad-word", ""], "--bad-word '' is empty; give a text"),
        (["a", "--logit-bias", "x=y"], "'x=y' is no bias; give a token id and a number, such as 17=-2.5"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl': No such file"),
    ],
)
def test_a_mistake_is_told_in_one_sentence_before_anything_starts(model: Path, words: list[str], told: str) -> None:
    code, out, err = call(str(model), *words)
    assert (code, out) == (2, "")
    assert told in err and err.count("\n") == 1


@pytest.mark.parametrize("stop", ["", "e w", "\N{GREEK SMALL LETTER OMEGA}", "zz"])
def test_the_shown_pieces_make_the_text_up_to_the_stop_string(stop: str) -> None:
    whole = "caf\N{LATIN SMALL LETTER E WITH ACUTE} we wé \N{GREEK SMALL LETTER OMEGA}!"
    text, shown = AnswerText(load_tokenizer("bytes"), [stop] if stop else []), []
    for token in whole.encode():
        shown.append(text.add(token))
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
        if text.stopped:
            break
    shown.append(text.finish())
    assert "".join(shown) == text.text == (whole.split(stop)[0] if stop else whole)
    assert text.stopped == bool(stop and stop in whole)
