"""The embedding, plain and tensor-parallel.

Shapes: T tokens of the microbatch, P ranks of the tensor-parallel group, S tokens of one rank, D hidden size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize, Rows
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit
from penstock.model.segments import Compute, Exchange, Segment, State
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
        """The exchanges that follow `look_up`: none."""
        return []


class TensorParallelEmbedding(TensorParallelUnit):
    """Token ids [T] -> this rank's tokens of the residual stream [S, D], each looked up by the rank that has it."""

    def __init__(self, config: ModelConfig, groups: ModelGroups) -> None:
        super().__init__()
        split = TensorParallelSplit(config, groups)
        self.collectives, self.part = Collectives(split.group), split.vocabulary
        self.weight = nn.Parameter(torch.empty(self.part.shape))

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        return [Compute("look up", self.look_up), *self.reduction()]

    def decode(self, tokens_T: Tensor, cache: None, rows: CachedRows) -> Tensor:
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


def embedding(config: ModelConfig, groups: ModelGroups) -> Embedding | TensorParallelEmbedding:
    """The embedding in the form that these groups need."""
    return Embedding(config) if groups.tp is None else TensorParallelEmbedding(config, groups)
