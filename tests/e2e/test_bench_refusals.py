"""What cannot be measured here is refused before anything is built: on a GPU, or against a library that is missing."""

import sys
from types import SimpleNamespace

import pytest
import torch

from penstock.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_part_of_generation_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--parts", "emulated", "gpu"]) == 2
    told = capsys.readouterr()
    assert "--parts gpu needs a CUDA device" in told.err and "emulated run here" in told.err
    assert told.out == ""


def test_a_peer_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.bench.peers.find_spec", lambda name: None)
    assert main(["bench", "generate", "--against", "ctranslate2", "--quantize", "int8"]) == 2
    told = capsys.readouterr()
    assert "pip install 'penstock[bench]'" in told.err and len(told.err.splitlines()) == 1 and not told.out


def test_a_peer_that_lacks_these_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = SimpleNamespace(get_supported_compute_types=lambda device: {"int8", "float32"})
    monkeypatch.setattr("penstock.bench.peers.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "ctranslate2", library)
    assert main(["bench", "generate", "--against", "transformers", "ctranslate2", "--precision", "bf16"]) == 2
    told = capsys.readouterr()
    assert "does not compute in bfloat16" in told.err and "float32, int8" in told.err and told.out == ""
