"""How an engine runs a model: plain, frozen, checked once."""

import enum
from dataclasses import dataclass, field

import torch

from penstock.engine.optimizer import OptimizerConfig
from penstock.engine.schedules import ScheduleChoice
from penstock.model import ContextForm
from penstock.runtime import Pairs


class Precision(enum.Enum):
    """FP32; BF16 and FP16: 16-bit parameters with fp32 masters (FP16 with a loss scaler); BF16_AUTOCAST: fp32
    parameters, forwards under autocast."""

    FP32 = "fp32"
    FP64 = "fp64"
    BF16 = "bf16"
    BF16_AUTOCAST = "bf16-autocast"
    FP16 = "fp16"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return {
            Precision.FP64: torch.float64,
            Precision.BF16: torch.bfloat16,
            Precision.FP16: torch.float16,
        }.get(self, torch.float32)


@dataclass(frozen=True)
class EngineOptions:
    """What does not belong to the model or the layout.

    Args:
        schedule: which schedule to run; a name alone will do.
        cut: units of each stage, by hand; None for the cut with the fastest slowest rank.
        measure_lengths: lengths of a typical microbatch's sequences: units are measured on them before the cut, on the
            first rank, and `auto` searches an order for their times; None for the units' estimated work.
        seed: decides the initial weights.
        precision: dtype of parameters and compute.
        recompute: whether each unit's activations are computed again in backward ("full"), or only those of the
            layers given by number, or none.
        optimizer: AdamW's settings and schedules.
        attention: how context-parallel ranks attend to each other's tokens.
        device: "cpu", "cuda" or "auto" (a GPU if there is one).
        pairs: how fused pairs of a forward and a backward run: overlapped or not, and who is told of their halves.
        timeout_s: for how long a rank waits for a peer before it says so and ends.
        learns: whether it is to train. An engine that only scores and generates keeps weights alone: no gradients, no
            fp32 masters and no state of an optimizer.
    """

    schedule: ScheduleChoice | str = "1f1b"
    cut: tuple[int, ...] | None = None
    measure_lengths: tuple[int, ...] | None = None
    seed: int = 0
    precision: Precision = Precision.FP32
    recompute: str | tuple[int, ...] = "none"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    attention: ContextForm = ContextForm.RING
    device: str = "auto"
    pairs: Pairs = field(default_factory=Pairs)
    timeout_s: float = 600.0
    learns: bool = True

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {self.timeout_s}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', not {self.device!r}")
        if isinstance(self.recompute, str) and self.recompute not in ("none", "full"):
            raise ValueError(f"recompute must be 'none', 'full' or numbers of layers, not {self.recompute!r}")

    @property
    def choice(self) -> ScheduleChoice:
        """The schedule, whichever way it was given."""
        return ScheduleChoice(self.schedule) if isinstance(self.schedule, str) else self.schedule
