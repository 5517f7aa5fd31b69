"""The layers of a dense decoder in the forms that process groups need: their split over ranks, and their exchanges.

    embedding   look up | reduce-scatter
    attention   norm | all-gather | heads, attention, output | reduce-scatter | residual
    mlp         norm | all-gather | gate, up, down | reduce-scatter | residual
    head        norm | all-gather | projection

A rank holds its heads, or its columns of an MLP's inner width, or its part of the vocabulary, and the whole of each
norm. Between the products the residual stream is cut by tokens (sequence parallelism): each rank holds [S, D] with
S = T / P rounded up, and the padding of the last rank's run stays zero. The head's output is this rank's part of the
logits.

Shapes: T tokens of the microbatch, P ranks of the tensor-parallel group, S tokens of one rank (decoding in the
head: sampled tokens), D hidden size, H query heads, G key and value heads, K width of a head, V vocabulary, U this
rank's part of it.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.attention.context_parallel import ContextAttention
from penstock.model.kv_cache import Rows
from penstock.model.lanes import Compute, Exchange, Segment, SegmentedUnit, State
from penstock.model.layers.dense import AttentionBlock, Embedding, Head, MLPBlock
from penstock.model.linear import Matmul
from penstock.model.loss import ShardedLogits
from penstock.model.sequences import Sequences, only_read
from penstock.model.units import ModelGroups
from penstock.parallel.collectives import Collectives
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ModelConfig

_CUT_DIMENSIONS = {"q": 0, "k": 0, "v": 0, "output": 1, "gate": 0, "up": 0, "down": 1, "projection": 0, "embedding": 0}
"""Layer -> the dimension along which its weight is cut. A bias goes with the outputs, which only dimension 0 cuts."""


@dataclass(frozen=True, eq=False)
class TensorParallelSplit:
    """The split of a layer of this shape over the ranks of the tensor-parallel group, and this rank's part of it."""

    config: ModelConfig
    groups: ModelGroups

    @property
    def num_kv_parts(self) -> int:
        """Parts of the key and value heads; with fewer heads than ranks, neighbouring ranks hold the same part."""
        return min(self.groups.tp_size, self.config.key_heads)

    @property
    def own(self) -> ModelConfig:
        """The shape of what this rank computes by itself between two exchanges."""
        return replace(
            self.config,
            num_heads=self.config.num_heads // self.groups.tp_size,
            num_kv_heads=self.config.key_heads // self.num_kv_parts,
            head_dim=self.config.head_size,
            intermediate_size=self.config.intermediate_size // self.groups.tp_size,
        )

    @property
    def vocabulary(self) -> Shard:
        """This rank's part of the embedding's and the head's weight; parts differ by at most one token."""
        return Shard(
            "tp", 0, self.groups.tp_rank, self.groups.tp_size, (self.config.vocabulary, self.config.hidden_size)
        )

    @property
    def of_vocabulary(self) -> ModelConfig:
        """The settings of this rank's part of the vocabulary, whose tokens count from its start."""
        part, padding = self.vocabulary, self.config.padding_token
        if padding is not None:
            padding = padding - part.start if 0 <= padding - part.start < part.length else None
        return replace(self.config, vocab_size=part.length, padding_token=padding)

    def shard(self, name: str, full_shape: tuple[int, ...]) -> Shard | None:
        """This rank's part of the parameter with that name in its unit; None if every rank holds it whole."""
        *_, owner, kind = ("", *name.split("."))
        if owner and owner not in _CUT_DIMENSIONS:
            return None
        count = self.num_kv_parts if owner in ("k", "v") else self.groups.tp_size
        dim = 0 if kind == "bias" else _CUT_DIMENSIONS.get(owner, 0)
        return Shard("tp", dim, self.groups.tp_rank * count // self.groups.tp_size, count, full_shape)

    def is_repeated(self, shard: Shard | None) -> bool:
        """True if several ranks of the group hold this part."""
        return shard is None or shard.axis != "tp" or shard.count < self.groups.tp_size


def check_tensor_parallel(config: ModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks that cannot split a decoder evenly.

    Raises:
        ValueError: naming the numbers of ranks that can.
    """
    if not config.can_share(num_ranks):
        possible = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.can_share(n))
        raise ValueError(
            f"tp={num_ranks} cannot share {config.num_heads} query heads, {config.key_heads} key heads and an MLP "
            f"of width {config.intermediate_size} evenly; possible are {possible}"
        )


class TensorParallelUnit(SegmentedUnit):
    """A unit whose residual stream is cut by tokens over the ranks of the tensor-parallel group."""

    has_fixed_shapes = False

    #: the tensor-parallel group's collectives
    collectives: Collectives
    #: of the residual stream, before anything is computed
    norm: Callable[[Tensor], Tensor]

    def gather(self) -> Exchange:
        """The exchange from this rank's tokens [S, D] to those of all ranks [P S, D]."""
        return Exchange("gather tokens", self.collectives.all_gather, self.collectives.reduce_scatter)

    def scatter(self) -> Exchange:
        """The exchange from this rank's addend for all tokens [P S, D] to the sum for its own tokens [S, D]."""
        return Exchange("sum and scatter tokens", self.collectives.reduce_scatter, self.collectives.all_gather)

    def around(self, inner: Sequence[Segment]) -> list[Segment]:
        """A block as a row: `inner` takes all normalised tokens [P S, D] to its addend, and the stream passes by."""
        norm, residual = Compute("norm", lambda x: (self.norm(x), x)), Compute("residual", lambda y, x: (x + y,))
        return [norm, self.gather(), *inner, self.scatter(), residual]

    def padded(self, x_TD: Tensor) -> Tensor:
        """The tokens followed by zeros, [P S, D]."""
        num_missing = -x_TD.shape[0] % self.collectives.size
        return F.pad(x_TD, (0, 0, 0, num_missing)) if num_missing else x_TD

    def summed(self, x_TD: Tensor) -> Tensor:
        """Sum over ranks, on every rank and immediately: for generation, where tokens are few and not cut by rank."""
        if x_TD.is_cuda:
            return self.collectives.all_reduce(x_TD).wait()
        # Always in the order of ranks, so that a row's bits do not depend on the number of other rows.
        return self.collectives.all_gather(x_TD).wait().unflatten(0, (self.collectives.size, -1)).sum(0)


class TensorParallelEmbedding(TensorParallelUnit, Embedding):
    """Token ids [T] -> this rank's tokens of the residual stream [S, D], each looked up by the rank that has it."""

    def __init__(self, config: ModelConfig, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        Embedding.__init__(self, split.of_vocabulary)
        self.collectives, self.part = Collectives(groups.tp), split.vocabulary

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        return [Compute("look up", lambda tokens_T: (self.padded(self.embedded(tokens_T)),)), self.scatter()]

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """The rows of tokens in this rank's part of the vocabulary, zeros for all others [T, D]."""
        rows_T = tokens_T - self.part.start
        inside_T = (rows_T >= 0) & (rows_T < self.part.length)
        return super().embedded(rows_T.where(inside_T, 0)).masked_fill(~inside_T[:, None], 0)


class ContextParallelAttentionBlock(SegmentedUnit, AttentionBlock):
    """The attention block where several ranks hold parts of each sequence; plain attention for whole sequences."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__(config, matmul)
        cp = Collectives(groups.cp)
        self.context = ContextAttention(groups.context_form, cp, config.num_heads, config.key_heads)

    def segments(self, sequences: Sequences) -> list[Segment]:
        if sequences.spread is None:
            return [Compute("attention", lambda x_TD: (AttentionBlock.forward(self, x_TD, sequences),))]
        return [
            Compute("project", lambda x_TD: (*self.heads(self.norm(x_TD), sequences), x_TD)),
            *self.context.segments(sequences, self.attention),
            Compute("add output", lambda mean_THK, x_TD: (x_TD + self.output(mean_THK.flatten(1)),)),
        ]


class TensorParallelAttentionBlock(TensorParallelUnit, AttentionBlock):
    """The attention block for this rank's heads, over whole sequences or, with context parallelism, parts of them."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        own = split.own
        AttentionBlock.__init__(self, own, matmul)
        self.collectives, cp = Collectives(groups.tp), Collectives(groups.cp)
        self.context = ContextAttention(groups.context_form, cp, own.num_heads, own.key_heads)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        num_tokens = sequences.num_tokens

        def heads(h: Tensor, x: Tensor) -> State:
            return *self.heads(h[:num_tokens], sequences), x

        def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, x: Tensor) -> State:
            return self.attention.packed(q_THK, k_THK, v_THK, sequences), x

        def output(mean_THK: Tensor, x: Tensor) -> State:
            return self.padded(self.output(mean_THK.flatten(1))), x

        if sequences.spread is None:
            attention = [Compute("attention", lambda h, x: output(*attend(*heads(h, x))))]
        else:
            attention = [
                Compute("heads", heads),
                *self.context.segments(sequences, self.attention),
                Compute("output", output),
            ]
        return self.around(attention)


class TensorParallelMLPBlock(TensorParallelUnit, MLPBlock):
    """The MLP block for this rank's columns of the inner width."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        MLPBlock.__init__(self, split.own, matmul)
        self.collectives = Collectives(groups.tp)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        return self.around([Compute("mlp", lambda h, x: (self.inner(h), x))])


class TensorParallelHead(TensorParallelUnit, Head):
    """This rank's tokens of the residual stream [S, D] -> its part of all tokens' logits [T, U]."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        Head.__init__(self, split.of_vocabulary, matmul)
        self.collectives, self.part = Collectives(groups.tp), split.vocabulary

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        def project(h: Tensor) -> State:
            return (self.projection(only_read(h[: sequences.num_tokens], sequences.read_rows)),)

        return [Compute("norm", lambda x: (self.norm(x),)), self.gather(), Compute("projection", project)]

    def decode(self, x_TD: Tensor, cache: None, rows: Rows) -> Tensor:
        """The whole logits [S, V] of the sampled tokens on every rank, so that all ranks draw the same tokens."""
        own_SU = super().decode(x_TD, cache, rows)
        return ShardedLogits(own_SU, self.part, self.collectives).gathered()


_FORMS = {
    Embedding: TensorParallelEmbedding,
    AttentionBlock: TensorParallelAttentionBlock,
    MLPBlock: TensorParallelMLPBlock,
    Head: TensorParallelHead,
}


def unit_in_groups(kind: type[nn.Module], arguments: Sequence[Any], groups: ModelGroups) -> Any:
    """A unit of this kind, made from these arguments, in the form that these groups need."""
    if groups.tp is not None:
        return _FORMS[kind](*arguments, groups)
    if groups.cp is not None and kind is AttentionBlock:
        config, matmul = arguments
        return ContextParallelAttentionBlock(config, matmul, groups)
    return kind(*arguments)
