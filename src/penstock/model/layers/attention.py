"""The decoder's units where nobody shares them: embedding, the two halves of a layer, head.

Shapes: T tokens of the microbatch, D hidden size, H heads, K width of a head, V vocabulary, S sampled tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.attention.all_to_all import HeadShape, check_heads, context_attention
from penstock.model.attention.packed import packed_attention
from penstock.model.cached import CacheSize, KVCache, Reading
from penstock.model.collectives import Collectives
from penstock.model.config import ModelConfig
from penstock.model.groups import ModelGroups
from penstock.model.layers.mlp import gated
from penstock.model.layers.norm import RMSNorm
from penstock.model.layers.rotary import Rotary, rotate
from penstock.model.linear import Linear, outputs
from penstock.model.matmul import Products
from penstock.model.segments import Compute, Segment, SegmentedUnit
from penstock.model.sequences import Sequences


class Embedding(nn.Module):
    """Token ids [T] -> residual stream [T, D]."""

    has_randomness = False
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))

    def forward(self, tokens_T: Tensor, sequences: Sequences) -> Tensor:
        return F.embedding(tokens_T, self.weight)

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, tokens_T: Tensor, cache: None, rows: Reading) -> Tensor:
        return F.embedding(tokens_T, self.weight)


class AttentionHalf(nn.Module):
    """x + output(attention(norm(x))), with grouped queries, rotary positions and an optional window."""

    has_randomness = False
    has_fixed_shapes = True

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

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """Those that read the same input; see `JointLayers`."""
        return (self.q, self.k, self.v), (self.output,)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        mean_THK = packed_attention(*self.project(x_TD, sequences), sequences, self.window)
        return self.add_output(x_TD, mean_THK)

    def new_cache(self, size: CacheSize) -> KVCache:
        return KVCache(size, self.k.out_features // self.head_dim, self.head_dim)

    def decode(self, x_TD: Tensor, cache: KVCache, rows: Reading) -> Tensor:
        return self.add_output(x_TD, self.attend_cached(x_TD, cache, rows))

    def attend_cached(self, x_TD: Tensor, cache: KVCache, rows: Reading) -> Tensor:
        """The heads' means [T, H, K] over the cache, in which the tokens' own keys and values are from now on."""
        q_THK, k_THK, v_THK = self.project(x_TD, rows)
        rows.write(cache, k_THK, v_THK)
        return rows.attend(q_THK, cache, self.window)

    def project(self, x_TD: Tensor, sequences: Sequences | Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, K] of the residual stream, turned by their positions."""
        return self.heads(self.norm(x_TD), sequences)

    def heads(self, h_TD: Tensor, sequences: Sequences | Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, K] of the normalised stream, turned by their positions."""
        q_THK, k_THK, v_THK = (
            part_TX.unflatten(-1, (-1, self.head_dim)) for part_TX in outputs(h_TD, (self.q, self.k, self.v))
        )
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
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = Linear(config.hidden_size, config.intermediate_size, products=products)
        self.up = Linear(config.hidden_size, config.intermediate_size, products=products)
        self.down = Linear(config.intermediate_size, config.hidden_size, products=products)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """Those that read the same input; see `JointLayers`."""
        return (self.gate, self.up), (self.down,)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))

    def inner(self, h_TD: Tensor) -> Tensor:
        """What is added to the residual stream, from the normalised one."""
        return self.down(gated(*outputs(h_TD, (self.gate, self.up))))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: Reading) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))


class Head(nn.Module):
    """Residual stream [T, D] -> logits [T, V]: the final norm and the projection on the vocabulary."""

    has_randomness = False
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(config.hidden_size, config.vocab_size, products=products)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """Those that read the same input; see `JointLayers`."""
        return ((self.projection,),)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.projection(self.norm(x_TD))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: Reading) -> Tensor:
        return self.projection(self.norm(rows.sampled(x_TD)))
