"""The decoder of the Llama, Qwen, Mistral and Mixtral family, dense or with experts, as a list of units.

What the units compute stands in `halves`, `experts`, `prediction` and, where ranks share them, `tensor_parallel`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from penstock.model import flops as estimates
from penstock.model.config import ModelConfig
from penstock.model.groups import ModelGroups
from penstock.model.initialise import Constant, Initial, Initialise, Normal
from penstock.model.layers.attention import AttentionHalf, ContextAttentionHalf, Embedding, Head, MLPHalf
from penstock.model.layers.moe import ExpertHalf, expert_shards
from penstock.model.layers.multi_token import PredictingHead
from penstock.model.layers.shared_units import share_units
from penstock.model.matmul import Products, fastest_products
from penstock.model.units import Limits, Shard, UnitSpec

_EMBEDDING_STD = 0.5
"""Of an untied embedding: of 0.02, 0.1, 0.5 and 1, a small model learned fastest from this one."""


def decoder_units(
    config: ModelConfig, products: Products | None = None, groups: ModelGroups | None = None
) -> tuple[UnitSpec, ...]:
    """The decoder's units in order: embedding, then attention and mlp of each layer, then head.

    `products` computes the linear layers' matrix products; left out, the fastest this machine has. `groups` are the
    ranks that share the units; left out, nobody does.
    """
    groups = groups or ModelGroups()
    if groups.ep_size > 1 and config.experts is None:
        raise ValueError(f"ep = {groups.ep_size}: the model has no experts to share; ep = 1 is possible")
    chosen = fastest_products() if products is None else products
    dense = partial(MLPHalf, config, chosen), estimates.of_mlp(config)
    sparse = partial(ExpertHalf, config, chosen, groups), estimates.of_experts(config) if config.experts else 0.0
    shards = expert_shards(config, groups) if config.experts else {}
    embedding = _spec("embedding", config, partial(Embedding, config), estimates.of_embedding(config))
    specs = [replace(embedding, limits=Limits(config.vocab_size, config.max_length))]
    for i in range(config.num_layers):
        layer = config.of_layer(i)
        half = partial(AttentionHalf, layer, chosen)
        if groups.cp is not None and groups.tp is None:
            half = partial(ContextAttentionHalf, layer, chosen, groups)
        specs.append(_spec(f"layers.{i}.attention", config, half, estimates.of_attention(layer)))
        if config.is_sparse(i):
            specs.append(_spec(f"layers.{i}.mlp", config, *sparse, sharding=shards))
        else:
            specs.append(_spec(f"layers.{i}.mlp", config, *dense))
    specs.append(_predicting_head(config, chosen, groups) if config.num_predictions else _head(config, chosen))
    if groups.tp is None:
        return tuple(specs)
    return share_units(specs, config, groups, chosen)


def _head(config: ModelConfig, products: Products) -> UnitSpec:
    tied = {"projection.weight": "embedding.weight"} if config.tie_embeddings else {}
    return _spec("head", config, partial(Head, config, products), estimates.of_head(config), tied)


def _predicting_head(config: ModelConfig, products: Products, groups: ModelGroups) -> UnitSpec:
    tied = {"embedding.weight": "embedding.weight"}
    if config.tie_embeddings:
        tied["projection.weight"] = "embedding.weight"
    flops = estimates.of_head(config) + estimates.of_predictions(config)
    shards = expert_shards(config, groups) if config.is_sparse(config.num_layers - 1) else {}
    shards = {
        f"predictions.{i}.mlp.{name}": shard for i in range(config.num_predictions) for name, shard in shards.items()
    }
    spec = _spec("head", config, partial(PredictingHead, config, products, groups), flops, tied, shards)
    return replace(spec, notes_terms=True, num_ahead=config.num_predictions)


def _spec(
    name: str,
    config: ModelConfig,
    build: Callable[[], nn.Module],
    flops: float,
    tied: Mapping[str, str] | None = None,
    sharding: Mapping[str, Shard] | None = None,
) -> UnitSpec:
    with torch.device("meta"):
        shapes = {parameter: value.shape for parameter, value in build().named_parameters()}
    tied, sharding = tied or {}, sharding or {}
    full_names = {parameter: tied.get(parameter, f"{name}.{parameter}") for parameter in shapes}
    rules = {parameter: _rule(full_name, shapes[parameter], config) for parameter, full_name in full_names.items()}
    return UnitSpec(
        name,
        build,
        Initialise(rules, full_names, sharding),
        sum(math.prod(shape) for shape in shapes.values()),
        flops,
        tied,
        sharding,
        notes_terms=any("router" in parameter for parameter in shapes),
    )


def _rule(full_name: str, shape: torch.Size, config: ModelConfig) -> Initial:
    """Initial values by the kind of parameter.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for what is added to the residual stream.
    """
    *_, owner, kind = full_name.split(".")
    if kind == "bias":
        return Constant(0.0)
    if kind == "load":
        return Constant(1.0)
    if owner.endswith("norm"):
        return Constant(1.0)
    if owner == "embedding" and not config.tie_embeddings:
        return Normal(_EMBEDDING_STD)
    std = shape[-1] ** -0.5
    return Normal(std * (2 * config.num_layers) ** -0.5 if owner in ("output", "down") else std)
