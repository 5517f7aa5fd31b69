"""The shape of a mixture of experts: Mixtral's, Qwen's and DeepSeek's are settings of one.

No torch here: a configuration is checked before anything heavy is imported.
"""

import enum
from dataclasses import dataclass


class Scores(enum.Enum):
    """How a router's logits become scores: SOFTMAX over all experts, or SIGMOID of each by itself."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(enum.Enum):
    """What decides between groups of experts: the BEST score in the group, or the sum of its BEST_TWO."""

    BEST = "best"
    BEST_TWO = "best-two"


@dataclass(frozen=True)
class ExpertConfig:
    """How tokens choose experts, what the experts are, and which layers have them.

    A token goes to the `num_active` experts of the highest scores, and to nothing is any limit of capacity: none is
    dropped. Balance is kept by added losses, by a bias that adds none, or by both.

    Args:
        num_experts: experts of a layer.
        num_active: experts that a token goes to.
        intermediate_size: width inside an expert.
        scores: what becomes of the router's logits.
        normalise: a token's weights are divided by their sum.
        scaling_factor: what weights are multiplied by at last.
        num_groups: equal groups of neighbouring experts; a token keeps to `num_active_groups` of them.
        num_active_groups: those groups.
        group_score: what decides between groups.
        bias_step: by how much an expert's bias, which counts for the choice alone, moves after every step, up where
            it got less than the mean; 0 for no bias.
        microbatch_loss: coefficient of the balance of a microbatch's tokens.
        sequence_loss: coefficient of the balance within each sequence.
        global_loss: coefficient of the balance over all tokens of a step; shares are those of the step before, so
            that no rank waits for another.
        z_loss: coefficient of the mean square of the logits' log-sum-exp.
        shared_size: width inside the shared expert, which every token goes to; 0 for none.
        shared_gate: the shared expert's output is scaled, token by token, by a sigmoid of its own.
        num_dense_first: layers at the start that have one MLP instead.
        every: of the layers after them only each n-th has experts, the others one MLP.
        dense_layers: further layers, by number, that have one MLP.

    Raises:
        ValueError: naming the setting, its value and what would be possible.
    """

    num_experts: int
    num_active: int
    intermediate_size: int
    scores: Scores = Scores.SOFTMAX
    normalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_active_groups: int = 1
    group_score: GroupScore = GroupScore.BEST
    bias_step: float = 0.0
    microbatch_loss: float = 0.0
    sequence_loss: float = 0.0
    global_loss: float = 0.0
    z_loss: float = 0.0
    shared_size: int = 0
    shared_gate: bool = False
    num_dense_first: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_active", "intermediate_size", "num_groups", "num_active_groups", "every"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: it must be at least 1")
        for name in (
            "bias_step",
            "microbatch_loss",
            "sequence_loss",
            "global_loss",
            "z_loss",
            "shared_size",
            "num_dense_first",
        ):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: it must be at least 0")
        _require(self.scaling_factor > 0, f"scaling_factor={self.scaling_factor}: it must be above 0")
        _require(
            self.num_active <= self.num_experts,
            f"num_active={self.num_active} is more than num_experts={self.num_experts}: "
            f"a token can go to at most {self.num_experts}",
        )
        divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
        _require(
            self.num_groups in divisors,
            f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}: possible are {divisors}",
        )
        _require(
            self.num_active_groups <= self.num_groups,
            f"num_active_groups={self.num_active_groups} is more than num_groups={self.num_groups}",
        )
        reachable = self.num_experts // self.num_groups * self.num_active_groups
        _require(
            self.num_active <= reachable,
            f"num_active={self.num_active} is more than the {reachable} experts of "
            f"num_active_groups={self.num_active_groups} groups: at most {reachable} are possible",
        )
        _require(
            self.shared_size > 0 or not self.shared_gate,
            f"shared_gate={self.shared_gate} with shared_size=0: there is no shared expert to gate; give its width",
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        beyond = layer - self.num_dense_first
        return beyond >= 0 and (beyond + 1) % self.every == 0 and layer not in self.dense_layers

    @property
    def has_losses(self) -> bool:
        """Whether the router adds terms to the loss."""
        return any((self.microbatch_loss, self.sequence_loss, self.global_loss, self.z_loss))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
