"""The decoder's units where several ranks share each: heads, columns and vocabulary cut, tokens cut in between.

    embedding   look up | reduce-scatter
    attention   norm | all-gather | heads, attention, output | reduce-scatter | residual
    mlp         norm | all-gather | gate, up, down | reduce-scatter | residual
    head        norm | all-gather | projection

A rank holds its heads, or its columns of the width inside an MLP, or its part of the vocabulary, and the whole of each
norm. Between the products every rank holds a run of the tokens: the residual stream is [S, D] with S = T / P rounded
up, and what pads the last run stays zero. The head's output is this rank's part of the logits.

Shapes: T tokens of the microbatch, P ranks that share the units, S tokens of one rank, D hidden size, V vocabulary.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from penstock.model.attention.all_to_all import HeadShape, check_heads, context_attention
from penstock.model.attention.packed import packed_attention
from penstock.model.cached import CachedRows, CacheSize, KVCache
from penstock.model.collectives import Collectives
from penstock.model.config import ModelConfig
from penstock.model.groups import ModelGroups
from penstock.model.layers.attention import AttentionHalf, MLPHalf
from penstock.model.layers.norm import RMSNorm
from penstock.model.linear import Linear
from penstock.model.matmul import Products
from penstock.model.segments import Compute, Exchange, Segment, SegmentedUnit, State
from penstock.model.sequences import Sequences
from penstock.model.sharded_logits import ShardedLogits
from penstock.model.units import Shard

_CUT_DIMENSIONS = {"q": 0, "k": 0, "v": 0, "output": 1, "gate": 0, "up": 0, "down": 1, "projection": 0}
"""By the layer: which dimension of its weight is cut. A bias goes with the outputs, which only columns cut."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks that share a unit, and what this one holds of it; config: of the unit's layer."""

    config: ModelConfig
    groups: ModelGroups

    @property
    def group(self) -> ProcessGroup:
        assert self.groups.tp is not None
        return self.groups.tp

    @property
    def size(self) -> int:
        return self.groups.tp_size

    @property
    def rank(self) -> int:
        return self.groups.tp_rank

    @property
    def num_kv_parts(self) -> int:
        """Parts that the key and value heads are cut into; with fewer heads than ranks, neighbours hold the same."""
        return min(self.size, self.config.num_kv_heads)

    @property
    def own(self) -> ModelConfig:
        """The shape of what this rank computes by itself between two exchanges."""
        return replace(
            self.config,
            num_heads=self.config.num_heads // self.size,
            num_kv_heads=self.config.num_kv_heads // self.num_kv_parts,
            intermediate_size=self.config.intermediate_size // self.size,
        )

    @property
    def vocabulary(self) -> Shard:
        """This rank's part of the embedding's and the head's weight; the parts differ by one token at most."""
        return Shard("tp", 0, self.rank, self.size, (self.config.vocab_size, self.config.hidden_size))

    def shard(self, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        """Which part of a unit's parameter this rank holds, given its name in the unit; None for what all hold."""
        *_, owner, kind = ("", *name.split("."))
        if owner and owner not in _CUT_DIMENSIONS:
            return None
        count = self.num_kv_parts if owner in ("k", "v") else self.size
        dim = 0 if kind == "bias" else _CUT_DIMENSIONS.get(owner, 0)
        return Shard("tp", dim, self.rank * count // self.size, count, full_shape)

    def logits(self, own_TU: Tensor) -> ShardedLogits:
        """The logits of which the head's output is this rank's part."""
        return ShardedLogits(own_TU, self.vocabulary, Collectives(self.group))


def can_share(config: ModelConfig, num_ranks: int) -> bool:
    """Whether every rank can have equally many query heads and columns, and whole key and value heads."""
    larger, smaller = max(config.num_kv_heads, num_ranks), min(config.num_kv_heads, num_ranks)
    whole = config.num_heads % num_ranks == 0 and config.intermediate_size % num_ranks == 0
    return whole and larger % smaller == 0 and config.vocab_size >= num_ranks


class _SharedUnit(SegmentedUnit):
    """A unit whose residual stream is cut by tokens over the ranks that share it."""

    has_fixed_shapes = False

    collectives: Collectives

    def gather(self) -> Exchange:
        """From this rank's tokens [S, D] to all of them [P S, D]."""
        return Exchange("gather tokens", self.collectives.all_gather, self.collectives.reduce_scatter)

    def scatter(self) -> Exchange:
        """From this rank's part of a sum, for all tokens [P S, D], to the whole sum for its own [S, D]."""
        return Exchange("sum and scatter tokens", self.collectives.reduce_scatter, self.collectives.all_gather)

    def padded(self, x_TD: Tensor) -> Tensor:
        """The tokens with zeros behind them, [P S, D]."""
        num_missing = -x_TD.shape[0] % self.collectives.size
        return F.pad(x_TD, (0, 0, 0, num_missing)) if num_missing else x_TD

    def summed(self, x_TD: Tensor) -> Tensor:
        """The sum over ranks, on every rank, at once: for generation, where tokens are few and nothing is cut."""
        if x_TD.is_cuda:
            return self.collectives.all_reduce(x_TD).wait()
        # Always in the order of ranks, so that a row's bits do not depend on how many others there are.
        return self.collectives.all_gather(x_TD).wait().unflatten(0, (self.collectives.size, -1)).sum(0)

    def new_cache(self, size: CacheSize) -> Any:
        return None


class SharedEmbedding(_SharedUnit):
    """Token ids [T] -> this rank's tokens of the residual stream [S, D], looked up by the ranks that have them."""

    def __init__(self, peers: Peers, products: Products) -> None:
        super().__init__()
        self.collectives, self.part = Collectives(peers.group), peers.vocabulary
        self.weight = nn.Parameter(torch.empty(self.part.shape))

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        return [Compute("look up", self.look_up), self.scatter()]

    def decode(self, tokens_T: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return self.summed(self._found(tokens_T))

    def look_up(self, tokens_T: Tensor) -> State:
        """What this rank has of the tokens, to be summed over ranks [P S, D]."""
        return (self.padded(self._found(tokens_T)),)

    def _found(self, tokens_T: Tensor) -> Tensor:
        """What this rank has of the tokens, zeros for others [T, D]."""
        rows_T = tokens_T - self.part.start
        inside_T = (rows_T >= 0) & (rows_T < self.part.length)
        return F.embedding(rows_T.where(inside_T, 0), self.weight).masked_fill(~inside_T[:, None], 0)


class SharedAttentionHalf(_SharedUnit, AttentionHalf):
    """The attention half for this rank's heads, over the tokens of whole sequences or of this rank's part of them."""

    def __init__(self, peers: Peers, products: Products) -> None:
        own = peers.own
        AttentionHalf.__init__(self, own, products)
        self.collectives, self.context = Collectives(peers.group), Collectives(peers.groups.cp)
        self.form, self.shape = peers.groups.context_form, HeadShape(own.num_heads, own.num_kv_heads, self.window)
        check_heads(self.form, self.context.size, self.shape)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        num_tokens = sequences.num_tokens

        def heads(h: Tensor, x: Tensor) -> State:
            return *self.heads(h[:num_tokens], sequences), x

        def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, x: Tensor) -> State:
            return packed_attention(q_THK, k_THK, v_THK, sequences, self.window), x

        def output(mean_THK: Tensor, x: Tensor) -> State:
            return self.padded(self.output(mean_THK.flatten(1))), x

        norm, residual = Compute("norm", lambda x: (self.norm(x), x)), Compute("residual", _add)
        if sequences.spread is None:
            attention = [Compute("attention", lambda h, x: output(*attend(*heads(h, x))))]
        else:
            among_ranks = context_attention(self.form, self.context, sequences, self.shape)
            attention = [Compute("heads", heads), *among_ranks, Compute("output", output)]
        return [norm, self.gather(), *attention, self.scatter(), residual]

    def new_cache(self, size: CacheSize) -> KVCache:
        return AttentionHalf.new_cache(self, size)

    def decode(self, x_TD: Tensor, cache: KVCache, rows: CachedRows) -> Tensor:
        mean_THK = self.attend_cached(x_TD, cache, rows)
        return x_TD + self.summed(self.output(mean_THK.flatten(1)))


class SharedMLPHalf(_SharedUnit, MLPHalf):
    """The MLP half for this rank's columns of the width inside."""

    def __init__(self, peers: Peers, products: Products) -> None:
        MLPHalf.__init__(self, peers.own, products)
        self.collectives = Collectives(peers.group)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        norm = Compute("norm", lambda x: (self.norm(x), x))
        mlp = Compute("mlp", lambda h, x: (self.inner(h), x))
        return [norm, self.gather(), mlp, self.scatter(), Compute("residual", _add)]

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return x_TD + self.summed(self.inner(self.norm(x_TD)))


class SharedHead(_SharedUnit):
    """This rank's tokens of the residual stream [S, D] -> its part of the logits, of all tokens [T, part of V]."""

    def __init__(self, peers: Peers, products: Products) -> None:
        super().__init__()
        config = peers.config
        self.collectives, self.part = Collectives(peers.group), peers.vocabulary
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(config.hidden_size, peers.vocabulary.length, products=products)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        project = Compute("projection", lambda h: (self.projection(h[: sequences.num_tokens]),))
        return [Compute("norm", lambda x: (self.norm(x),)), self.gather(), project]

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """The whole logits [S, V] of the tokens to be sampled, on every rank: all of them draw the same."""
        own_SU = self.projection(self.norm(x_TD[rows.sampled_S]))
        return ShardedLogits(own_SU, self.part, self.collectives).gathered()


def _add(y: Tensor, x: Tensor) -> State:
    return (x + y,)
