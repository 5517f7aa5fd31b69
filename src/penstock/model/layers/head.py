"""The head, plain and tensor-parallel: the final norm and the projection on the vocabulary.

Shapes: T tokens of the microbatch, S tokens of one rank (decoding: sampled tokens), D hidden size, V vocabulary, U this
rank's part of it.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize, Rows
from penstock.model.layers.norm import RMSNorm
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit
from penstock.model.linear import Linear
from penstock.model.loss import ShardedLogits
from penstock.model.matmul import Matmul
from penstock.model.segments import Compute, Segment
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives
from penstock.settings import ModelConfig


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


class TensorParallelHead(TensorParallelUnit):
    """This rank's tokens of the residual stream [S, D] -> its part of all tokens' logits [T, U]."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        super().__init__()
        split = TensorParallelSplit(config, groups)
        self.collectives, self.part = Collectives(split.group), split.vocabulary
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(config.hidden_size, self.part.length, matmul=matmul)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        project = Compute("projection", lambda h: (self.projection(h[: sequences.num_tokens]),))
        return [Compute("norm", lambda x: (self.norm(x),)), self.gather(), project]

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        """The whole logits [S, V] of the sampled tokens on every rank, so that all ranks draw the same tokens."""
        own_SU = self.projection(self.norm(x_TD[rows.sampled_S]))
        return ShardedLogits(own_SU, self.part, self.collectives).gathered()


def head(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> Head | TensorParallelHead:
    """The head in the form that these groups need."""
    return Head(config, matmul) if groups.tp is None else TensorParallelHead(config, matmul, groups)
