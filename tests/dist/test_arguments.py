"""Each layer is given what its `forward` asks for by name, wherever its stage is and however it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.data import Extent
from penstock.engine import EngineOptions
from penstock.model import Sequences, cross_entropy_sum
from tests.dist.launch import run_ranks
from tests.hugging_face import CLOSE, make_model, make_sequences

WIDTH, VOCAB = 8, 32
SPLIT = MicroBatchSpec(num=3)
LENGTHS = (5, 3, 7, 4)


class Embed(nn.Module):
    """Asks for a key with a row per token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2, WIDTH)

    def forward(self, tokens: Tensor, token_types: Tensor) -> Tensor:
        return self.tokens(tokens) + self.types(token_types)


class Named(nn.Module):
    """Asks for the sequences by annotation, and for a key with a row per item."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, where: Sequences, *, topic: Tensor, absent: float = 0.5) -> Tensor:
        lengths = torch.tensor(where.lengths)
        return self.linear(x) * absent + topic.repeat_interleave(lengths)[:, None]


def batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]
    found = PackedBatch.from_documents(documents)
    found = found.with_key("token_types", torch.randint(0, 2, (sum(LENGTHS),), generator=generator))
    found = found.with_key("mask", torch.rand(sum(LENGTHS), generator=generator))
    found = found.with_key("factor", torch.zeros(len(LENGTHS)), Extent.ITEM)
    return found.with_key("topic", torch.rand(len(LENGTHS), generator=generator), Extent.ITEM)


def refuse(rank: int, layout: Layout, make: Callable[[], list[nn.Module]], key: str | None) -> list[str]:
    """The errors of training and scoring."""
    engine = Engine.from_layers(make(), WIDTH, layout, EngineOptions(device="cpu", timeout_s=20.0))
    given = batch() if key is None else batch().select([k for k in batch().keys if k != key])
    found = []
    for act in (engine.train_batch, engine.forward):
        try:
            act(given, micro_batches=SPLIT)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
        if key is None:
            break
    return found


def plain() -> list[nn.Module]:
    return [Embed(), Named(), nn.Linear(WIDTH, VOCAB)]


@pytest.mark.shows(103)
@pytest.mark.parametrize("key, unit", [("token_types", "layers.0"), ("topic", "layers.1")])
def test_a_key_that_a_layer_needs_and_the_batch_lacks_is_named_on_its_rank_before_anything_is_computed(
    key: str, unit: str
) -> None:
    said = f"{unit} takes '{key}', which has no default and is no key of the batch; its keys are "
    alone = refuse(0, Layout(), plain, key)
    assert len(alone) == 2 and all(said in text for text in alone)
    apart = run_ranks(2, refuse, Layout(pp=2), plain, key)
    assert all(len(texts) == 2 for texts in apart)
    assert any(said in texts[0] for texts in apart)


# ---- positions

OWN_POSITIONS = [3, 4, 5, 9, 10, 0, 2, 4, 20, 21, 22, 23, 24, 40, 41, 7, 7, 8, 8]


def score(rank: int, layout: Layout, folder: Path, native: bool, own: bool) -> Tensor | None:
    documents = PackedBatch.from_documents(make_sequences(LENGTHS))
    if own:
        documents = documents.with_key("positions", torch.tensor(OWN_POSITIONS))
    engine = Engine.from_hf(folder, layout, EngineOptions(device="cpu"), native=native)
    loss = engine.evaluate([documents], micro_batches=MicroBatchSpec(num=2))
    logits = engine.forward(documents, micro_batches=MicroBatchSpec(num=2), broadcast=True)
    engine.train_batch(documents, micro_batches=MicroBatchSpec(num=2))
    engine.close()
    engine.grid.close()
    return torch.cat([logits.flatten(), torch.tensor([loss])])


def scored_by_transformers(folder: Path) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = make_sequences(LENGTHS)
    positions = torch.tensor(OWN_POSITIONS).split(list(LENGTHS))
    with torch.no_grad():
        logits = torch.cat(
            [
                model(tokens[None], position_ids=p[None], attention_mask=torch.ones_like(p)[None]).logits[0]
                for tokens, p in zip(sequences, positions, strict=True)
            ]
        )
    labels = PackedBatch.from_documents(sequences)["labels"]
    loss = cross_entropy_sum(logits, labels) / (sum(LENGTHS) - len(LENGTHS))
    return torch.cat([logits.flatten(), loss[None]])


@pytest.mark.shows(104)
@pytest.mark.parametrize(
    "family, native, layouts",
    [
        ("llama", True, [Layout(), Layout(pp=2), Layout(cp=2), Layout(tp=2), Layout(cp=2, tp=2)]),
        ("llama", False, [Layout(), Layout(pp=2)]),
        ("gpt2", False, [Layout(pp=3)]),
    ],
    ids=["llama", "llama of transformers", "gpt2 of transformers"],
)
def test_positions_of_the_batch_are_position_ids(
    family: str, native: bool, layouts: list[Layout], tmp_path: Path
) -> None:
    make_model(family).save_pretrained(tmp_path)
    expected = scored_by_transformers(tmp_path)
    assert not torch.allclose(score(0, Layout(), tmp_path, native, False), expected, atol=10 * CLOSE)  # type: ignore[arg-type]
    for layout in layouts:
        args = (layout, tmp_path, native, True)
        found = [score(0, *args)] if layout.world_size == 1 else run_ranks(layout.world_size, score, *args)
        for one in found:
            torch.testing.assert_close(one, expected, rtol=0, atol=CLOSE, msg=str(layout))


def test_positions_are_refused_by_a_model_that_takes_none(tmp_path: Path) -> None:
    make_model("bloom", n_head=4, n_layer=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BloomForCausalLM takes no position_ids"):
        score(0, Layout(), tmp_path, False, True)
