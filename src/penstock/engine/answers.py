"""What the two ends of the ring know of a generation: which sequences are wanted, how they are drawn, what they become.

Shapes: S sampled sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.generated import Generated
from penstock.model import Draw, SamplingParams, draw_tokens
from penstock.runtime import NUMBERS_PER_TOKEN, Lead
from penstock.schedule import Conductor, Ending, Piece, Wish

Prompts = Sequence[Sequence[int]]
OnToken = Callable[[int, int], object]
OnAnswer = Callable[[int, Generated], object]


@dataclass(frozen=True)
class Listeners:
    """Who is told, on the rank of the first stage, of each new token and of each answer that has ended."""

    on_token: OnToken | None = None
    on_answer: OnAnswer | None = None


@dataclass(frozen=True)
class Request:
    """One sequence: which sample of which prompt, and what identifies it in the random numbers."""

    prompt: int
    sample: int
    identity: int
    params: SamplingParams

    @classmethod
    def all_of(cls, prompts: Prompts, params: Sequence[SamplingParams]) -> list[Request]:
        """In the order of the results. Equal prompts are told apart by how many came before, so that the order in
        which different ones are given does not matter."""
        requests, seen = [], Counter[bytes]()
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            content = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
            for sample in range(own.num_samples):
                told = content + struct.pack("<QQ", seen[content], sample)
                identity = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
                requests.append(cls(number, sample, identity, own))
            seen[content] += 1
        return requests

    def generated(self, values: Tensor, ending: Ending, dropped: Tensor | None) -> Generated:
        """The sequence, from its numbers [tokens, 3] as `Drawing.draw` gives them."""
        log_probs, raw = (tuple(values[:, i].contiguous().view(torch.float64).tolist()) for i in (1, 2))
        return Generated(
            prompt=self.prompt,
            sample=self.sample,
            tokens=tuple(values[:, 0].tolist()),
            log_probs=log_probs,
            raw_log_probs=raw if self.params.raw_log_probs else None,
            ending=ending,
            filter_mask=dropped,
        )

    def wish(self, prompts: Prompts) -> Wish:
        ends = frozenset(self.params.end_tokens)
        return Wish(self.prompt, len(prompts[self.prompt]), self.params.max_new_tokens, ends)


class Leading:
    """On the rank of the first stage: what the sequences have come to."""

    def __init__(
        self,
        prompts: Prompts,
        requests: list[Request],
        conductor: Conductor,
        listeners: Listeners,
        goes_on: Callable[[bool], bool] | None = None,
    ) -> None:
        self.error: Exception | None = None
        self._requests, self._listeners = requests, listeners
        self._values: list[list[Sequence[int]]] = [[] for _ in requests]
        self.lead = Lead(conductor, prompts, self._hear, goes_on)

    def _hear(self, sequence: int, numbers: Sequence[int]) -> None:
        self._values[sequence].append(numbers)
        if self.error is not None:
            return
        conductor, on_token, on_answer = self.lead.conductor, self._listeners.on_token, self._listeners.on_answer
        try:
            if on_token is not None and on_token(sequence, numbers[0]):
                conductor.stop([sequence])
            ending = conductor.endings[sequence]
            if on_answer is not None and ending is not None:
                on_answer(sequence, self._requests[sequence].generated(self._numbers(sequence), ending, None))
        except Exception as error:
            # It waits for the end of the ring, so that no other rank is left alone with its messages.
            self.error = error
            conductor.stop(range(len(self._values)))

    def _numbers(self, sequence: int) -> Tensor:
        """Of its tokens so far, [tokens, 3] int64."""
        return torch.tensor(self._values[sequence], dtype=torch.int64).view(-1, NUMBERS_PER_TOKEN)

    def told(self) -> dict[str, Any]:
        endings = self.lead.conductor.endings
        return {
            "values": [self._numbers(sequence) for sequence in range(len(self._values))],
            "endings": [ending.value for ending in endings if ending is not None],
        }


class Drawing:
    """On the rank of the last stage: draws tokens, and keeps where asked which could not have been drawn."""

    def __init__(self, prompts: Prompts, requests: list[Request]) -> None:
        self._prompts, self._requests = prompts, requests
        self._masks: list[list[Tensor]] = [[] for _ in requests]

    def draw(self, logits_SV: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """[S, 3] int64: tokens, and the bits of their log-probabilities in fp64."""
        if not pieces:
            return torch.zeros(0, NUMBERS_PER_TOKEN, dtype=torch.int64)
        draws = []
        for piece in pieces:
            request = self._requests[piece.sequence]
            position = piece.end - len(self._prompts[request.prompt])
            draws.append(Draw(request.params, request.identity, position))
        drawn = draw_tokens(logits_SV, draws)
        if drawn.dropped_SV is not None:
            for piece, dropped_V in zip(pieces, drawn.dropped_SV, strict=True):
                self._masks[piece.sequence].append(dropped_V)
        bits = (x.double().view(torch.int64) for x in (drawn.log_probs, drawn.raw_log_probs))
        return torch.stack([drawn.tokens, *bits], -1).cpu()

    def told(self) -> list[Tensor]:
        return [torch.stack(masks) if masks else torch.empty(0, 0, dtype=torch.bool) for masks in self._masks]


def answers(requests: Sequence[Request], told: dict[str, Any], masks: Sequence[Tensor]) -> tuple[Generated, ...]:
    """The answers from what `Leading` and, where filter masks are asked for, `Drawing` have told."""
    found = []
    for number, request in enumerate(requests):
        mask = masks[number] if request.params.filter_mask else None
        found.append(request.generated(told["values"][number], Ending(told["endings"][number]), mask))
    return tuple(found)
