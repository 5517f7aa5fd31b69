"""What generation gives back.

Shapes: B sequences, L tokens of the longest answer, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.schedule import Ending


@dataclass(frozen=True, eq=False)
class Generated:
    """One answer: sample `sample` of prompt `prompt`.

    tokens: the new ones, an end token included. log_probs: of each under the distribution it was drawn from (greedy:
    the model's own, without the end tokens that came too early). raw_log_probs: of each under the model's own
    distribution. filter_mask: [tokens, V], true for what could not have been drawn.
    """

    prompt: int
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    raw_log_probs: tuple[float, ...] | None
    ending: Ending
    filter_mask: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Padded:
    """Answers side by side, [B, L] each: token ids int64, log-probabilities fp32 (0 after the end), and which count."""

    tokens: Tensor
    log_probs: Tensor
    valid: Tensor


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """All answers, by prompt and sample, the same on every rank of the pipeline, and what they took.

    wall_s: from the first header to the last. busy_s, num_forwards: of each pipeline rank.
    """

    sequences: tuple[Generated, ...]
    wall_s: float
    busy_s: tuple[float, ...]
    num_forwards: tuple[int, ...]
    num_rounds: int

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Generated]:
        return iter(self.sequences)

    def __getitem__(self, number: int) -> Generated:
        return self.sequences[number]

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def idle_share(self) -> float:
        """The share of the time in which a rank computed nothing, over all ranks of the pipeline."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s) if self.wall_s else 0.0

    def padded(self, pad_token: int | None = None) -> Padded:
        """The answers as tensors, filled up with `pad_token` on the right.

        Raises:
            ValueError: they are of different lengths, and no pad token is given.
        """
        lengths = [len(sequence.tokens) for sequence in self.sequences]
        longest = max(lengths, default=0)
        if pad_token is None and any(length < longest for length in lengths):
            raise ValueError(
                f"the answers have {min(lengths)} to {longest} tokens; give a pad_token to fill them up with"
            )
        tokens = torch.full((len(lengths), longest), pad_token or 0, dtype=torch.int64)
        log_probs = torch.zeros(len(lengths), longest)
        for row, sequence in enumerate(self.sequences):
            tokens[row, : lengths[row]] = torch.tensor(sequence.tokens, dtype=torch.int64)
            log_probs[row, : lengths[row]] = torch.tensor(sequence.log_probs)
        valid = torch.arange(longest)[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]
        return Padded(tokens, log_probs, valid)
