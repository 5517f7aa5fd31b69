"""The loop of a run, resumed: a model that draws random numbers in its steps goes on as if nothing had stopped it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout
from penstock.cli.processes.train_worker import TrainLoop
from penstock.engine import EngineOptions
from penstock.engine.folders.run_parts import RunData
from penstock.settings import ScheduleConfig, from_dict
from tests.dist.launch import run_ranks

HIDDEN, STEPS, STOPPED_AFTER = 16, 5, 2


class Noisy(nn.Module):
    """A layer with dropout; each of its forwards draws from the process's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def start(folder: Path, output: str, pp: int, seed: int = 0) -> TrainLoop:
    """One start of a run, with random numbers that no other start and no other rank has."""
    corpus = folder / "corpus.py"
    table = {
        "output": str(folder / output),
        "data": {
            "corpus": str(corpus),
            "cache": None,
            "validation_fraction": 0.0,
            "sequence_length": 16,
            "num_sequences": 4,
        },
        "parallel": {"pp": pp, "timeout_s": 60.0},
        "train": {"steps": STEPS, "num_microbatches": 2},
        "log": {"tensorboard": False, "timeline": False},
    }
    config = from_dict(table)
    # As the folder of a run is, before its loop begins.
    Path(config.output).mkdir(exist_ok=True)
    data = RunData.load(config)
    torch.manual_seed(0)
    layers = [nn.Embedding(data.corpus.vocab_size, HIDDEN), Noisy(), Noisy(), nn.Linear(HIDDEN, data.corpus.vocab_size)]
    # So that every rank draws.
    by_hand = ScheduleConfig(cut=(4,) if pp == 1 else (2, 2))
    options = EngineOptions(by_hand, seed=seed, timeout_s=60.0, device="cpu")
    engine = Engine.from_layers(layers, HIDDEN, Layout(pp=pp), options)
    return TrainLoop(config, engine, data, folder=None)


def run(loop: TrainLoop, seed: int, stop_asked: Callable[[], bool] = lambda: False) -> tuple[int, float | None]:
    torch.manual_seed(seed)
    loop.resume()
    result = loop.run(stop_asked)
    loop.engine.grid.close()
    return result.step, result.loss


def whole_and_resumed(rank: int, folder: Path, pp: int) -> dict[str, Any]:
    """What a run of all steps comes to on this rank, and one that was stopped; and that seeds matter here."""
    whole, stopped = start(folder, "whole", pp), start(folder, "stopped", pp)
    ends = [run(whole, seed=10 + rank)]
    run(stopped, 10 + rank, lambda: stopped.engine.step == STOPPED_AFTER - 1)
    assert stopped.engine.step == STOPPED_AFTER and not stopped.result.complete
    resumed, other = start(folder, "stopped", pp), start(folder, "other", pp, seed=1)
    ends.append(run(resumed, seed=99))
    assert resumed.result.resumed_from == STOPPED_AFTER
    ends.append(run(other, seed=20 + rank))
    states = [
        {name: value.clone() for name, value in loop.engine.state().items() if isinstance(value, Tensor)}
        for loop in (whole, resumed)
    ]
    return {"ends": ends, "states": states}


@pytest.mark.shows(96)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_resumed_run_draws_the_random_numbers_it_would_have_drawn(tmp_path: Path, pp: int) -> None:
    (tmp_path / "corpus.py").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(60)))
    for found in run_ranks(pp, whole_and_resumed, tmp_path, pp):
        whole, resumed, other = found["ends"]
        assert whole[0] == STEPS and resumed == whole, "the last step's loss, bit for bit"
        assert other[1] != whole[1], "a run in which random numbers change nothing shows nothing"
        weights, weights_after_resume = found["states"]
        assert weights.keys() == weights_after_resume.keys() and len(weights) > 2
        assert all(torch.equal(value, weights_after_resume[name]) for name, value in weights.items())
