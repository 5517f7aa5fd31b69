"""First values of adapters, their dropout, and the settings that peft reads of them, in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import Engine, EngineOptions, LearningRate, OptimizerConfig, PackedBatch, SamplingParams
from penstock.engine.adapter import Adapter
from penstock.settings import AdapterConfig, WeightDecay
from tests.hugging_face import make_model, make_sequences, stored_tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_model("llama").save_pretrained(folder)
    return folder


def engine_of(base: Path, seed: int = 0, **settings: Any) -> Engine:
    adapter = AdapterConfig(**{"rank": 4, "target_modules": ("q_proj", "v_proj")} | settings)
    return Engine.from_hf(base, options=EngineOptions(device="cpu", seed=seed, adapter=adapter))


def saved(engine: Engine, folder: Path) -> dict[str, Tensor]:
    engine.save_adapter(folder)
    engine.close()
    return stored_tensors(folder)


@pytest.mark.shows(108)
def test_each_layer_and_each_seed_begins_with_other_values(base: Path, tmp_path: Path) -> None:
    one, again, other = (saved(engine_of(base, seed), tmp_path / str(i)) for i, seed in enumerate((0, 0, 1)))
    first = {name: tensor for name, tensor in one.items() if ".lora_A." in name}
    assert len(first) > 2 and all(torch.equal(tensor, again[name]) for name, tensor in one.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in first.items())
    names = [name for name in first if "q_proj" in name]
    assert len(names) > 1 and not torch.equal(first[names[0]], first[names[1]])


@pytest.mark.shows(108)
def test_peft_is_given_the_settings_of_the_run(base: Path, tmp_path: Path) -> None:
    saved(engine_of(base, alpha=24.0, rank_stabilised=True, dropout=0.25), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    wanted = {"r": 4, "lora_alpha": 24, "use_rslora": True, "lora_dropout": 0.25, "inference_mode": True}
    assert {name: found[name] for name in wanted} == wanted
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "readers of one read all"


@pytest.mark.shows(108)
@pytest.mark.parametrize("native", [True, False])
def test_base_weights_keep_their_bits_whatever_is_done_with_the_adapters(
    base: Path, tmp_path: Path, native: bool
) -> None:
    options = EngineOptions(
        device="cpu",
        optimizer=OptimizerConfig(LearningRate(0.1), weight_decay=WeightDecay(0.5)),
        adapter=AdapterConfig(rank=4, target_modules=("q_proj", "v_proj")),
    )
    engine, batch = Engine.from_hf(base, options=options, native=native), PackedBatch.from_documents([[1, 2, 3, 4]])
    stored = stored_tensors(base)
    for call in (
        lambda: engine.train_batch(batch),
        lambda: engine.evaluate([batch]),
        lambda: engine.generate([[1, 2]], SamplingParams(max_new_tokens=2)),
        lambda: engine.save_hf(tmp_path / "merged", merge_adapters=True),
        lambda: engine.train_batch(batch),
        lambda: engine.save_hf(tmp_path / "apart"),
    ):
        call()
        own = {name: p for name, p in engine.parameters().items() if ".lora_" not in name}
        tuned = sum(".base_layer." in name for name in own)
        assert tuned == 2 * 3 and not any(p.requires_grad for p in own.values())
        bits = [p.detach().reshape(-1).view(torch.int32) for p in own.values()]
        # By their values, since each library has names of its own.
        known = {tuple(tensor.reshape(-1).view(torch.int32).tolist()) for tensor in stored.values()}
        assert len(own) >= len(stored) and all(tuple(values.tolist()) in known for values in bits)
    apart, merged = (stored_tensors(tmp_path / name) for name in ("apart", "merged"))
    assert apart.keys() == merged.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in apart.items())
    assert [(tmp_path / name / "adapter").exists() for name in ("apart", "merged")] == [True, False]
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, stored[name])}
    assert len(moved) == 2 * 3 and all("q_proj" in name or "v_proj" in name for name in moved)
    engine.close()


@pytest.mark.shows(108)
def test_dropout_before_adapters_depends_on_the_seed_of_the_run_alone(base: Path) -> None:
    batch, losses = PackedBatch.from_documents(make_sequences((7, 5))), []
    for seed, dropout in ((1, 0.5), (2, 0.5), (1, 0.0)):
        engine = engine_of(base, dropout=dropout)
        torch.manual_seed(seed)
        losses.append([engine.train_batch(batch).loss for _ in range(3)])
        engine.close()
    assert losses[0] == losses[1] != losses[2]


HONOURED: dict[str, Any] = {
    "r": 2,
    "lora_alpha": 24,
    "use_rslora": True,
    "init_lora_weights": False,
    "target_modules": ["o_proj"],
    "exclude_modules": ["layers.0.self_attn.q_proj"],
    "layers_to_transform": [1],
}
"""Fields that change what a model computes, each with another value than below; there is no pattern without layers."""
SHOWN_ELSEWHERE = {"lora_dropout", "layers_pattern"}
#: what the adapter is for and where it comes from, the layout of another library, and settings of refused forms
ABOUT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("runtime_config", "megatron_core", "qalora_group_size", "fan_in_fan_out"),
}


@pytest.mark.shows(202)
@pytest.mark.parametrize("name", HONOURED)
def test_a_field_that_is_honoured_changes_what_it_changes_in_peft(name: str, base: Path, tmp_path: Path) -> None:
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | {name: HONOURED[name]})
    sequences = make_sequences((7, 5))
    engine = Engine.from_hf(base, options=EngineOptions(device="cpu"), adapter=config)
    engine.save_adapter(tmp_path / "first")
    engine.train_batch(PackedBatch.from_documents(sequences))
    found = engine.forward(PackedBatch.from_documents(sequences))
    tensors = saved(engine, tmp_path / "adapter")
    torch.manual_seed(0)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    places = {key.replace(".default", ""): p for key, p in theirs.named_parameters() if ".lora_" in key}
    assert tensors.keys() == places.keys()
    first = stored_tensors(tmp_path / "first")
    for key, place in places.items():
        assert bool(place.any()) is bool(first[key].any()), "both begin with zeros, or neither does"
        place.data.copy_(tensors[key])
    with torch.no_grad():
        expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.shows(202)
def test_each_other_field_of_pefts_config_is_refused_by_name() -> None:
    """It is given another value, whatever it is."""
    fields = vars(LoraConfig()).keys() - HONOURED.keys() - SHOWN_ELSEWHERE - ABOUT
    assert fields >= {"alora_invocation_tokens", "use_qalora", "ensure_weight_tying", "use_dora", "inference_mode"}
    for name in sorted(fields):
        config = LoraConfig(r=4, target_modules=["q_proj"])
        usual = getattr(config, name)
        setattr(config, name, not usual if isinstance(usual, bool) else {"q_proj": 2} if usual == {} else [1])
        with pytest.raises(ValueError, match=f"an adapter with {name} = .* cannot be trained here"):
            Adapter.of(config, None)
    assert Adapter.of(LoraConfig(r=4, target_modules=["q_proj"]), None).config.r == 4
