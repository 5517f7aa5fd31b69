"""Sizes beyond this machine's memory are refused before anything starts; an allocation that fails is one sentence."""

import re
import time
from pathlib import Path

import pytest
import torch

from penstock.cli.main import main, run_as_script
from penstock.cli.processes.machine import check_rows, check_training, memory_bytes
from penstock.cli.processes.meeting import Group
from penstock.cli.processes.session import _report_failure
from penstock.engine.folders.model_folder import open_model
from penstock.planner.shape import ModelShape
from penstock.runtime import PipelineError, StepError
from penstock.settings import ConfigError, from_dict, read_config
from tests.hugging_face import make_model


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.num_sequences", "2147483647"], "data.num_sequences = 2147483647 of data.sequence_length = 256"),
        (["--model.vocab_size", "2000000000"], "model.vocab_size = 2000000000, model.hidden_size = 128"),
        (["--model.hidden_size", "131072"], "model.hidden_size = 131072"),
    ],
)
@pytest.mark.parametrize("pp", ["1", "2"])
def test_a_run_that_cannot_be_held_is_refused_within_a_second(
    words: list[str], says: str, pp: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    began, output = time.process_time(), tmp_path / "run"
    assert main(["train", "--output", str(output), "--parallel.device", "cpu", "--parallel.pp", pp, *words]) == 2
    assert time.process_time() - began < 1
    err = capsys.readouterr().err
    assert re.fullmatch(rf"penstock: [^\n]*{says}[^\n]* need at least [\d,]+ GiB [^\n]*; give smaller sizes\n", err), (
        err
    )
    assert not output.exists()


def make_folder(path: Path) -> Path:
    make_model("llama").save_pretrained(path)
    return path


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("size", ["--rows", "--slots"])
def test_answers_whose_cache_cannot_be_held_are_refused(
    command: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_folder(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"tokens": [1]}\n')
    words = ["--file", str(prompts), "--max-new-tokens", "4"] if command == "generate" else []
    assert main([command, str(tmp_path), *words, "--device", "cpu", size, "2000000000"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"penstock: \d+ answers at a time [^\n]* GiB of memory; give smaller sizes\n", err), err
    assert not (tmp_path / "prompts.answers.jsonl").exists()


def test_what_a_gpu_may_hold_is_not_refused(tmp_path: Path):
    config = {"model": {"hidden_size": 131072}}
    with pytest.raises(ConfigError, match="weights and gradients"):
        check_training(from_dict({**config, "parallel": {"device": "cpu"}}))
    check_training(from_dict({**config, "parallel": {"device": "cuda"}}))
    check_rows(1, 10**12, 2, open_model(make_folder(tmp_path)), "cuda")


def test_experts_count_once_for_all_ranks_that_share_them(monkeypatch: pytest.MonkeyPatch):
    values = {"experts": {"num_experts": 8}, "parallel": {"dp": 4, "device": "cpu"}}
    num_parameters = ModelShape.of(from_dict(values).model.whole(1)).num_parameters
    monkeypatch.setattr("penstock.cli.processes.machine.memory_bytes", lambda: 3 * 6 * num_parameters)
    with pytest.raises(ConfigError, match="on 4 copies"):
        check_training(from_dict(values))
    check_training(from_dict({**values, "parallel": {**values["parallel"], "ep": 4}}))


def test_what_fits_is_not_refused(tmp_path: Path):
    check_training(read_config(Path(__file__).parents[3] / "examples" / "tiny.toml"))
    check_rows(4, 64, 4096, open_model(make_folder(tmp_path)), "cpu")


def test_a_caches_least_bytes_are_the_planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = open_model(make_folder(tmp_path))
    least = 6 * (ModelShape.of(model.config).cache_bytes(10, 2) + 10 * 8)
    monkeypatch.setattr("penstock.cli.processes.machine.memory_bytes", lambda: least)
    check_rows(2, 6, 10, model, "cpu")
    monkeypatch.setattr("penstock.cli.processes.machine.memory_bytes", lambda: least - 1)
    with pytest.raises(ConfigError, match="6 answers at a time"):
        check_rows(2, 6, 10, model, "cpu")


def failed_allocation() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    return caught.value


def test_a_failed_allocation_is_one_sentence_with_its_size(capsys: pytest.CaptureFixture[str]):
    group = Group(1, 2, 0, "127.0.0.1", 1, "a test")
    error = failed_allocation()
    step = StepError(f"rank 1 failed in 1F0, step 3: RuntimeError: {error}")
    why = "there is too little memory for 1,048,576.0 GiB; give smaller sizes"
    _report_failure(group, error)
    assert capsys.readouterr().err == f"penstock: process 1: {why}\n"
    # On another rank, which knows no more than the text, and on the one that failed.
    for step.__cause__ in (PipelineError("rank 1 has failed"), error):
        _report_failure(group, step)
        assert capsys.readouterr().err == f"penstock: process 1: rank 1 failed in 1F0, step 3: {why}\n"
    _report_failure(group, MemoryError())
    assert capsys.readouterr().err == "penstock: process 1: there is too little memory; give smaller sizes\n"


@pytest.mark.parametrize("error", [failed_allocation(), MemoryError()])
def test_so_it_is_before_processes_start(error: Exception, capsys: pytest.CaptureFixture[str]):
    def fail(words: list[str]) -> int:
        raise error

    assert run_as_script(fail, []) == 1
    assert re.fullmatch(r"penstock: there is too little memory[^\n]*; give smaller sizes\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "limit", "allowed"),
    [
        ("memory.max", "1000\n", 1000),
        ("memory.max", "max\n", None),
        ("memory/memory.limit_in_bytes", "700\n", 700),
    ],
)
def test_a_containers_limit_is_its_memory(tmp_path: Path, name: str, limit: str, allowed: int | None):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(limit)
    assert memory_bytes(tmp_path) == (allowed or memory_bytes(tmp_path / "nowhere"))
