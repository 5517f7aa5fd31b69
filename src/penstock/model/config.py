"""The shape of a decoder of the Llama, Qwen2, Qwen3 and Mistral family.

No torch here: a configuration is checked before anything heavy is imported.
"""

from dataclasses import dataclass, replace

from penstock.model.expert_config import ExpertConfig
from penstock.model.rope_scaling import RopeScaling


@dataclass(frozen=True)
class ModelConfig:
    """One decoder's sizes and switches; whatever can not be built is refused here.

    Args:
        vocab_size: tokens the model knows, ids 0 ... vocab_size - 1.
        hidden_size: width of the residual stream.
        intermediate_size: width inside an MLP.
        num_layers: decoder layers, each an attention half and an MLP half.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads; 0 means num_heads.
        head_dim: width of a head, even; 0 means hidden_size / num_heads.
        max_length: the longest sequence, in tokens.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every norm.
        qkv_bias: bias on the query, key and value projections (Qwen2).
        qk_norm: RMSNorm over each query and key head (Qwen3).
        tie_embeddings: the head uses the embedding's weight.
        sliding_window: how many tokens a token sees, itself included (Mistral); None means all before it.
        experts: what the layers that have experts have instead of one MLP; None means that none has.
        num_full_layers: the first so many layers see everything in spite of the window (Qwen2).
        rope_scaling: how the rotary frequencies are stretched (Llama 3); None leaves them alone.
        num_predictions: tokens beyond the next that are predicted while the model learns, each through a further layer
            like the last one (DeepSeek-V3).
        prediction_loss: what the mean of their losses is weighted with.

    Raises:
        ValueError: naming the setting, its value and what would be possible.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    max_length: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    experts: ExpertConfig | None = None
    num_full_layers: int = 0
    rope_scaling: RopeScaling | None = None
    num_predictions: int = 0
    prediction_loss: float = 0.3

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_length"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: it must be at least 1")
        _require(self.rope_theta > 0, f"rope_theta={self.rope_theta}: it must be above 0")
        _require(self.num_predictions >= 0, f"num_predictions={self.num_predictions}: it must be at least 0")
        _require(self.prediction_loss > 0, f"prediction_loss={self.prediction_loss}: it must be above 0")
        _require(self.norm_eps > 0, f"norm_eps={self.norm_eps}: it must be above 0")
        _require(
            self.sliding_window is None or self.sliding_window >= 1,
            f"sliding_window={self.sliding_window}: a token sees at least itself, so it must be at least 1, or None",
        )
        _require(
            0 <= self.num_full_layers <= self.num_layers,
            f"num_full_layers={self.num_full_layers} is not between 0 and num_layers={self.num_layers}",
        )
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
        _require(
            self.num_kv_heads in divisors,
            f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: possible are {divisors}",
        )
        if self.head_dim == 0:
            _require(
                self.hidden_size % self.num_heads == 0,
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: "
                "change one of them or give head_dim",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        _require(
            self.head_dim >= 2 and self.head_dim % 2 == 0,
            f"head_dim={self.head_dim}: rotary positions turn pairs, so it must be even and at least 2",
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that number has experts instead of one MLP."""
        return self.experts is not None and self.experts.is_sparse(layer)

    def of_layer(self, number: int) -> "ModelConfig":
        """The configuration as the layer of that number has it, where layers differ."""
        return replace(self, sliding_window=None, num_full_layers=0) if number < self.num_full_layers else self

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
