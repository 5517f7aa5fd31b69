"""Everything the engine does on a machine without a GPU, in real processes, with nothing of CUDA ever touched."""

from typing import Any

import pytest
import torch

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.training.scorer import token_scores
from penstock.model import decoder_units
from penstock.schedule import names
from penstock.settings import ModelConfig, Precision, ScheduleConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, max_length=64)
SCHEDULES = tuple(name for name in names() if name not in ("inference", "auto"))

# One of each placement with one copy of the model: the order of training has no say in generation.
GENERATING = ("1f1b", "interleaved", "zb-v")


def batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    return PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in (5, 3, 8, 4, 6, 2)])


def forbid_cuda() -> None:
    def touched(*arguments: Any) -> Any:
        raise AssertionError("CUDA was touched on a run without a GPU")

    torch.cuda.is_available = lambda: False
    for name in ("_lazy_init", "init", "synchronize", "current_stream", "current_device", "Stream", "Event"):
        setattr(torch.cuda, name, touched)


def everything(rank: int, pp: int) -> dict[str, Any]:
    """By schedule and precision: a step's loss, then what validation, scoring and generation say."""
    forbid_cuda()
    found = {}
    for name in SCHEDULES:
        for precision in (Precision.FP32, Precision.BF16) if name == "1f1b" else (Precision.FP32,):
            options = EngineOptions(ScheduleConfig(name), precision=precision, timeout_s=60.0)
            engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=pp), options)
            spec, told = MicroBatchSpec(num=4), []
            told.append(engine.train_batch(batch(), micro_batches=spec).loss)
            told.append(engine.evaluate([batch()], micro_batches=spec))
            told.append(
                engine.forward(batch(), token_scores(), micro_batches=spec, broadcast=True)["log_probs"].tolist()
            )
            if name in GENERATING:
                written = engine.generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=5))
                told.append([token for one in written for token in one.tokens])
            engine.close()
            engine.grid.close()
            found[name, precision.value] = told
    return found


@pytest.mark.shows(14)
def test_every_mode_runs_without_a_gpu_and_says_what_one_process_says() -> None:
    alone = run_ranks(1, everything, 1, timeout_s=90.0)[0]
    for found in run_ranks(2, everything, 2, timeout_s=150.0):
        assert found.keys() == alone.keys() and len(found) == len(SCHEDULES) + 1 > 10
        for case, told in found.items():
            for two_ranks, one in zip(told, alone[case], strict=True):
                assert two_ranks == pytest.approx(one, abs=1e-5), case
