"""How rotary frequencies are stretched, so that a model reads texts longer than those it was first trained on."""

import enum
import math
from dataclasses import dataclass


class RopeKind(enum.Enum):
    """Ways to stretch; the values are Hugging Face's names.

    LINEAR divides every frequency. LLAMA3 divides low ones and leaves high ones, YARN does so too and sharpens
    attention besides.
    """

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True)
class RopeScaling:
    """One way to stretch, with what it needs.

    Args:
        kind: which way.
        factor: by how much, at most.
        original_length: tokens of the longest text before stretching; LLAMA3 and YARN count turns over it.
        low: LLAMA3: a frequency of fewer turns is divided by the factor; YARN: the same, there called beta_slow.
        high: a frequency of more turns is left alone; for YARN called beta_fast.
        attention_factor: YARN: what cosines and sines are multiplied by; None for 0.1 log(factor) + 1.
        truncate: YARN: the ends of its ramp are rounded outwards to whole pairs.

    Raises:
        ValueError: naming the setting, its value and what would be possible.
    """

    kind: RopeKind
    factor: float
    original_length: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope factor {self.factor} shortens what the model reads; it must be at least 1")
        if self.kind is not RopeKind.LINEAR and self.original_length < 1:
            raise ValueError(
                f"rope scaling {self.kind.value} needs the original length, at least 1, not {self.original_length}"
            )
        if not 0 < self.low < self.high:
            raise ValueError(f"rope scaling takes 0 < low < high, not low={self.low} and high={self.high}")

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by. Source: Peng et al. 2023 (YaRN), section 3.4."""
        if self.kind is not RopeKind.YARN:
            return 1.0
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor
