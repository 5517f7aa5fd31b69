"""The answers of a generation, and the text of each as its tokens come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock import schedule

NOT_FINITE = "are not finite: a weight or an activation is NaN or infinite, so no token can be drawn"
"""Ends the error message about logits from which no token can be drawn."""


@dataclass(frozen=True, eq=False)
class Padded:
    """Answers side by side, [B, L] each: token ids int64, log-probabilities fp32 (0 after the end), and which count."""

    tokens: Tensor
    log_probs: Tensor
    valid: Tensor


def idle_share(wall_s: float, busy_s: Sequence[float]) -> float | None:
    """The share of the time `wall_s` in which ranks were not busy, on average; None without any rank's time."""
    if not busy_s:
        return None
    return 1.0 - sum(busy_s) / (len(busy_s) * wall_s) if wall_s else 0.0


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """All answers by prompt and sample, equal on every rank of the pipeline, and the time that they took.

    After an interruption, unfinished answers have no ending, and the figures cover the time since the last one. wall_s:
    from the first header to the last. busy_s, num_forwards: of each pipeline rank; `busy_s` is empty on a GPU, where
    only times of launching are known.
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
    def idle_share(self) -> float | None:
        """The fraction of the time in which a rank computed nothing, over all ranks of the pipeline; None on a GPU."""
        return idle_share(self.wall_s, self.busy_s)

    def padded(self, pad_token: int | None = None) -> Padded:
        """The answers as tensors, padded on the right. Raises: ValueError if lengths differ without a pad token."""
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


# ---- The text of an answer as its tokens come, up to a stop string


@runtime_checkable
class Decodes(Protocol):
    """A decoder of token ids, such as a tokenizer of transformers."""

    def decode(self, tokens: list[int], /) -> Any: ...


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than this; a broken one is shown after that many.
_MAX_HELD_TOKENS = 8


@dataclass(eq=False)
class AnswerText:
    """The text of one answer, token by token, up to the first stop string.

    tokenizer: None leaves the text empty. stop: strings that end the answer and are cut off.
    """

    #: None if answers are shown as token ids
    tokenizer: Decodes | None
    #: strings that end the answer
    stop: Sequence[str] = ()
    #: the text so far
    text: str = field(default="", init=False)
    #: True once the text has reached one of them
    stopped: bool = field(default=False, init=False)
    #: the tokens so far
    _tokens: list[int] = field(default_factory=list, init=False)
    #: tokens are decoded in their context, from the last position at which text and tokens ended together
    _begin: int = field(default=0, init=False)
    _end: int = field(default=0, init=False)
    #: characters of the text that have been shown
    _shown: int = field(default=0, init=False)

    def add(self, token: int) -> str:
        """Add a token; returns the text that can be shown from now on."""
        if self.tokenizer is None or self.stopped:
            return ""
        # The token is added after decoding, since a tokenizer may fail.
        before = self.tokenizer.decode(self._tokens[self._begin : self._end])
        now = self.tokenizer.decode([*self._tokens[self._begin :], token])
        self._tokens.append(token)
        num_held = len(self._tokens) - self._end
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and num_held < _MAX_HELD_TOKENS):
            return ""
        self.text += now[len(before) :]
        self._begin, self._end = self._end, len(self._tokens)
        self._end_at_stop()
        # The end of the text may begin a stop string.
        longest = 0 if self.stopped else min(max(map(len, self.stop), default=1) - 1, len(self.text))
        ends = (length for length in range(longest, 0, -1) if any(s.startswith(self.text[-length:]) for s in self.stop))
        return self._show(next(ends, 0))

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        if self.tokenizer is not None:
            before = self.tokenizer.decode(self._tokens[self._begin : self._end])
            self.text += self.tokenizer.decode(self._tokens[self._begin :])[len(before) :]
            self._end_at_stop()
        return self._show(0)

    def _end_at_stop(self) -> None:
        starts = [start for stop in self.stop if (start := self.text.find(stop)) >= 0]
        if starts:
            self.text, self.stopped = self.text[: min(starts)], True

    def _show(self, num_held: int) -> str:
        shown, self._shown = self._shown, max(self._shown, len(self.text) - num_held)
        return self.text[shown : self._shown]
