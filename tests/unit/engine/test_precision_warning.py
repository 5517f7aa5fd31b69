"""What is said of the precision in which a GPU computes."""

import pytest
import torch

from penstock import Engine
from penstock.engine import pipeline
from penstock.engine.precision import slow_precision_warning
from penstock.settings import Precision


@pytest.mark.shows(212)
def test_fp32_without_tf32_is_named_on_a_gpu_alone() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    warning = slow_precision_warning(Precision.FP32, gpu)
    assert warning is not None and "\n" not in warning and '"bf16"' in warning
    others = [precision for precision in Precision if precision is not Precision.FP32]
    assert [slow_precision_warning(precision, gpu) for precision in others] == [None] * len(others)
    assert slow_precision_warning(Precision.FP32, cpu) is None
    # As the warning says.
    torch.set_float32_matmul_precision("high")
    assert slow_precision_warning(Precision.FP32, gpu) is None
    torch.set_float32_matmul_precision("highest")
    assert slow_precision_warning(Precision.FP32, gpu) is not None


@pytest.mark.shows(212)
def test_an_engine_says_it_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pipeline, "slow_precision_warning", lambda precision, device: f"{precision} on {device}")
    Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8).close()
    assert caplog.messages == ["fp32 on cpu"]
