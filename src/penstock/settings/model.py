"""The settings of a model: its shape, experts and adapters."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FRACTION,
    HEADS,
    WIDTH,
    Bounds,
    ConfigError,
    NamedValue,
    Settings,
    declared,
    refuse_divisor,
    setting,
)


class RopeKind(NamedValue):
    """Scalings of rotary frequencies, under Hugging Face's names.

    LINEAR divides every frequency. LLAMA3 divides low ones and leaves high ones unchanged. YARN does the same and also
    sharpens attention.
    """

    NONE = "none"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


Native = bool | Literal["auto"]
"""True for Penstock's own layers, false for those of transformers, auto for its own where it knows the family."""


@dataclass(frozen=True)
class RopeScaling(Settings, section="rope"):
    """Scaling of rotary positions to longer texts than a model was first trained on."""

    kind: RopeKind = setting(
        RopeKind.NONE, "Scaling of frequencies: all by the same factor (linear), Llama 3's, or YaRN's.", key="scaling"
    )
    factor: float = setting(1.0, "Largest factor of the scaling.", Bounds(least=1))
    original_length: int | None = setting(
        None, "The longest sequence before scaling, in tokens (llama3, yarn).", AT_LEAST_1
    )
    low: float = setting(1.0, "Frequencies with fewer turns over that length are scaled in full.", ABOVE_0)
    high: float | None = setting(
        None, "Frequencies with more turns are unchanged; left out, 4 (llama3) or 32 (yarn).", ABOVE_0
    )
    attention_factor: float | None = setting(
        None, "Factor on cosines and sines (yarn); left out, 0.1 log(factor) + 1.", ABOVE_0
    )
    truncate: bool = setting(True, "Round the ends of the ramp between low and high to whole pairs (yarn).")

    def _check(self) -> None:
        if self.kind is RopeKind.NONE:
            return
        if self.kind is not RopeKind.LINEAR and self.original_length is None:
            raise ConfigError(f"rope.scaling = {self.kind} needs rope.original_length, at least 1")
        if not self.low < self.upper:
            raise ConfigError(f"rope.low = {self.low} must be less than rope.high = {self.upper}")

    @property
    def upper(self) -> float:
        """`high`, or its default for this kind."""
        return self.high or (32.0 if self.kind is RopeKind.YARN else 4.0)

    @property
    def table_factor(self) -> float:
        """Factor on cosines and sines. Source: Peng et al. 2023 (YaRN), section 3.4."""
        if self.kind is not RopeKind.YARN:
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


class Scores(NamedValue):
    """The scores from a router's logits: SOFTMAX over all experts, or SIGMOID of each alone."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(NamedValue):
    """The score of a group of experts: its BEST expert's, or the sum of its BEST_TWO."""

    BEST = "best"
    BEST_TWO = "best-two"


@dataclass(frozen=True)
class ExpertConfig(Settings, section="experts"):
    """Experts in place of a layer's MLP, as in Mixtral, Qwen and DeepSeek.

    Each token goes to its `num_active` highest-scoring experts. There is no capacity limit; no token is dropped.
    Auxiliary losses keep experts balanced, or a bias without a loss, or both.
    """

    num_experts: int = setting(0, "Experts of a layer; 0 for a dense model.", Bounds(least=0, limit=2**16))
    num_active: int = setting(2, "Experts that a token goes to.", AT_LEAST_1)
    intermediate_size: int = setting(128, "Width inside an expert.", WIDTH)
    scores: Scores = setting(
        Scores.SOFTMAX, 'Scores from router logits: over all experts, or "sigmoid" of each alone (DeepSeek-V3).'
    )
    normalise: bool = setting(True, "A token's weights are divided by their sum.")
    scaling_factor: float = setting(1.0, "Factor on a token's weights, applied last.", ABOVE_0)
    num_groups: int = setting(
        1, "Equal groups of neighbouring experts; a token goes to num_active_groups of them.", AT_LEAST_1
    )
    num_active_groups: int = setting(1, "Groups whose experts a token may go to.", AT_LEAST_1)
    group_score: GroupScore = setting(
        GroupScore.BEST, "A group's score: its best (DeepSeek-V2), or the sum of its best two (DeepSeek-V3)."
    )
    bias_step: float = setting(
        0.0,
        "Step by which an expert's bias, used only to choose experts, moves towards balance after each training step; "
        "0 for no bias.",
        AT_LEAST_0,
    )
    microbatch_loss: float = setting(0.0, "Coefficient of the balance loss over each microbatch's load.", AT_LEAST_0)
    sequence_loss: float = setting(0.0, "Coefficient of the balance loss within each sequence.", AT_LEAST_0)
    global_loss: float = setting(
        0.0, "Coefficient of the balance loss over all tokens of a step, with the previous step's shares.", AT_LEAST_0
    )
    z_loss: float = setting(0.0, "Coefficient of the mean square of the logits' log-sum-exp.", AT_LEAST_0)
    shared_size: int = setting(
        0, "Width inside the shared expert, which every token goes to; 0 for none.", Bounds(least=0, limit=WIDTH.limit)
    )
    shared_gate: bool = setting(False, "A sigmoid gate scales the shared expert's output (Qwen2-MoE).")
    num_dense_first: int = setting(0, "Dense layers at the start.", AT_LEAST_0)
    every: int = setting(1, "After those, only each n-th layer has experts.", AT_LEAST_1)
    dense_layers: tuple[int, ...] = setting((), "Further dense layers, by number.", AT_LEAST_0)

    def _check(self) -> None:
        if not self.num_experts:
            return
        refuse_divisor("experts.num_groups", self.num_groups, "experts.num_experts", self.num_experts)
        if self.num_active_groups > self.num_groups:
            raise ConfigError(
                f"experts.num_active_groups = {self.num_active_groups} is more than experts.num_groups = "
                f"{self.num_groups}; at most that is possible"
            )
        reachable = self.num_experts // self.num_groups * self.num_active_groups
        if self.num_active > reachable:
            raise ConfigError(
                f"experts.num_active = {self.num_active} is more than the {reachable} experts that a token can reach, "
                f"of experts.num_experts = {self.num_experts}; at most {reachable} are possible"
            )
        if self.shared_gate and not self.shared_size:
            raise ConfigError(
                "experts.shared_gate needs a shared expert, but experts.shared_size = 0; give experts.shared_size "
                "its width"
            )

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer of that number has experts, where a model has any."""
        beyond = layer - self.num_dense_first
        return beyond >= 0 and (beyond + 1) % self.every == 0 and layer not in self.dense_layers

    @property
    def has_losses(self) -> bool:
        """True if the router adds terms to the loss."""
        return any((self.microbatch_loss, self.sequence_loss, self.global_loss, self.z_loss))


@dataclass(frozen=True)
class ModelConfig(Settings, section="model"):
    """The decoder, such as Llama, Qwen2, Qwen3 or Mistral.

    Several settings may be left out; `vocabulary`, `key_heads` and `head_size` are the resulting values.

    >>> config = ModelConfig(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=2)
    >>> config.head_size, config.num_units
    (16, 6)
    """

    pretrained: str | None = field(
        default=None,
        kw_only=True,
        metadata=declared(
            "Folder of a Hugging Face model or a run whose weights training starts from; it decides the settings below."
        ),
    )
    native: Native = field(
        default="auto",
        kw_only=True,
        metadata=declared(
            "Run a Hugging Face model by Penstock's own layers (true), by transformers' (false), or by its own if it "
            "knows the family (auto).",
            is_newer=True,
        ),
    )
    vocab_size: int | None = setting(
        None, "Tokens of the vocabulary; left out, as many as the tokenizer has.", AT_LEAST_1
    )
    hidden_size: int = setting(128, "Width of the residual stream.", WIDTH)
    intermediate_size: int = setting(344, "Width inside an MLP.", WIDTH)
    num_layers: int = setting(
        4, "Decoder layers; each is two units, an attention block and an MLP block.", Bounds(least=1, limit=2**14)
    )
    num_heads: int = setting(4, "Query heads.", HEADS)
    num_kv_heads: int | None = setting(
        None, "Key and value heads, a divisor of num_heads; left out, as many as query heads.", HEADS
    )
    head_dim: int | None = setting(None, "Width of a head; left out, hidden_size / num_heads.", WIDTH)
    max_length: int = setting(2048, "The longest sequence, in tokens.", AT_LEAST_1)
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", ABOVE_0)
    norm_eps: float = setting(1e-5, "Added to the mean square in every norm.", ABOVE_0)
    qkv_bias: bool = setting(False, "Bias on the query, key and value projections (Qwen2).")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys (Qwen3).")
    tie_embeddings: bool = setting(False, "The head shares the embedding's weight.")
    sliding_window: int | None = setting(
        None,
        "Tokens that a token attends to, including itself (Mistral); left out, itself and all before it.",
        AT_LEAST_1,
    )
    num_predictions: int = setting(
        0,
        "Tokens beyond the next that training also predicts, each with one more layer (DeepSeek-V3).",
        Bounds(least=0, limit=2**10),
    )
    prediction_loss: float = setting(0.3, "Weight of the mean of these predictions' losses.", ABOVE_0)
    num_full_layers: int = setting(
        0, "Layers at the start that attend to all tokens despite sliding_window (Qwen2).", AT_LEAST_0
    )
    padding_token: int | None = field(
        default=None,
        kw_only=True,
        metadata=declared(
            "A token whose row of the embedding does not train by being read (pad_token_id of a Hugging Face model).",
            AT_LEAST_0,
            is_newer=True,
        ),
    )
    rope_scaling: RopeScaling = RopeScaling()
    experts: ExpertConfig = ExpertConfig()

    def _check(self) -> None:
        # A pretrained model's shape is read later, and may belong to settings that do not fit the defaults.
        if self.pretrained is None:
            self.check_shape()

    def check_shape(self) -> None:
        """Refuse sizes that exclude each other.

        Raises:
            ConfigError: the message names the settings and what would be possible.
        """
        if self.head_dim is None:
            whole, otherwise = self.hidden_size, ", or give model.head_dim"
            refuse_divisor("model.num_heads", self.num_heads, "model.hidden_size", whole, otherwise)
        refuse_divisor("model.num_kv_heads", self.key_heads, "model.num_heads", self.num_heads)
        if self.head_size % 2:
            raise ConfigError(
                f"model.head_dim = {self.head_size}: a head's width of {self.head_size} is odd; "
                "rotary positions turn pairs, so it must be even"
            )
        padding, size = self.padding_token, self.vocab_size
        if padding is not None and size is not None and padding >= size:
            raise ConfigError(f"model.padding_token = {padding} is no token of model.vocab_size = {size}")

    @property
    def vocabulary(self) -> int:
        """The number of tokens in the vocabulary.

        Raises:
            ConfigError: `vocab_size` is left to a tokenizer that has not been read.
        """
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is left out and no tokenizer decides it; give the number of tokens")
        return self.vocab_size

    @property
    def key_heads(self) -> int:
        """The number of key heads, and of value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """The width of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """The total width of all query heads."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """The total width of all key heads, and of all value heads."""
        return self.key_heads * self.head_size

    @property
    def num_units(self) -> int:
        """The number of units that stages are cut from: embedding, two a layer (one of transformers'), head."""
        return self.units_per_layer * self.num_layers + 2

    @property
    def units_per_layer(self) -> int:
        """Attention and MLP of Penstock's own layers are two; one of transformers' is whole."""
        return 1 if self.native is False else 2

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer of that number has experts instead of one MLP."""
        return self.experts.num_experts > 0 and self.experts.is_sparse(layer)

    def of_layer(self, number: int) -> "ModelConfig":
        """The configuration of the layer of that number, since layers may differ."""
        return replace(self, sliding_window=None, num_full_layers=0) if number < self.num_full_layers else self

    def whole(self, vocab_size: int) -> "ModelConfig":
        """Fill in every setting that was left out, so that equal shapes are equal objects.

        `vocab_size` is the tokenizer's, used if the settings leave it out.
        """
        rope = self.rope_scaling
        return replace(
            self,
            pretrained=None,
            native="auto",
            vocab_size=self.vocab_size or vocab_size,
            num_kv_heads=self.key_heads,
            head_dim=self.head_size,
            rope_scaling=rope if rope.kind is RopeKind.NONE else replace(rope, high=rope.upper),
        )

    def can_share(self, num_ranks: int) -> bool:
        """Return whether tensor-parallel ranks can share query heads and MLP columns evenly, and key heads whole."""
        larger, smaller = max(self.key_heads, num_ranks), min(self.key_heads, num_ranks)
        whole = self.num_heads % num_ranks == 0 and self.intermediate_size % num_ranks == 0
        return whole and larger % smaller == 0 and (self.vocab_size is None or self.vocab_size >= num_ranks)


@dataclass(frozen=True)
class AdapterConfig(Settings, section="adapter"):
    """LoRA adapters, trained in place of the model's own weights.

    Source: arXiv 2106.09685, section 4.1. Scaling by the root of the rank: arXiv 2312.03732.
    """

    rank: int | None = setting(
        None, "Rank of the adapters (LoRA); left out, the model itself is trained.", AT_LEAST_1, is_newer=True
    )
    alpha: float = setting(
        16.0, "Adapters' outputs are scaled by this number, divided by the rank.", ABOVE_0, is_newer=True
    )
    dropout: float = setting(0.0, "Dropout of the adapters' inputs.", FRACTION, is_newer=True)
    target_modules: tuple[str, ...] = setting(
        ("q_proj", "v_proj"),
        "The linear layers that get an adapter, by their ends of names in transformers.",
        is_newer=True,
    )
    rank_stabilised: bool = setting(False, "Divide by the root of the rank instead.", is_newer=True)
    pretrained: str | None = setting(
        None, "A folder in peft's format whose adapters the run begins with.", is_newer=True
    )

    @property
    def is_used(self) -> bool:
        return self.rank is not None or self.pretrained is not None
