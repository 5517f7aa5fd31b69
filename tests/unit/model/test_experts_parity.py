"""Layers with experts compute what Hugging Face's Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3 compute."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from penstock.model import Sequences, cross_entropy_sum, decoder_units, drain
from penstock.model.layers.experts import ExpertBlock
from penstock.model.linear import TORCH
from penstock.runtime import Boundary, Message, Stage, Tape
from penstock.settings import ExpertConfig, GroupScore, ModelConfig, Scores

LENGTHS = (7, 1, 19, 19, 4)
MIXTRAL = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    max_length=64,
    experts=ExpertConfig(num_experts=6, num_active=2, intermediate_size=24),
)
QWEN3 = replace(MIXTRAL, qk_norm=True, head_dim=16)
EVERY_SECOND = ExpertConfig(6, 3, 24, normalise=False, every=2)
GATED = ExpertConfig(6, 2, 24, normalise=False, shared_size=20, shared_gate=True, dense_layers=(1,))


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's families, the configuration that makes it ours, and what its configuration needs more."""

    config_type: type[Any]
    model_type: type[Any]
    config: ModelConfig
    more: Mapping[str, object]


def qwen(**more: object) -> dict[str, object]:
    return {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **more}


FAMILIES = {
    "mixtral": Family(
        MixtralConfig,
        MixtralForCausalLM,
        MIXTRAL,
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "qwen3": Family(Qwen3MoeConfig, Qwen3MoeForCausalLM, QWEN3, qwen(head_dim=16, norm_topk_prob=True)),
    "qwen3-every-second-layer": Family(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        replace(QWEN3, experts=EVERY_SECOND),
        qwen(head_dim=16, norm_topk_prob=False, num_experts_per_tok=3, decoder_sparse_step=2),
    ),
    "qwen2-with-a-gated-shared-expert": Family(
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        replace(MIXTRAL, qkv_bias=True, experts=GATED),
        qwen(shared_expert_intermediate_size=20, norm_topk_prob=False, mlp_only_layers=[1]),
    ),
}

NAMES = {
    "embedding.": "model.embed_tokens.",
    "attention.norm": "input_layernorm",
    "attention.output": "self_attn.o_proj",
    "attention.q.": "self_attn.q_proj.",
    "attention.k.": "self_attn.k_proj.",
    "attention.v.": "self_attn.v_proj.",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.norm": "post_attention_layernorm",
    "mlp.router.logits": "mlp.gate",
    "mlp.experts.gate_up.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.down.weight": "mlp.experts.down_proj",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared.scale": "mlp.shared_expert_gate",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "head.norm": "model.norm",
    "head.projection": "lm_head",
}


def hugging_face_name(name: str) -> str:
    (ours,) = (part for part in NAMES if part in name)
    name = name.replace(ours, NAMES[ours])
    return f"model.{name}" if name.startswith("layers.") else name


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Random weights, biases and norms included."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0))


def hugging_face_model(family: Family) -> PreTrainedModel:
    config = family.config
    settings: dict[str, object] = {
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.key_heads,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attn_implementation": "eager",
    }
    model = family.model_type(family.config_type(**{**settings, **family.more}))
    randomise(model)
    return model.float().eval()


def penstock_stage(config: ModelConfig, weights: Mapping[str, Tensor]) -> Stage:
    """The whole decoder as one stage with the other model's weights, each of which must be used."""
    units, unused = [], set(weights)
    for unit in decoder_units(config):
        module = unit.build()
        for name, parameter in module.named_parameters():
            source = hugging_face_name(unit.full_name(name))
            parameter.data = weights[source].clone()
            unused.discard(source)
        units.append((unit.name, module))
    assert not unused
    return Stage(0, units, Boundary(config.hidden_size, torch.float32))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_packed_logits_and_gradients_are_those_of_each_sequence_alone(family: Family) -> None:
    reference = hugging_face_model(family)
    stage = penstock_stage(family.config, reference.state_dict())
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(family.config.vocabulary, (length,), generator=generator) for length in LENGTHS]
    tape, logits = Tape(), []

    def loss(output: Tensor) -> Tensor:
        logits.append(output.detach())
        return cross_entropy_sum(output, torch.cat(tokens))

    drain(stage.forward(tape, Message((torch.cat(tokens),)), Sequences.from_lengths(LENGTHS), loss))
    expected = [reference(sequence[None]).logits[0] for sequence in tokens]
    torch.testing.assert_close(logits[0], torch.cat(expected), rtol=1e-5, atol=1e-5)

    drain(stage.backward(tape, None))
    stage.weight_backward(tape)
    nn.functional.cross_entropy(torch.cat(expected), torch.cat(tokens), reduction="sum").backward()
    gradients: dict[str, Any] = {hugging_face_name(name): p.grad for name, p in stage.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        limit = 1e-4 * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-4, atol=limit, msg=name)
    assert not gradients


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
    ours = ExpertBlock(replace(MIXTRAL, experts=experts), TORCH)
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
