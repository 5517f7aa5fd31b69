"""The MLP block, plain and tensor-parallel.

Shapes: T tokens of the microbatch, D hidden size.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize, Rows
from penstock.model.layers.functions import RMSNorm, gated
from penstock.model.layers.tensor_parallel import TensorParallelSplit, TensorParallelUnit, add_residual
from penstock.model.linear import Linear, outputs
from penstock.model.matmul import Matmul
from penstock.model.segments import Compute, Segment
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives
from penstock.settings import ModelConfig


class MLPBlock(nn.Module):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    has_randomness = False
    has_fixed_shapes = True
    #: True if a token's bits are to depend on its sequence alone; see `penstock.model.reproducible`
    is_reproducible = False

    def __init__(self, config: ModelConfig, matmul: Matmul) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate = Linear(config.hidden_size, config.intermediate_size, matmul=matmul)
        self.up = Linear(config.hidden_size, config.intermediate_size, matmul=matmul)
        self.down = Linear(config.intermediate_size, config.hidden_size, matmul=matmul)

    @property
    def joint_layers(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers by the input that they read; see `JointLayers`."""
        return (self.gate, self.up), (self.down,)

    def forward(self, x_TD: Tensor, sequences: Sequences) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))

    def inner(self, h_TD: Tensor) -> Tensor:
        """The block's addend to the residual stream, from the normalised stream."""
        gate, up = outputs(h_TD, (self.gate, self.up))
        return self.down(gated(gate, up, self.is_reproducible))

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: Rows) -> Tensor:
        return x_TD + self.inner(self.norm(x_TD))


class TensorParallelMLPBlock(TensorParallelUnit, MLPBlock):
    """The MLP block for this rank's columns of the inner width."""

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> None:
        split = TensorParallelSplit(config, groups)
        MLPBlock.__init__(self, split.own, matmul)
        self.collectives = Collectives(split.group)

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        norm = Compute("norm", lambda x: (self.norm(x), x))
        mlp = Compute("mlp", lambda h, x: (self.inner(h), x))
        return [norm, self.gather(), mlp, self.scatter(), Compute("residual", add_residual)]

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        return x_TD + self.summed(self.inner(self.norm(x_TD)))


def mlp_block(config: ModelConfig, matmul: Matmul, groups: ModelGroups) -> MLPBlock:
    """The MLP block in the form that these groups need."""
    return MLPBlock(config, matmul) if groups.tp is None else TensorParallelMLPBlock(config, matmul, groups)
