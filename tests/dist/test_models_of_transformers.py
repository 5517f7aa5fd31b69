"""transformers' own layers in the engine: any family, cut by its list of layers, scored and trained in any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.model.transformers.skeleton import cache_argument
from penstock.settings import SamplingParams
from tests.dist.launch import run_ranks
from tests.hugging_face import CLOSE, make_model, make_sequences, reference_logits, stored_tensors

LENGTHS = (7, 2, 19, 40, 19, 4)
SPLIT = MicroBatchSpec(num=3, max_tokens=64)
WINDOW = {"head_dim": 8, "sliding_window": 5}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Learned positions, rotary ones, biases by distance; layers that give tensors and tuples; tied and scaled embeddings;
# windows in every other layer; experts that files hold apart; a recurrence instead of attention; rotary factors that
# depend on a text's length, so that texts of one length are computed together, and put back in their order.
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
    "phi3": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 16,
    },
}
TRAINED = ("gpt2", "bloom", "mixtral")
CONTINUED = ("gpt2", "bloom", "mixtral", "gemma2", "falcon", "opt")
PROMPTS = ((3, 4, 5), (6,), tuple(range(7, 20)))
NUM_NEW = 8


def try_families(rank: int, layout: Layout, schedule: str, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """By family the logits, for some what they continue prompts with, and what a training step after that gives."""
    found: dict[str, Any] = {}
    sequences = make_sequences(LENGTHS)
    for family, folder in folders.items():
        options = EngineOptions(schedule=schedule, device="cpu")
        engine = Engine.from_hf(folder, layout, options, native=False)
        found[family] = engine.forward(PackedBatch.from_sequences({"tokens": sequences}), micro_batches=SPLIT)
        if family in CONTINUED:
            greedy = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, num_samples=2)
            answers = engine.generate(PROMPTS, greedy).sequences
            found[f"{family}, continued"] = [list(answer.tokens) for answer in answers]
        if family in TRAINED:
            loss = engine.train_batch(PackedBatch.from_documents(sequences), micro_batches=SPLIT).loss
            found[f"{family}, trained"] = loss
            engine.save_hf(out / family)
        engine.close()
        engine.grid.close()
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
    for family in CONTINUED:
        expected = [tokens for tokens in continued(folders[family]) for _ in range(2)]
        assert one[f"{family}, continued"] == two[f"{family}, continued"] == expected, family
    for family in TRAINED:
        assert one[f"{family}, trained"] == two[f"{family}, trained"]
        assert_equal_and_moved(stored_tensors(alone / family), stored_tensors(apart / family), folders[family])
        reference_logits(apart / family, make_sequences(LENGTHS))


def continued(folder: Path) -> list[list[int]]:
    """What transformers itself continues each prompt with, greedily."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        tokens = model.generate(given, attention_mask=torch.ones_like(given), **settings)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def test_a_model_that_keeps_more_than_keys_and_values_cannot_generate(folders: dict[str, Path]) -> None:
    engine = Engine.from_hf(folders["mamba"], options=EngineOptions(device="cpu"), native=False)
    with pytest.raises(ValueError, match="MambaForCausalLM cannot generate"):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=1))


def assert_equal_and_moved(one: dict[str, Tensor], two: dict[str, Tensor], folder: Path) -> None:
    before = stored_tensors(folder)
    assert one.keys() == two.keys() == before.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    unmoved = [name for name in one if one[name].is_floating_point() and torch.equal(one[name], before[name])]
    assert not unmoved


def test_a_model_is_given_a_cache_by_the_name_that_its_release_has() -> None:
    model = nn.Module()
    for forward, name in (
        (lambda input_ids, cache: input_ids, "cache"),
        (lambda input_ids, past_key_values: input_ids, "past_key_values"),
        (lambda input_ids, cache_params: input_ids, None),
    ):
        model.forward = forward
        assert cache_argument(model) == name
