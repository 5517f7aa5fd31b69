"""A process that ends before it makes its engine: the others say so at once, instead of waiting for it."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock import Engine, Layout
from penstock.engine.own_layers import units_of_layers
from penstock.model import ModelGroups, UnitSpec
from penstock.runtime.transport import default_store
from tests.dist.launch import run_outcomes
from tests.hugging_face import make_model

# The others would wait this long.
TIMEOUT_S = 60.0
# Seconds on a machine that may have several other things to do.
LIMIT_S = 10.0


def make(rank: int, folder: Path | None, others_are_late: bool) -> str:
    if rank == 1:
        raise OSError("shard 7 cannot be read")
    if others_are_late:
        # They find its connection closed, where otherwise they wait for its word.
        time.sleep(2.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if folder is None:
            layers = [nn.Embedding(16, 8), nn.Linear(8, 16)]
            Engine.from_layers(layers, 8, Layout(dp=2), timeout_s=TIMEOUT_S, device="cpu")
        else:
            Engine.from_hf(folder, Layout(dp=2), timeout_s=TIMEOUT_S, device="cpu")
    assert time.monotonic() - start < LIMIT_S
    return str(caught.value)


@pytest.mark.parametrize(("pretrained", "others_are_late"), [(False, False), (False, True), (True, False)])
def test_a_process_that_ends_before_its_engine_is_named(
    pretrained: bool, others_are_late: bool, tmp_path: Path
) -> None:
    if pretrained:
        make_model("llama").save_pretrained(tmp_path)
    first, second = run_outcomes(2, make, tmp_path if pretrained else None, others_are_late)
    assert first.value == (
        "rank 1 has ended, or has not reached the construction of the engine in time; its own output says why"
    )
    assert second.error is not None and "OSError: shard 7 cannot be read" in second.error


def make_and_stay(rank: int, where: str) -> str:
    """Three ranks, of which one ends, and no other before all have been heard."""

    def units(groups: ModelGroups) -> tuple[UnitSpec, ...]:
        if rank == 1 and where == "in the construction":
            os._exit(3)
        torch.manual_seed(0)
        return units_of_layers([nn.Embedding(16, 8), nn.Linear(8, 16)])

    if rank == 1 and where == "before":
        os._exit(3)
    start, store = time.monotonic(), default_store()
    with pytest.raises(RuntimeError) as caught:
        Engine(units, 8, Layout(dp=3), timeout_s=TIMEOUT_S, device="cpu")
    assert time.monotonic() - start < LIMIT_S
    store.set(f"{rank} has heard", "")
    store.wait(["0 has heard", "2 has heard"])
    return str(caught.value)


@pytest.mark.parametrize("where", ["before", "in the construction"])
def test_all_others_name_it_at_once_though_none_of_them_ends(where: str) -> None:
    told = {
        "before": "rank 1 has ended, or has not reached the construction of the engine in time",
        "in the construction": "rank 1 has ended, or does not answer, while the engine is made",
    }
    first, second, third = run_outcomes(3, make_and_stay, where)
    assert (first.value, third.value) == (f"{told[where]}; its own output says why",) * 2, (first, third)
    assert second.exit_code == 3
