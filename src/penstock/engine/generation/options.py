"""The options of a generation: how sequences go round the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from penstock.engine.generation.answers import Decodes
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
    decode: DecodeForm | Literal["live-rows", "all-rows", "graphs"] | None = None
    skip: frozenset[int] = frozenset()
    tokenizer: Decodes | None = None

    def form(self, device: torch.device) -> DecodeForm:
        """The form of decoding on this device."""
        return DecodeForm(self.decode or ("graphs" if device.type == "cuda" else "live-rows"))

    def shape(self, num_sequences: int, num_ranks: int) -> RingShape:
        """Slots and rows for this number of sequences."""
        num_slots = self.num_slots or num_ranks
        even = max(1, -(-num_sequences // num_slots))
        return RingShape(num_slots, self.rows_per_slot or min(even, self.max_rows_per_slot), self.prefill_tokens)
