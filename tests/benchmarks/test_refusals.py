"""What cannot be measured here is refused before anything is built: on a GPU, or against a library that is missing."""

import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks.common import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_generation_on_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("generate_gpu", []) == 2
    told = capsys.readouterr()
    assert "needs a CUDA device" in told.err and "benchmarks.generate needs none" in told.err
    assert told.out == ""


def test_a_peer_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.generate.find_spec", lambda name: None)
    assert main("generate", ["--against", "ctranslate2", "--quantize", "int8"]) == 2
    told = capsys.readouterr()
    assert "pip install 'penstock[bench]'" in told.err and len(told.err.splitlines()) == 1 and not told.out


def test_a_peer_that_lacks_these_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = SimpleNamespace(get_supported_compute_types=lambda device: {"int8", "float32"})
    monkeypatch.setattr("benchmarks.generate.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "ctranslate2", library)
    assert main("generate", ["--against", "transformers", "ctranslate2", "--precision", "bf16"]) == 2
    told = capsys.readouterr()
    assert "does not compute in bfloat16" in told.err and "float32, int8" in told.err and told.out == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "0"], "num_layers = 0: at least 1"),
        (["--prompts", "0"], "num_prompts = 0"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--hidden-size", "65"], "hidden_size = 65: a multiple of 64"),
        (["--hidden-size", "-64"], "hidden_size = -64"),
        (["--kv-heads", "7"], "num_kv_heads = 7"),
        (["--quantize", "int4", "--intermediate-size", "100"], "a multiple of 32"),
    ],
)
def test_sizes_that_no_model_has_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("generate", words) == 2
    found = capsys.readouterr()
    assert told in found.err and len(found.err.splitlines()) == 1 and found.out == ""
