"""With `deterministic = true` a GPU computes with kernels that give their bits again, and sampling works with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, PackedBatch, SamplingParams
from penstock.engine import pipeline
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.precision import deterministic_if, deterministic_kernels
from penstock.engine.rehearsal.units import without_values
from penstock.model import decoder_units, sampling
from penstock.model.sampling import cumulative_, sums_by_blocks
from penstock.settings import Layout, ModelConfig
from tests.unit.engine.test_step_launches import LaunchMeter

CONFIG = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, max_length=32)


def is_on() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.shows(211)
def test_on_a_gpu_the_option_switches_on_deterministic_kernels_and_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert deterministic_if(False, gpu) is deterministic_if(True, cpu) is nullcontext
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    with deterministic_if(True, gpu)():
        assert is_on() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        # Else each new tensor would first be filled.
        assert not settings.fill_uninitialized_memory
    assert not is_on() and settings.fill_uninitialized_memory is before
    with pytest.raises(ArithmeticError), deterministic_kernels():
        raise ArithmeticError
    assert not is_on()


@pytest.mark.shows(211)
def test_steps_scores_and_generation_run_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times_entered = 0

    @contextmanager
    def counted() -> Iterator[None]:
        nonlocal times_entered
        times_entered += 1
        with deterministic_kernels():
            yield

    def on_any_device(asked: bool, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
        return counted if asked else nullcontext

    seen: dict[str, bool] = {}

    def loss_fn(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        seen["loss"] = is_on()
        logits.register_hook(lambda grad: seen.update(backward=is_on()))
        return logits.float().square().sum()

    def hook(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        seen["score"] = is_on()
        return logits[:, :1]

    draw_tokens = sampling._choose
    monkeypatch.setattr(pipeline, "deterministic_if", on_any_device)
    monkeypatch.setattr(sampling, "_choose", lambda *args: (seen.update(draw=is_on()), draw_tokens(*args))[1])
    engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), 16, Layout(), deterministic=True)
    batch = PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
    engine.train_batch(batch, loss_fn)
    engine.forward(batch, hook)
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=2, temperature=1.0, top_p=0.9), GenerateOptions())
    assert seen == {"loss": True, "backward": True, "score": True, "draw": True} and times_entered == 3
    assert not is_on()
    engine.close()


@pytest.mark.shows(211)
@pytest.mark.parametrize("num_values", [1, 127, 128, 129, 5_000, 128 * 128 + 1])
def test_sums_by_blocks_are_cumulative_sums(num_values: int) -> None:
    values_SV = torch.rand(3, num_values, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(sums_by_blocks(values_SV), values_SV.cumsum(-1), rtol=1e-14, atol=1e-13)


@pytest.mark.shows(211)
def test_a_gpu_takes_them_under_the_option_alone_and_a_cpu_never() -> None:
    def launches(device: str) -> set[str]:
        with without_values(), torch.no_grad():
            values_SV = torch.empty(2, 300, dtype=torch.float64, device=device)
            with LaunchMeter() as meter:
                cumulative_(values_SV)
        return set(meter.launches)

    with deterministic_kernels():
        assert "cumsum_" in launches("cpu") and not launches("cuda") & {"cumsum", "cumsum_"}
    assert "cumsum_" in launches("cuda")
