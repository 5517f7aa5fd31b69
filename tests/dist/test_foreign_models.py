"""transformers' own layers in the engine: any family, cut by its list of layers, scored and trained in any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from tests.dist.launch import run_ranks
from tests.hugging_face import CLOSE, make_model, make_sequences, reference_logits, stored_tensors

LENGTHS = (7, 2, 19, 40, 19, 4)
SPLIT = MicroBatchSpec(num=3, max_tokens=64)
WINDOW = {"head_dim": 8, "sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Learned positions, rotary ones, biases by distance; layers that give tensors and tuples; tied and scaled embeddings;
# windows in every other layer; experts that files hold apart; a recurrence instead of attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "phi": {},
    "gemma2": WINDOW,
    "falcon": {},
    "stablelm": {},
    "olmo": {},
    "bloom": {"n_head": 4, "n_layer": 3},
    "mixtral": EXPERTS,
    "mamba": {},
}
TRAINED = ("gpt2", "bloom", "mixtral")


def try_families(rank: int, layout: Layout, schedule: str, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """By family the logits, and for some what a training step gives: loss, parameters, and the folder written."""
    found: dict[str, Any] = {}
    sequences = make_sequences(LENGTHS)
    for family, folder in folders.items():
        options = EngineOptions(schedule=schedule, device="cpu")
        engine = Engine.from_hf(folder, layout, options, native=False)
        found[family] = engine.forward(PackedBatch.from_sequences({"tokens": sequences}), micro_batches=SPLIT)
        if family in TRAINED:
            loss = engine.train_batch(PackedBatch.from_documents(sequences), micro_batches=SPLIT).loss
            found[f"{family}, trained"] = loss
            engine.save_hf(out / family)
        engine.close()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each family's model."""
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        make_model(family, **FAMILIES[family]).save_pretrained(folder)
    return found


def test_any_family_scores_and_trains_alike_on_one_rank_and_on_two(folders: dict[str, Path], tmp_path: Path) -> None:
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    alone.mkdir()
    apart.mkdir()
    one = try_families(0, Layout(), "1f1b", folders, alone)
    two = run_ranks(2, try_families, Layout(pp=2), "zb-h1", folders, apart)[-1]
    assert one.keys() == two.keys()
    for family, folder in folders.items():
        expected = reference_logits(folder, make_sequences(LENGTHS))
        torch.testing.assert_close(one[family], expected, rtol=0, atol=CLOSE, msg=family)
        assert torch.equal(one[family], two[family]), family
    for family in TRAINED:
        assert one[f"{family}, trained"] == two[f"{family}, trained"]
        assert_equal_and_moved(stored_tensors(alone / family), stored_tensors(apart / family), folders[family])
        reference_logits(apart / family, make_sequences(LENGTHS))


def assert_equal_and_moved(one: dict[str, Tensor], two: dict[str, Tensor], folder: Path) -> None:
    before = stored_tensors(folder)
    assert one.keys() == two.keys() == before.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    unmoved = [name for name in one if one[name].is_floating_point() and torch.equal(one[name], before[name])]
    assert not unmoved
