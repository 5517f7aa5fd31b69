"""What cannot be measured here is refused before anything is built: on a GPU, or against a library that is missing."""

import pytest
import torch
from benchmarks.common import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_generation_on_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("generate_gpu", []) == 2
    told = capsys.readouterr()
    assert "needs a CUDA device" in told.err and "benchmarks.generate needs none" in told.err
    assert told.out == ""


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
