"""The decoder of the Llama, Qwen, Mistral and Mixtral family, dense or with experts, as a list of units.

Shapes: T tokens of the microbatch, D hidden size, H heads, K width of a head, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model import work
from penstock.model.attention import packed_attention
from penstock.model.cached import CachedRows, CacheSize, KVCache, cached_attention
from penstock.model.collectives import Collectives
from penstock.model.config import ModelConfig
from penstock.model.context_attention import HeadShape, check_heads, context_attention
from penstock.model.experts import ExpertHalf, expert_shards
from penstock.model.gated import gated
from penstock.model.groups import ModelGroups
from penstock.model.initialise import Constant, Initial, Initialise, Normal
from penstock.model.linear import Linear
from penstock.model.norm import RMSNorm
from penstock.model.products import Products, fastest_products
from penstock.model.rotary import Rotary, rotate
from penstock.model.segments import Compute, Segment, SegmentedUnit
from penstock.model.sequences import Sequences
from penstock.model.units import Limits, Shard, UnitSpec

_EMBEDDING_STD = 0.5
"""Of an untied embedding: of 0.02, 0.1, 0.5 and 1, a small model learned fastest from this one."""


class Embedding(nn.Module):
    """Token ids [T] -> residual stream [T, D]."""

    has_randomness = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, tokens_T: Tensor, sequences: Sequences) -> Tensor:
        return F.embedding(tokens_T, self.weight)

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, tokens_T: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return F.embedding(tokens_T, self.weight)


class AttentionHalf(nn.Module):
    """x + output(attention(norm(x))), with grouped queries, rotary positions and an optional window."""

    has_randomness = False

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_dim, config.sliding_window
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.q = Linear(config.hidden_size, config.query_size, config.qkv_bias, products)
        self.k = Linear(config.hidden_size, config.kv_size, config.qkv_bias, products)
        self.v = Linear(config.hidden_size, config.kv_size, config.qkv_bias, products)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.output = Linear(config.query_size, config.hidden_size, products=products)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        mean_THK = packed_attention(*self.project(x_TD, sequences), sequences, self.window)
        return self.add_output(x_TD, mean_THK)

    def new_cache(self, size: CacheSize) -> KVCache:
        return KVCache(size, self.k.out_features // self.head_dim, self.head_dim)

    def decode(self, x_TD: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        return self.add_output(x_TD, self.attend_cached(x_TD, cache, rows))

    def attend_cached(self, x_TD: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        """The heads' means [T, H, K] over the cache, in which the tokens' own keys and values are from now on."""
        q_THK, k_THK, v_THK = self.project(x_TD, rows)
        cache.write(k_THK, v_THK, rows)
        return cached_attention(q_THK, cache, rows, self.window)

    def project(self, x_TD: Tensor, sequences: Sequences | CachedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, K] of the residual stream, turned by their positions."""
        return self.heads(self.norm(x_TD), sequences)

    def heads(self, h_TD: Tensor, sequences: Sequences | CachedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, K] of the normalised stream, turned by their positions."""
        q_THK, k_THK, v_THK = (part(h_TD).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_THK = self.q_norm(q_THK), self.k_norm(k_THK)
        tables = self.rotary.tables(sequences)
        return rotate(q_THK, tables), rotate(k_THK, tables), v_THK

    def add_output(self, x_TD: Tensor, mean_THK: Tensor) -> Tensor:
        """The residual stream with the output of the heads' means added."""
        return x_TD + self.output(mean_THK.flatten(1))


class ContextAttentionHalf(SegmentedUnit, AttentionHalf):
    """The same with every sequence's tokens shared by several ranks; whole sequences it attends to by itself."""

    def __init__(self, config: ModelConfig, products: Products, groups: ModelGroups) -> None:
        super().__init__(config, products)
        self.form, self.collectives = groups.context_form, Collectives(groups.cp)
        self.shape = HeadShape(config.num_heads, config.num_kv_heads, config.sliding_window)
        check_heads(self.form, groups.cp_size, self.shape)

    def segments(self, sequences: Sequences) -> list[Segment]:
        if sequences.spread is None:
            return [Compute("attention half", lambda x_TD: (AttentionHalf.forward(self, x_TD, sequences),))]
        return [
            Compute("project", lambda x_TD: (*self.project(x_TD, sequences), x_TD)),
            *context_attention(self.form, self.collectives, sequences, self.shape),
            Compute("add output", lambda mean_THK, x_TD: (self.add_output(x_TD, mean_THK),)),
        ]


class MLPHalf(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    has_randomness = False

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = Linear(config.hidden_size, config.intermediate_size, products=products)
        self.up = Linear(config.hidden_size, config.intermediate_size, products=products)
        self.down = Linear(config.intermediate_size, config.hidden_size, products=products)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))

    def inner(self, h_TD: Tensor) -> Tensor:
        """What is added to the residual stream, from the normalised one."""
        return self.down(gated(self.gate(h_TD), self.up(h_TD)))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))


class Head(nn.Module):
    """Residual stream [T, D] -> logits [T, V]: the final norm and the projection on the vocabulary."""

    has_randomness = False

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(config.hidden_size, config.vocab_size, products=products)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.projection(self.norm(x_TD))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return self.projection(self.norm(x_TD[rows.sampled_S]))


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
    dense = partial(MLPHalf, config, chosen), work.of_mlp(config)
    sparse = partial(ExpertHalf, config, chosen, groups), work.of_experts(config) if config.experts else 0.0
    shards = expert_shards(config, groups) if config.experts else {}
    embedding = _spec("embedding", config, partial(Embedding, config), work.of_embedding(config))
    specs = [replace(embedding, limits=Limits(config.vocab_size, config.max_length))]
    for i in range(config.num_layers):
        layer = config.of_layer(i)
        half = partial(AttentionHalf, layer, chosen)
        if groups.cp is not None and groups.tp is None:
            half = partial(ContextAttentionHalf, layer, chosen, groups)
        specs.append(_spec(f"layers.{i}.attention", config, half, work.of_attention(layer)))
        if config.is_sparse(i):
            specs.append(_spec(f"layers.{i}.mlp", config, *sparse, sharding=shards))
        else:
            specs.append(_spec(f"layers.{i}.mlp", config, *dense))
    specs.append(_predicting_head(config, chosen, groups) if config.num_predictions else _head(config, chosen))
    if groups.tp is None:
        return tuple(specs)
    # The shared units are made of those above.
    from penstock.model.tensor_parallel import share_units

    return share_units(specs, config, groups, chosen)


def _head(config: ModelConfig, products: Products) -> UnitSpec:
    tied = {"projection.weight": "embedding.weight"} if config.tie_embeddings else {}
    return _spec("head", config, partial(Head, config, products), work.of_head(config), tied)


def _predicting_head(config: ModelConfig, products: Products, groups: ModelGroups) -> UnitSpec:
    # Its layers are those above.
    from penstock.model.prediction import PredictingHead

    if groups.tp_size > 1:
        raise ValueError(
            f"tp={groups.tp_size}: a head that predicts further tokens can not be shared; tp=1 is possible"
        )
    tied = {"embedding.weight": "embedding.weight"}
    if config.tie_embeddings:
        tied["projection.weight"] = "embedding.weight"
    flops = work.of_head(config) + work.of_predictions(config)
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
