"""The decoder's shape and the sections of a run's settings that say it, each made of the other."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from penstock.engine.config import ExpertsSection, ModelSection, RopeSection, RunConfig
from penstock.model import ExpertConfig, GroupScore, ModelConfig, Scores
from penstock.model.rope_scaling import RopeKind, RopeScaling


def model_config(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The decoder's shape; `vocab_size` counts where the settings leave it to the tokenizer."""
    model = config.model
    return ModelConfig(
        vocab_size=model.vocab_size or vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or 0,
        head_dim=model.head_dim or 0,
        max_length=model.max_length,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        tie_embeddings=model.tie_embeddings,
        sliding_window=model.sliding_window,
        num_full_layers=model.num_full_layers,
        rope_scaling=rope_scaling(config.rope),
        experts=expert_config(config.experts),
        num_predictions=model.num_predictions,
        prediction_loss=model.prediction_loss,
    )


def expert_config(section: ExpertsSection) -> ExpertConfig | None:
    """The experts of a layer; None for a dense model."""
    if not section.num_experts:
        return None
    values = vars(section) | {"scores": Scores(section.scores), "group_score": GroupScore(section.group_score)}
    return ExpertConfig(**values)


def rope_scaling(section: RopeSection) -> RopeScaling | None:
    """How rotary frequencies are stretched; None where they are not."""
    if section.scaling == "none":
        return None
    kind = RopeKind(section.scaling)
    return RopeScaling(
        kind,
        factor=section.factor,
        original_length=section.original_length or 0,
        low=section.low,
        high=section.high or (32.0 if kind is RopeKind.YARN else 4.0),
        attention_factor=section.attention_factor,
        truncate=section.truncate,
    )


def settings_of(shape: ModelConfig) -> dict[str, Any]:
    """The settings that say a shape, under dotted names: what `model_config` reads, the other way round."""
    found = _named("model", ModelSection, asdict(shape))
    if shape.rope_scaling is not None:
        rope = asdict(shape.rope_scaling)
        found |= _named("rope", RopeSection, rope) | {"rope.scaling": shape.rope_scaling.kind.value}
        found["rope.original_length"] = shape.rope_scaling.original_length or None
    if shape.experts is not None:
        found |= _named("experts", ExpertsSection, asdict(shape.experts))
    return found


def _named(section: str, kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name for field in fields(kind)} & values.keys()
    return {f"{section}.{name}": value.value if isinstance(value := values[name], Enum) else value for name in known}
