"""What layers keep where no engine can see it is refused by name, in a sentence that says what would be possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, PackedBatch
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 16
WORLDS = (1, 2)


def batch() -> PackedBatch:
    return PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 7, 4)])


def opened(layers: list[nn.Module], world: int) -> Engine:
    return Engine.from_layers(layers, WIDTH, Layout(pp=world), device="cpu", timeout_s=60.0)


def closed(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


def words_of(call: Callable[[], object]) -> str:
    """What an exception says; fails if there is none."""
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


# ---- state beside tensors


class Keeps(nn.Module):
    """Has an extra state that is given to it, as layers with statistics of 8-bit numbers do."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return x


def saved(rank: int, world: int, folder: Path) -> list[str]:
    """What is said of each extra state at the first save, "" where it is saved."""
    found = []
    for number, state in enumerate(({"calls": 3}, torch.ones(()), 0, None, torch.zeros(0), {}, b"")):
        layers = [nn.Embedding(VOCAB, WIDTH), nn.Sequential(Keeps(state)), nn.Linear(WIDTH, VOCAB)]
        engine = opened(layers, world)
        assert engine.train_batch(batch()).success
        save = partial(engine.save, folder / str(number))
        if number < 3:
            found.append(words_of(save))
            assert not any(folder.glob(f"{number}/*"))
        else:
            save()
        closed(engine)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_extra_state_is_refused_at_the_first_save_unless_there_is_none(world: int, tmp_path: Path) -> None:
    for found in run_ranks(world, saved, world, tmp_path):
        assert len(found) == 3
        for words in found:
            assert "layers.1.0 keeps an extra state (get_extra_state of Keeps)" in words
            assert "register_buffer" in words
