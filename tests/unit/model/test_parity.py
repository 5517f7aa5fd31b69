"""The decoder computes what transformers' families compute, packed instead of padded, with experts and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock import Engine, EngineOptions, MicroBatchSpec, OptimizerConfig, PackedBatch
from penstock.model import Sequences
from penstock.model.hf.families import config_from_json
from penstock.model.layers.dense import Rotary, rotate
from penstock.model.layers.experts import ExpertBlock
from penstock.model.linear import TORCH
from penstock.settings import ExpertConfig, GroupScore, ModelConfig, Scores
from tests.hugging_face import make_model, make_sequences, randomise

LENGTHS = (7, 1, 19, 19, 4)
FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "all heads, tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", {**FEW, "head_dim": 16, "norm_topk_prob": True}),
    "every second layer": (
        "qwen3_moe", {**FEW, "norm_topk_prob": False, "num_experts_per_tok": 3, "decoder_sparse_step": 2}
    ),
    "a gated shared expert": ("qwen2_moe", {**FEW, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_and_gradients_are_those_of_each_sequence_alone(kind: str, tmp_path: Path) -> None:
    model_type, settings = KINDS[kind]
    reference = make_model(model_type, **settings)
    reference.save_pretrained(tmp_path / "weights")
    tokens = make_sequences(LENGTHS)
    batch = PackedBatch.from_sequences({"tokens": tokens, "labels": tokens})
    options = EngineOptions(device="cpu", optimizer=OptimizerConfig(clip_norm=0.0))
    engine = Engine.from_hf(tmp_path / "weights", options=options, native=True)
    expected = torch.cat([reference(sequence[None]).logits[0] for sequence in tokens])
    torch.testing.assert_close(engine.forward(batch), expected, rtol=1e-5, atol=1e-5)

    nn.functional.cross_entropy(expected, torch.cat(tokens)).backward()
    engine.train_batch(batch, micro_batches=MicroBatchSpec(num=1))
    # Gradients in the place of the weights, so that they are read by the names of ours.
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    reference.save_pretrained(tmp_path / "gradients")
    gradients = Engine.from_hf(tmp_path / "gradients", options=options, native=True).parameters()
    for name, wanted in gradients.items():
        limit = 1e-4 * wanted.abs().max().item()
        torch.testing.assert_close(engine.gradient(name), wanted.detach(), rtol=1e-4, atol=limit, msg=name)


def test_groups_sigmoids_bias_and_scale_are_those_of_deepseek() -> None:
    theirs = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    experts = ExpertConfig(
        16, 3, 24, Scores.SIGMOID, True, 2.5, 4, 2, GroupScore.BEST_TWO, bias_step=1e-3, shared_size=48
    )
    block = DeepseekV3MoE(theirs)
    randomise(block)
    bias = 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(3))
    block.gate.e_score_correction_bias.copy_(bias)
    ours = ExpertBlock(ModelConfig(97, 32, 40, num_layers=3, num_heads=4, experts=experts), TORCH)
    weights = {
        "norm.weight": torch.ones(32),
        "router.logits.weight": block.gate.weight,
        "router.balance.bias": bias,
        "experts.gate_up.weight": block.experts.gate_up_proj,
        "experts.down.weight": block.experts.down_proj,
        "shared.gate.weight": block.shared_experts.gate_proj.weight,
        "shared.up.weight": block.shared_experts.up_proj.weight,
        "shared.down.weight": block.shared_experts.down_proj.weight,
    }
    ours.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = x + block(ours.norm(x)[None])[0]
        found = ours(x, Sequences.from_lengths([50]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def yarn(truncate: bool) -> dict[str, Any]:
    """A ramp that begins and ends between two pairs, as at the sizes of published models."""
    ends = {"original_max_position_embeddings": 4096, "truncate": truncate}
    return {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, **ends}


def test_yarn_rounds_the_ends_of_its_ramp_or_not_as_transformers_does() -> None:
    positions = torch.tensor([0, 1, 100, 4095, 20_000, 65_535])
    q = torch.randn(1, 2, len(positions), 64, generator=torch.Generator().manual_seed(0))
    found, expected = [], []
    for truncate in (True, False):
        reference = LlamaConfig(
            vocab_size=97,
            hidden_size=128,
            num_attention_heads=2,
            max_position_embeddings=65_536,
            rope_parameters=yarn(truncate),
        )
        tables = LlamaRotaryEmbedding(reference)(q, positions[None])
        expected.append(apply_rotary_pos_emb(q, q, *tables)[0][0].transpose(0, 1))
        config = config_from_json(reference.to_dict())
        assert (config.head_size, config.rope_scaling.truncate) == (64, truncate)
        ours = Rotary(config.head_size, config.rope_theta, config.rope_scaling)
        sequences = Sequences.from_lengths((len(positions),), positions=positions)
        found.append(rotate(q[0].transpose(0, 1).contiguous(), ours.tables(sequences)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert (expected[0] - expected[1]).abs().max() > 1
