"""The attention block, plain, context-parallel and tensor-parallel.

Shapes: T tokens of the microbatch, S tokens of one rank, D hidden size, H query heads, K width of a head.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.model.attention.context_parallel import HeadShape, check_heads, context_attention
from penstock.model.attention.fixed_tiles import tiled_attention, tiled_cached_attention
from penstock.model.attention.kernels import packed_attention
from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize, KVCache, Rows
from penstock.model.layers.functions import RMSNorm, Rotary, rotate
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit, add_residual
from penstock.model.linear import Linear, joint_output, split_outputs
from penstock.model.matmul import Matmul
from penstock.model.segments import Compute, Segment, SegmentedUnit, State
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives
from penstock.settings import ModelConfig


class AttentionBlock(nn.Module):
    """x + output(attention(norm(x))), with grouped queries, rotary positions and an optional sliding window."""

    has_randomness = False
    has_fixed_shapes = True
    #: the lengths of the sequences decide what is computed, and each would be compiled anew
    compiles = None
    #: True if a token's bits are to depend on its sequence alone; see `penstock.model.reproducible`
    is_reproducible = False

    def __init__(self, config: ModelConfig, matmul: Matmul) -> None:
        super().__init__()
        self.head_dim, self.window = config.head_size, config.sliding_window
        self.rotary = Rotary(config.head_size, config.rope_theta, config.rope_scaling)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.q = Linear(config.hidden_size, config.query_size, config.qkv_bias, matmul)
        self.k = Linear(config.hidden_size, config.kv_size, config.qkv_bias, matmul)
        self.v = Linear(config.hidden_size, config.kv_size, config.qkv_bias, matmul)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.output = Linear(config.query_size, config.hidden_size, matmul=matmul)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers by the input that they read; see `JointLayers`."""
        return (self.q, self.k, self.v), (self.output,)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.project(x_TD, sequences)
        if self.is_reproducible:
            return self.add_output(x_TD, tiled_attention(*qkv, sequences))
        return self.add_output(x_TD, packed_attention(*qkv, sequences, self.window))

    def new_cache(self, size: CacheSize) -> KVCache:
        return KVCache(size, self.k.out_features // self.head_dim, self.head_dim)

    def decode(self, x_TD: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        return self.add_output(x_TD, self.attend_cached(x_TD, cache, rows))

    def attend_cached(self, x_TD: Tensor, cache: KVCache, rows: Rows) -> Tensor:
        """Write the tokens' keys and values to the cache and attend over it; returns the means [T, H, K]."""
        q_THK, k_THK, v_THK = self.project(x_TD, rows)
        rows.write(cache, k_THK, v_THK)
        if self.is_reproducible:
            return tiled_cached_attention(q_THK, cache, rows)
        return rows.attend(q_THK, cache, self.window)

    def project(self, x_TD: Tensor, sequences: Sequences | Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values [T, heads, K] of the residual stream."""
        return self.heads(self.norm(x_TD), sequences)

    def heads(self, h_TD: Tensor, sequences: Sequences | Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values [T, heads, K] of the normalised stream."""
        layers, tables = (self.q, self.k, self.v), self.rotary.tables(sequences)
        joint_TX = joint_output(h_TD, layers)
        sizes = [layer.out_features // self.head_dim for layer in layers]
        if joint_TX is not None and self.q_norm is None:
            # Queries and keys lie side by side, and are rotated as one.
            qk_THK, v_THK = joint_TX.view(len(joint_TX), -1, self.head_dim).split((sizes[0] + sizes[1], sizes[2]), 1)
            q_THK, k_THK = rotate(qk_THK, tables).split(sizes[:2], 1)
            return q_THK, k_THK, v_THK
        q_THK, k_THK, v_THK = (
            part_TX.unflatten(-1, (-1, self.head_dim)) for part_TX in split_outputs(h_TD, joint_TX, layers)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_THK = self.q_norm(q_THK), self.k_norm(k_THK)
        return rotate(q_THK, tables), rotate(k_THK, tables), v_THK

    def add_output(self, x_TD: Tensor, mean_THK: Tensor) -> Tensor:
        """The residual stream after the block, from the heads' means."""
        return x_TD + self.output(mean_THK.flatten(1))


class ContextParallelAttentionBlock(SegmentedUnit, AttentionBlock):
    """The attention block where several ranks hold parts of each sequence; plain attention for whole sequences."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__(config, matmul)
        self.form, self.collectives = groups.context_form, Collectives(groups.cp)
        self.shape = HeadShape(config.num_heads, config.key_heads, config.sliding_window)
        check_heads(self.form, groups.cp_size, self.shape)

    def segments(self, sequences: Sequences) -> list[Segment]:
        if sequences.spread is None:
            return [Compute("attention", lambda x_TD: (AttentionBlock.forward(self, x_TD, sequences),))]
        return [
            Compute("project", lambda x_TD: (*self.project(x_TD, sequences), x_TD)),
            *context_attention(self.form, self.collectives, sequences, self.shape),
            Compute("add output", lambda mean_THK, x_TD: (self.add_output(x_TD, mean_THK),)),
        ]


class TensorParallelAttentionBlock(TensorParallelUnit, AttentionBlock):
    """The attention block for this rank's heads, over whole sequences or, with context parallelism, parts of them."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        own = split.own
        AttentionBlock.__init__(self, own, matmul)
        self.collectives, self.context = Collectives(split.group), Collectives(groups.cp)
        self.form, self.shape = groups.context_form, HeadShape(own.num_heads, own.key_heads, self.window)
        check_heads(self.form, self.context.size, self.shape)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        num_tokens = sequences.num_tokens

        def heads(h: Tensor, x: Tensor) -> State:
            return *self.heads(h[:num_tokens], sequences), x

        def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, x: Tensor) -> State:
            return packed_attention(q_THK, k_THK, v_THK, sequences, self.window), x

        def output(mean_THK: Tensor, x: Tensor) -> State:
            return self.padded(self.output(mean_THK.flatten(1))), x

        norm, residual = Compute("norm", lambda x: (self.norm(x), x)), Compute("residual", add_residual)
        if sequences.spread is None:
            attention = [Compute("attention", lambda h, x: output(*attend(*heads(h, x))))]
        else:
            among_ranks = context_attention(self.form, self.context, sequences, self.shape)
            attention = [Compute("heads", heads), *among_ranks, Compute("output", output)]
        return [norm, self.gather(), *attention, self.scatter(), residual]

    def new_cache(self, size: CacheSize) -> KVCache:
        return AttentionBlock.new_cache(self, size)

    def decode(self, x_TD: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        mean_THK = self.attend_cached(x_TD, cache, rows)
        return x_TD + self.summed(self.output(mean_THK.flatten(1)))


def attention_block(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> AttentionBlock:
    """The attention block of a layer of this shape, in the form that these groups need."""
    if groups.tp is not None:
        return TensorParallelAttentionBlock(config, matmul, groups)
    if groups.cp is not None:
        return ContextParallelAttentionBlock(config, matmul, groups)
    return AttentionBlock(config, matmul)
