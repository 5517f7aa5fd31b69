"""Settings of a mixture of experts, which cover Mixtral's, Qwen's and DeepSeek's."""

from dataclasses import dataclass

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    WIDTH,
    Bounds,
    ConfigError,
    Settings,
    refuse_divisor,
    setting,
)
from penstock.settings.types import NamedValue


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
