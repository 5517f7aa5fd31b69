"""The two layers with a row for each token of the vocabulary, plain and tensor-parallel: the embedding and the head.

The head is the final norm and the projection on the vocabulary.

Shapes: T tokens of the microbatch, P ranks of the tensor-parallel group, S tokens of one rank (decoding in the head:
sampled tokens), D hidden size, V vocabulary, U this rank's part of it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CacheSize, Rows
from penstock.model.lanes import Compute, Exchange, Segment, State
from penstock.model.layers.dense import RMSNorm
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit
from penstock.model.linear import Linear, Matmul
from penstock.model.loss import ShardedLogits
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives
from penstock.settings import ModelConfig


class Embedding(nn.Module):
    """Token ids [T] -> residual stream [T, D]."""

    has_randomness = False
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.hidden_size))

    def forward(self, tokens_T: Tensor, sequences: Sequences) -> Tensor:
        return F.embedding(tokens_T, self.weight)

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, tokens_T: Tensor, cache: None, rows: Rows) -> Tensor:
        return F.embedding(tokens_T, self.weight)

    def look_up(self, tokens_T: Tensor) -> State:
        """The tokens' rows [T, D], as a state for `reduction`."""
        return (F.embedding(tokens_T, self.weight),)

    def reduction(self) -> list[Exchange]:
        """No exchanges follow `look_up`."""
        return []


class TensorParallelEmbedding(TensorParallelUnit, Embedding):
    """Token ids [T] -> this rank's tokens of the residual stream [S, D], each looked up by the rank that has it."""

    def __init__(self, config: ModelConfig, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        Embedding.__init__(self, replace(config, vocab_size=split.vocabulary.length))
        self.collectives, self.part = Collectives(split.group), split.vocabulary

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        return [Compute("look up", self.look_up), *self.reduction()]

    def decode(self, tokens_T: Tensor, cache: None, rows: Rows) -> Tensor:
        return self.summed(self._found(tokens_T))

    def look_up(self, tokens_T: Tensor) -> State:
        """The rows that this rank has, to be summed over ranks [P S, D]."""
        return (self.padded(self._found(tokens_T)),)

    def reduction(self) -> list[Exchange]:
        """The exchanges that follow `look_up`."""
        return [self.scatter()]

    def _found(self, tokens_T: Tensor) -> Tensor:
        """The rows of tokens in this rank's part of the vocabulary, zeros for all others [T, D]."""
        rows_T = tokens_T - self.part.start
        inside_T = (rows_T >= 0) & (rows_T < self.part.length)
        return F.embedding(rows_T.where(inside_T, 0), self.weight).masked_fill(~inside_T[:, None], 0)


def embedding(config: ModelConfig, groups: ModelGroups) -> Embedding:
    """The embedding in the form that these groups need."""
    return Embedding(config) if groups.tp is None else TensorParallelEmbedding(config, groups)


class Head(nn.Module):
    """Residual stream [T, D] -> logits [T, V]."""

    has_randomness = False
    has_fixed_shapes = True

    def __init__(self, config: ModelConfig, matmul: Matmul) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(config.hidden_size, config.vocabulary, matmul=matmul)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers by the input that they read; see `JointLayers`."""
        return ((self.projection,),)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return self.projection(self.norm(x_TD))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: Rows) -> Tensor:
        return self.projection(self.norm(rows.sampled(x_TD)))


class TensorParallelHead(TensorParallelUnit, Head):
    """This rank's tokens of the residual stream [S, D] -> its part of all tokens' logits [T, U]."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        Head.__init__(self, replace(config, vocab_size=split.vocabulary.length), matmul)
        self.collectives, self.part = Collectives(split.group), split.vocabulary

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        project = Compute("projection", lambda h: (self.projection(h[: sequences.num_tokens]),))
        return [Compute("norm", lambda x: (self.norm(x),)), self.gather(), project]

    def decode(self, x_TD: Tensor, cache: None, rows: Rows) -> Tensor:
        """The whole logits [S, V] of the sampled tokens on every rank, so that all ranks draw the same tokens."""
        own_SU = super().decode(x_TD, cache, rows)
        return ShardedLogits(own_SU, self.part, self.collectives).gathered()


def head(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> Head:
    """The head in the form that these groups need."""
    return Head(config, matmul) if groups.tp is None else TensorParallelHead(config, matmul, groups)
