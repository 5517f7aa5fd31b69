"""`penstock generate` from a saved run: on the command line, over processes, from files, and its refusals."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.answer_text import AnswerText
from penstock.cli.main import main
from penstock.data.tokenizer import load_tokenizer
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


def test_two_processes_give_the_same_answers_as_one(model: Path) -> None:
    words = [str(model), "def f1", "return", "--max-new-tokens", "12", "--samples", "2", "--json", "--raw-log-probs"]
    code, alone, _ = call(*words)
    assert code == 0
    command = [sys.executable, "-m", "penstock.cli.main", "generate", *words, "--pp", "2", "--rows", "1"]
    two = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert two.returncode == 0, two.stderr
    assert answers(two.stdout) == answers(alone)
    assert [(answer["prompt"], answer["sample"]) for answer in answers(alone)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


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
        (["a", "--top-p", "2"], "top_p=2.0"),
        (["a", "--temperature", "-1"], "temperature=-1.0"),
        (["a", "--max-new-tokens", "5000"], "max_length=2048"),
        (["a", "--end-token", "999"], "end_tokens=(999,)"),
        (["a", "--pp", "99"], "at most 6 are possible"),
        (["a", "--file", "b.jsonl"], "given twice"),
        (["a", "--stop", ""], "--stop is an empty text"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
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
