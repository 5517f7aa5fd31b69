"""What is measured on a GPU alone is refused where there is none, before anything is built."""

import pytest
import torch

from penstock.cli.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_part_of_generation_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--parts", "emulated", "gpu"]) == 2
    told = capsys.readouterr()
    assert "--parts gpu needs a CUDA device" in told.err and "emulated run here" in told.err
    assert told.out == ""
