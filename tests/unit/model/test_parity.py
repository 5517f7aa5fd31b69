"""The decoder computes what Hugging Face's Llama, Qwen2, Qwen3 and Mistral compute, packed instead of padded."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from penstock.model import Sequences, cross_entropy_sum, decoder_units
from penstock.model.hf.families import config_from_json
from penstock.model.layers.dense import Rotary, rotate
from penstock.settings import ModelConfig

LENGTHS = (7, 1, 19, 19, 4)
BASE = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=56, num_layers=3, num_heads=4, num_kv_heads=2, max_length=64
)


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's families, the configuration that makes it ours, and what its configuration needs more."""

    config_type: type[Any]
    model_type: type[Any]
    config: ModelConfig
    more: dict[str, object]


FAMILIES = {
    "llama": Family(LlamaConfig, LlamaForCausalLM, BASE, {}),
    "llama-all-heads-tied": Family(
        LlamaConfig, LlamaForCausalLM, replace(BASE, num_kv_heads=4, tie_embeddings=True, norm_eps=1e-3), {}
    ),
    "qwen2": Family(Qwen2Config, Qwen2ForCausalLM, replace(BASE, qkv_bias=True, rope_theta=1e6), {}),
    "qwen3": Family(Qwen3Config, Qwen3ForCausalLM, replace(BASE, qk_norm=True, head_dim=16), {"head_dim": 16}),
    "mistral": Family(MistralConfig, MistralForCausalLM, replace(BASE, sliding_window=5), {"sliding_window": 5}),
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


def hugging_face_model(family: Family) -> PreTrainedModel:
    """A small model with random weights, biases and norms included."""
    config = family.config
    model = family.model_type(
        family.config_type(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.key_heads,
            max_position_embeddings=config.max_length,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
            **family.more,
        )
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.float().eval()


def penstock_model(family: Family, weights: dict[str, Tensor]) -> nn.ModuleDict:
    """The decoder with the other model's weights, each of which must be used."""
    modules = nn.ModuleDict()
    unused = set(weights)
    for unit in decoder_units(family.config):
        module = modules[unit.name.replace(".", "/")] = unit.build()
        for name, parameter in module.named_parameters():
            source = hugging_face_name(unit.full_name(name))
            parameter.data = weights[source].clone()
            unused.discard(source)
    assert not unused
    return modules


def run(modules: nn.ModuleDict, tokens: Tensor, sequences: Sequences) -> Tensor:
    x = tokens
    for module in modules.values():
        x = module(x, sequences)
    return x


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_packed_logits_and_gradients_are_those_of_each_sequence_alone(family: Family) -> None:
    reference = hugging_face_model(family)
    modules = penstock_model(family, reference.state_dict())
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(family.config.vocabulary, (length,), generator=generator) for length in LENGTHS]
    logits = run(modules, torch.cat(tokens), Sequences.from_lengths(LENGTHS))

    expected = [reference(sequence[None]).logits[0] for sequence in tokens]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-5, atol=1e-5)

    cross_entropy_sum(logits, torch.cat(tokens)).backward()
    nn.functional.cross_entropy(torch.cat(expected), torch.cat(tokens), reduction="sum").backward()
    gradients: dict[str, Any] = {
        hugging_face_name(name.replace("/", ".")): p.grad for name, p in modules.named_parameters()
    }
    if family.config.tie_embeddings:
        # Ours are two parameters whose gradients are one; the engine adds them.
        gradients["model.embed_tokens.weight"] = gradients["model.embed_tokens.weight"] + gradients.pop(
            "lm_head.weight"
        )
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        limit = 1e-4 * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients.pop(name), parameter.grad, rtol=1e-4, atol=limit, msg=name)
    assert not gradients


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
