"""What goes wrong in a command is one sentence with its cause, and the exit code says what came of it."""

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, StepError, token_cross_entropy
from penstock.cli.main import STOPPED, main
from tests.dist.launch import run_ranks
from tests.e2e.training import Started, exact_metrics, last_step, run, wait_until, write_run
from tests.fork_server import run_command
from tests.hugging_face import make_model
from tests.plain_user import plain_user

NOT_UTF8 = os.fsdecode(b"\xff")
PYTHON = [sys.executable]
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, which was trained, and a model of Hugging Face's."""
    folder = tmp_path_factory.mktemp("causes")
    assert main(["train", str(write_run(folder, "run", 6)), "--parallel.pp", "1"]) == 0
    make_model("llama").save_pretrained(folder / "model")
    return folder


def files_of(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "cache" not in path.parts}


def is_one_sentence(err: str) -> bool:
    return err.startswith("penstock") and err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err


# ---- What a command is given: refused in one sentence, and no file is left

NEW, RUN = ("train", "run.toml", "--output", "new"), ("train", "run.toml")
LINE = "texts.jsonl, line 1: "

REFUSED: dict[str, tuple[bytes | None, Sequence[str], str]] = {
    "a file's name that is not UTF-8": (None, ("train", f"{NOT_UTF8}.toml"), r"\\udcff.toml cannot be read: no such"),
    "a setting that is not UTF-8": (
        None,
        ("train", "run.toml", "--output", NOT_UTF8),
        r"output = '\\udcff' is not UTF-8",
    ),
    "settings that are not UTF-8": (b"a = '\xff'", ("train", "texts.jsonl"), r"not UTF-8 \(byte 5\); convert"),
    "a schedule that is not UTF-8": (b"\xff", ("schedule", "show", "texts.csv"), r"texts.csv is not UTF-8 \(byte 0\)"),
    "a corpus that is not UTF-8": (b"\xff", (*NEW, "--data.corpus", "texts.jsonl"), r"line 1: is not UTF-8 \(byte 0\)"),
    "a row whose text is a number": (
        b'{"text": 3}',
        (*NEW, "--data.corpus", "texts.jsonl"),
        f"{LINE}has no text in the field",
    ),
    "a line of texts and tokens": (
        b'{"text": "a", "tokens": [1]}',
        ("score", "run", "texts.jsonl"),
        f"{LINE}has 'tokens' and 'text', of which one is expected",
    ),
    "a row with two texts": (
        b'{"text": "a", "text": "b"}',
        (*NEW, "--data.corpus", "texts.jsonl"),
        rf"{LINE}is not JSON \(it gives the key 'text' twice; give it once\)",
    ),
    "too few words": (None, ("score",), "penstock score: the following arguments are required: MODEL, FILE.jsonl$"),
    "a word too many": (None, ("train", "run.toml", "3"), "penstock train has no use for '3'"),
    "a cluster's size as text": (
        b'host_type = "h100-sxm"\n[device]\nmemory_gib = "80"',
        ("plan", "run.toml", "--cluster", "texts.toml"),
        "device.memory_gib = '80': expected float|no host is called",
    ),
}


@pytest.mark.shows(168)
@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_refused_is_one_sentence_with_its_cause(
    mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    content, words, cause = REFUSED[mistake]
    monkeypatch.chdir(folder)
    before = files_of(folder)
    given = next((Path(word) for word in words if word.startswith("texts.")), Path("texts.jsonl"))
    if content is not None:
        given.write_bytes(content)
    try:
        code = main(list(words))
    finally:
        given.unlink(missing_ok=True)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    assert is_one_sentence(err), err
    assert re.search(cause, err, re.IGNORECASE), err
    assert not err.startswith("penstock: penstock")
    assert files_of(folder) == before


@pytest.mark.shows(168)
def test_names_and_texts_that_are_not_utf8_are_used_where_the_system_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    file = Path(f"{NOT_UTF8}.jsonl")
    file.write_text('{"text": "abc", "id": "\\ud800"}\n')
    assert main(["score", "run", str(file)]) == 0
    assert r"wrote \udcff.scores.jsonl" in capfd.readouterr().out
    [line] = Path(f"{NOT_UTF8}.scores.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["id"] == "\ud800"


def run_with_input(arguments: Sequence[str], content: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PYTHON, "-m", "penstock", *arguments], input=content, capture_output=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.shows(168)
def test_a_prompt_at_standard_input_that_is_not_utf8_is_refused(folder: Path):
    ended = run_with_input(["generate", str(folder / "run")], b"ab\xff")
    assert ended.returncode == 2
    assert ended.stderr.decode().endswith("penstock: standard input is not UTF-8 (byte 2); convert it to UTF-8\n")


@pytest.mark.shows(168)
def test_a_corpus_that_may_not_be_read_is_named_and_not_its_cache(folder: Path, capfd: pytest.CaptureFixture[str]):
    closed = folder / "texts" / "closed"
    closed.mkdir(parents=True)
    (closed / "corpus.txt").write_text("closed")
    (folder / "texts" / "open.txt").write_text("open" * 100)
    closed.chmod(0o000)
    words = ["train", "run.toml", "--parallel.pp", "1", "--data.cache", "own-cache", "--output", "elsewhere"]
    with plain_user(folder):
        for corpus, named in (("texts/closed/corpus.txt", "texts/closed/corpus.txt"), ("texts", "texts/closed")):
            code = main([*words, "--data.corpus", corpus])
            err = capfd.readouterr().err
            assert (code, err) == (2, f"penstock: {named}: permission denied\n")
    assert not (folder / "elsewhere").exists()


@pytest.mark.shows(168)
@pytest.mark.parametrize("dp", ["1", "2"])
def test_a_score_that_is_refused_leaves_no_file(folder: Path, tmp_path: Path, dp: str):
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[:] = float("nan")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2]}\n' * 2)
    before = files_of(tmp_path)
    ended = run(str(tmp_path / "model"), str(tmp_path / "texts.jsonl"), "--dp", dp, command="score")
    assert ended.exit_code == 2, ended.err
    assert "the scores of line 1 are not numbers" in ended.err and "Traceback" not in ended.err, ended.err
    assert files_of(tmp_path) == before


# ---- Where a command runs: no folder, few files, no reader


def in_a_folder_that_is_gone(arguments: Sequence[str]) -> int:
    gone = Path(arguments[-1])
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    return run_command(arguments[:-1])


def with_few_files(arguments: Sequence[str]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    return run_command(arguments)


@pytest.mark.shows(168)
@pytest.mark.parametrize(
    ("program", "cause"),
    [
        (in_a_folder_that_is_gone, "penstock: the working folder is gone; change to one that exists\n"),
        (
            with_few_files,
            "penstock: each of 2 processes needs at least 52 open files and connections, but 20 are allowed here; "
            "allow more (ulimit -n 52), or give a smaller layout\n",
        ),
    ],
)
def test_a_place_where_nothing_can_run_is_refused_at_once(
    tmp_path: Path, program: Callable[[Sequence[str]], int], cause: str
):
    words = [str(write_run(tmp_path, "run", 6))]
    words += [str(tmp_path / "gone")] if program is in_a_folder_that_is_gone else []
    began = time.monotonic()
    with Started(words, program=program) as started:
        ended = started.end(LIMIT_S)
    assert (ended.exit_code, ended.err) == (2, cause)
    assert time.monotonic() - began < LIMIT_S
    assert not (tmp_path / "run").exists()


@pytest.mark.shows(168)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_a_reader_that_goes_ends_a_generation_quietly(folder: Path, pp: str):
    words = [*PYTHON, "-m", "penstock", "generate", str(folder / "run"), "def", "--pp", pp, "--threads", "1"]
    with subprocess.Popen(
        [*words, "--max-new-tokens", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE, err
    assert err == ""


# ---- Errors that cannot say what they are


class Mute(Exception):
    def __str__(self) -> str:
        raise ArithmeticError("no words")


class MuteLayer(torch.nn.Linear):
    """A layer that fails once, in its second step, with an error that has no words."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # A failed step would undo a count of the layer's own.
        if next(calls) == 1:
            raise Mute
        return super().forward(input)


calls = itertools.count()


def mute_loss(*_: Any) -> torch.Tensor:
    raise Mute


def steps_with_mute_errors(rank: int) -> list[str]:
    layers = [torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), MuteLayer(4, 4), torch.nn.Linear(4, 8)]
    engine = Engine.from_layers(layers, hidden_size=4, layout=Layout(pp=2))
    batch, said = PackedBatch.from_documents([torch.arange(5)]), []
    spec = MicroBatchSpec(num=1)
    for loss in (token_cross_entropy, token_cross_entropy, mute_loss, token_cross_entropy):
        try:
            said.append(f"step {engine.train_batch(batch, loss, micro_batches=spec).step}")
        except StepError as error:
            said.append(str(error))
    engine.close()
    return said


@pytest.mark.shows(168)
def test_an_error_without_words_in_a_layer_or_a_loss_is_heard_by_all_ranks_and_the_next_step_goes_on():
    one, other = run_ranks(2, steps_with_mute_errors)
    assert one == other
    assert [said for said in one if said.startswith("step")] == ["step 1", "step 2"], one
    for said in (said for said in one if not said.startswith("step")):
        assert "Mute: Mute whose __str__ raises ArithmeticError" in said, said
    assert len(one) == 4


# ---- Runs that were stopped: not done, and the same command goes on


class StopsAtTwo:
    """A callback that ends a run, such as one with a limit of time."""

    def on_step(self, taken: Any) -> bool:
        return taken.step == 2


stops_at_two = StopsAtTwo()


@pytest.mark.shows(168)
@pytest.mark.parametrize(
    ("pp", "number", "ranks"),
    [("1", signal.SIGTERM, None), ("2", signal.SIGINT, None), ("2", signal.SIGTERM, [1])],
    ids=("one process", "Ctrl-C", "one rank"),
)
def test_a_run_that_was_stopped_says_by_which_signal_and_goes_on(
    tmp_path: Path, pp: str, number: signal.Signals, ranks: list[int] | None
):
    file, output = str(write_run(tmp_path, "run", 4000)), tmp_path / "run"
    with Started([file, "--parallel.pp", pp]) as started:
        wait_until(lambda: last_step(output) >= 3, started)
        started.signal(number, ranks)
        ended = started.end(LIMIT_S)
    assert ended.exit_code == 128 + number, ended
    assert re.search(r"stopped after step \d+ and saved; the same command continues from there\n$", ended.out), ended
    assert ended.err == ""
    step = int(re.findall(r"stopped after step (\d+)", ended.out)[0])
    with Started([file, "--parallel.pp", pp, "--resume"]) as started:
        wait_until(lambda: last_step(output) > step, started)
        started.signal(signal.SIGTERM)
        assert f"continuing {output} after step {step}\n" in started.end(LIMIT_S).out


@pytest.mark.shows(168)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_a_run_that_a_callback_stopped_is_not_done(tmp_path: Path, pp: str):
    file = str(write_run(tmp_path, "run", 8))
    stopped = run(file, "--parallel.pp", pp, "--watch.callbacks", f"{__name__}:stops_at_two")
    assert (stopped.exit_code, stopped.err) == (STOPPED, ""), stopped
    assert "stopped after step 3 and saved" in stopped.out, "all ranks hear of it with the next step"
    done = run(file, "--parallel.pp", pp)
    assert (done.exit_code, done.err) == (0, ""), done
    assert len(exact_metrics(tmp_path / "run")) >= 8


class ExitsAtTwo:
    """A callback that ends the process by itself: `SystemExit`, or as a library may do it."""

    def __init__(self, end: Callable[[int], Any]) -> None:
        self.end = end

    def on_step(self, taken: Any) -> None:
        if taken.step == 2:
            self.end(0)


exits_at_two, ends_at_two = ExitsAtTwo(sys.exit), ExitsAtTwo(os._exit)


@pytest.mark.shows(168)
@pytest.mark.parametrize(
    ("pp", "name", "said"),
    [
        ("1", "exits_at_two", r"penstock: process 0 was ended by SystemExit\(0\) before its work was done\n"),
        ("2", "exits_at_two", r"penstock: process [01] was ended by SystemExit\(0\) before its work was done\n"),
        (
            "2",
            "ends_at_two",
            r"penstock: rank [01] \(process \d+\) was ended with code 0 before its work was done; ",
        ),
    ],
)
def test_a_run_whose_process_ends_with_code_0_before_its_end_is_not_done(
    tmp_path: Path, pp: str, name: str, said: str
) -> None:
    file = str(write_run(tmp_path, "run", 8))
    stopped = run(file, "--parallel.pp", pp, "--watch.callbacks", f"{__name__}:{name}")
    assert stopped.exit_code == STOPPED, stopped
    assert re.match(said, stopped.err), stopped
    assert "done after" not in stopped.out


@pytest.mark.shows(168)
def test_what_torchrun_started_ends_with_the_signal_that_it_was_sent(tmp_path: Path):
    file, output = str(write_run(tmp_path, "run", 4000)), tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Started([file], launcher=torchrun) as started:
        wait_until(lambda: last_step(output) >= 3, started)
        started.signal(signal.SIGTERM, [1])
        ended = started.end(LIMIT_S)
    assert ended.exit_code == 1
    # Those that were not asked leave it to their agent to start them anew.
    codes = re.findall(r"exitcode +: (\S+)", ended.err)
    assert set(codes) <= {str(128 + signal.SIGTERM), str(STOPPED)} and codes, ended.err
    assert "stopped after step" in ended.out
