"""The options of a generation: how sequences go round the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from penstock.engine.generation.answers import Decodes
from penstock.runtime import DecodeForm
from penstock.schedule import RingShape
from penstock.settings import RingConfig

_USUAL_ROWS = 16


@dataclass(frozen=True)
class GenerateOptions(RingConfig):
    """The options of `Engine.generate`: how sequences go round the ring.

    No option changes a token, with one exception: `prefill_tokens` cuts prompts, which may change the rounding of
    attention unless the engine is reproducible.

    Args:
        num_slots: groups of sequences under way at the same time; None for one per pipeline rank.
        rows_per_slot: sequences of a slot; None for all sequences, at most `max_rows_per_slot`.
        max_rows_per_slot: limit of `rows_per_slot`; each row has a place in the KV cache. None for 16 on a CPU, and for
            as many as the free memory of a GPU has room for.
        prefill_tokens: prompt tokens that a slot reads in a round; prompts are cut at multiples of it.
        refill: gives a free row to the next sequence at once; False waits until all rows of the slot are free.
        packed: copies fp32 weights on a CPU for the time of the call, in the order in which they are read fastest.
        longest_first: begins with the sequences that may become longest; False keeps the order of the prompts.
        decode: the rows that compute a token each: "live-rows"; "all-rows", whose shapes never change; or "graphs",
            all rows in CUDA graphs. None chooses graphs on CUDA and live rows elsewhere. A model that cannot decode
            fixed shapes (experts, other libraries' layers, layers shared by several ranks) decodes its live rows, and
            under autocast nothing is captured.
        skip: numbers of answers in the result that are not made: they come back stopped, without a token, and change no
            other answer. So a call can be made again for the rest.
        tokenizer: makes the text in which the stop strings of `SamplingParams.stop` are looked for.

    Raises: ValueError for a count below one, or an unknown form of decoding.

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
        return DecodeForm(self.decode or ("graphs" if device.type == "cuda" else "live-rows"))

    def shape(self, num_sequences: int, num_ranks: int, room: int | None = None) -> RingShape:
        """Slots and rows for this number of sequences. room: the rows that memory has room for, where it is known."""
        num_slots = self.num_slots or num_ranks
        even = max(1, -(-num_sequences // num_slots))
        most = self.max_rows_per_slot or (_USUAL_ROWS if room is None else max(1, room // num_slots))
        return RingShape(num_slots, self.rows_per_slot or min(even, most), self.prefill_tokens)
