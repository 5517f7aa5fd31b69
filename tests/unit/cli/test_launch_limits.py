"""Processes of one machine: no more than it can hold, none once the command is to end, and nothing is left."""

import os
import signal
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.processes import launch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    form = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    LlamaForCausalLM(form).save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    return tmp_path / "model"


@pytest.mark.shows(148)
@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--pp", "1000000"],
        ["doctor", "--dp", "1000000", "--json"],
        ["score", "MODEL", "TEXTS", "--dp", "1000000"],
        ["generate", "MODEL", "--file", "TEXTS", "--dp", "1000000"],
    ],
    ids=" ".join,
)
def test_more_processes_than_the_machine_holds_are_refused_before_one_is_started(
    words: list[str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def start(*_: Any) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(launch._Workers, "start", start)
    places = {"MODEL": str(model), "TEXTS": str(model.with_name("texts.jsonl"))}
    assert main([places.get(word, word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith(
        "penstock: 1000000 processes need at least 31,250 GiB for themselves, but this machine has "
    ), err


def test_no_worker_is_started_after_a_request_to_end(capsys: pytest.CaptureFixture[str]):
    class Asked(ForkProcess):
        """A process, at whose start this one is asked to end."""

        def start(self) -> None:
            super().start()
            os.kill(os.getpid(), signal.SIGTERM)

    def wait() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(60)

    workers = launch._Workers([Asked(target=wait) for _ in range(1000)], 5.0)
    with launch._signals_caught() as signals:
        workers.start(signals)
        workers.watch(signals)
    assert [process.pid is not None for process in workers.processes] == [True] + [False] * 999
    assert workers.exit_code("starts again") == 128 + signal.SIGTERM
    assert "stopped by SIGTERM" in capsys.readouterr().err


@pytest.mark.shows(212)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": None}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ],
    ids=str,
)
def test_workers_have_what_suits_a_gpu_unless_the_user_has_said_otherwise(
    given: dict[str, str], expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = launch._environment(2, 1, 29400)
    assert {name: environment.get(name) for name in expected} == expected
