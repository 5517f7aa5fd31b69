"""Hugging Face's folders, read and written by engines over several ranks: the same logits, the same bits."""

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

LENGTHS = (7, 1, 19, 40, 19, 4)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3's rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2, later layers in a window": ("qwen2", WINDOW),
    "qwen3, wide heads": ("qwen3", {"head_dim": 16}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": 5}),
    "qwen2-moe": ("qwen2_moe", EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [1], "norm_topk_prob": True}),
}

SHARED = ("llama", "llama, one key head", "qwen2", "mixtral")
"""Read and written by ranks that share every layer."""


def make_folders(folders: dict[str, Path]) -> dict[str, Tensor]:
    """The families' folders, every other one sharded, and the logits that transformers gives for each."""
    logits = {}
    for i, (name, folder) in enumerate(folders.items()):
        model_type, settings = FAMILIES[name]
        make_model(model_type, **settings).save_pretrained(folder, max_shard_size="20KB" if i % 2 else "1GB")
        logits[name] = reference_logits(folder, make_sequences(LENGTHS))
    return logits


def scored(engine: Engine) -> Tensor | None:
    """The logits of all sequences, on the rank of the last stage."""
    batch = PackedBatch.from_sequences({"tokens": make_sequences(LENGTHS)})
    return engine.forward(batch, micro_batches=MicroBatchSpec(num=2, max_tokens=64))


def import_and_export(rank: int, layout: Layout, folders: dict[str, Path], out: Path) -> dict[str, Any]:
    """The logits of each folder's model, once it is read and once it is written again and read."""
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        engine = Engine.from_hf(folder, layout, EngineOptions(device="cpu"))
        found[name] = scored(engine)
        engine.save_hf(out / name, max_shard_bytes=20_000)
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(98)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(tp=2)], ids=str)
def test_imported_models_score_as_in_transformers_and_are_written_back_bit_for_bit(
    layout: Layout, tmp_path: Path
) -> None:
    folders = {name: tmp_path / name.replace(",", "") for name in FAMILIES if layout.tp == 1 or name in SHARED}
    expected = make_folders(folders)
    out = tmp_path / "out"
    out.mkdir()
    found = run_ranks(layout.world_size, import_and_export, layout, folders, out)[-1]
    for name, folder in folders.items():
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=CLOSE, msg=name)
        ours, theirs = stored_tensors(out / name), stored_tensors(folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[tensor], theirs[tensor]) for tensor in theirs), name
        # Equal weights at other addresses: kernels sum in another order.
        again = reference_logits(out / name, make_sequences(LENGTHS))
        torch.testing.assert_close(again, expected[name], rtol=0, atol=CLOSE, msg=name)


def refuse_together(rank: int, folders: list[Path]) -> str:
    """What this rank is told when its folder, or another's, cannot be read."""
    with pytest.raises(ValueError) as caught:
        Engine.from_hf(folders[rank], Layout(pp=2), EngineOptions(device="cpu"))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.shows(97)
def test_all_ranks_refuse_what_one_cannot_read(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "whole")
    make_model("llama").save_pretrained(tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for other, kind, named in (("no", "MissingFile", tmp_path / "no"), ("cut", "ValueError", path)):
        for rank, told in enumerate(run_ranks(2, refuse_together, [tmp_path / "whole", tmp_path / other])):
            assert told.startswith(f"{kind}: {'rank 1: ' if rank == 0 else ''}")
            assert str(named) in told
            assert "\n" not in told
