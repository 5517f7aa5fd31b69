"""The way in which answers are generated, and the answers.

Shapes: B sequences, L tokens of the longest answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import schedule
from penstock.engine.answer_text import Decodes
from penstock.runtime import DecodeForm
from penstock.schedule import RingShape
from penstock.settings import RingConfig


@dataclass(frozen=True)
class GenerateOptions(RingConfig):
    """The way in which sequences go round the ring.

    No option changes a token, but that another `prefill_tokens` cuts prompts otherwise, which may round attention
    otherwise unless the engine is reproducible.

    Args:
        num_slots: groups of sequences under way at the same time; None for one a pipeline rank.
        rows_per_slot: sequences of a slot; None for all there are, at most `max_rows_per_slot`.
        max_rows_per_slot: that limit; each row has a place in the KV cache.
        prefill_tokens: prompt tokens that a slot reads in a round; prompts are cut at its multiples.
        refill: gives a free row to the next sequence at once; else only when all rows of its slot are free.
        packed: makes a copy of the weights for the time of the call, in the order in which they are read fastest; for
            fp32 on CPUs, where reading them takes most of the time. Elsewhere no copy is made.
        longest_first: begins with the sequences that may become longest; else all begin in the order given.
        decode: how rows compute one token each: "live-rows", those that are live alone; "all-rows", over shapes that
            never change; "graphs", the same, captured where there is CUDA. None for graphs where there is CUDA and for
            the live rows elsewhere. A model that cannot decode over fixed shapes (experts, layers of other
            libraries or shared by several ranks) decodes its live rows, and under autocast nothing is captured.
        skip: answers, by their number in the result, that are not made; they come back stopped and without a token.
            So a call can be continued whose other answers are then what they would have been.
        tokenizer: makes the text in which stop strings are looked for; that of `SamplingParams.stop` needs one.

    Raises:
        ValueError: a count is below one, or the form is unknown.

    >>> GenerateOptions(num_slots=2, decode="live-rows").refill
    True
    """

    refill: bool = True
    packed: bool = True
    longest_first: bool = True
    decode: DecodeForm | str | None = None
    skip: frozenset[int] = frozenset()
    tokenizer: Decodes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.decode, str) and self.decode not in [form.value for form in DecodeForm]:
            forms = ", ".join(form.value for form in DecodeForm)
            raise ValueError(f"decode={self.decode!r}: possible are {forms}")

    def form(self, device: torch.device) -> DecodeForm:
        """The form of decoding on this device."""
        if self.decode is None:
            return DecodeForm.GRAPHS if device.type == "cuda" else DecodeForm.LIVE_ROWS
        return DecodeForm(self.decode)

    def shape(self, num_sequences: int, num_ranks: int) -> RingShape:
        """Slots and rows for this number of sequences."""
        num_slots = self.num_slots or num_ranks
        even = max(1, -(-num_sequences // num_slots))
        return RingShape(num_slots, self.rows_per_slot or min(even, self.max_rows_per_slot), self.prefill_tokens)


@dataclass(frozen=True, eq=False)
class Padded:
    """Answers side by side, [B, L] each: token ids int64, log-probabilities fp32 (0 after the end), and which count."""

    tokens: Tensor
    log_probs: Tensor
    valid: Tensor


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """All answers, by prompt and sample, the same on every rank of the pipeline, and what they took.

    Of a call that was interrupted, unfinished ones have no ending. wall_s: from the first header to the last. busy_s,
    num_forwards: of each pipeline rank. After an interruption these are of the part since then.
    """

    sequences: tuple[schedule.Sequence, ...]
    wall_s: float
    busy_s: tuple[float, ...]
    num_forwards: tuple[int, ...]
    num_rounds: int

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[schedule.Sequence]:
        return iter(self.sequences)

    def __getitem__(self, number: int) -> schedule.Sequence:
        return self.sequences[number]

    @property
    def is_complete(self) -> bool:
        """True if every answer has ended; after an interruption, `Engine.resume` goes on with those that have not."""
        return all(sequence.ending is not None for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def idle_share(self) -> float:
        """The fraction of the time in which a rank computed nothing, over all ranks of the pipeline."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s) if self.wall_s else 0.0

    def padded(self, pad_token: int | None = None) -> Padded:
        """The answers as tensors, filled up with `pad_token` on the right.

        Raises:
            ValueError: they are of different lengths, and no pad token is given.
        """
        lengths = [sequence.num_tokens for sequence in self.sequences]
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
