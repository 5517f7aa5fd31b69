"""The way in which answers are generated, the answers with their text, and checks of what is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock import schedule
from penstock.model import Limits
from penstock.runtime import DecodeForm, Stage
from penstock.schedule import RingShape
from penstock.settings import RingConfig, SamplingParams
from penstock.settings.declare import check_argument, mismatch

# ---- The way in which answers are generated, and the answers


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


# ---- The text of an answer as its tokens come, up to a stop string


@runtime_checkable
class Decodes(Protocol):
    """Anything that makes text of token ids, such as a tokenizer of transformers."""

    def decode(self, tokens: list[int], /) -> Any: ...


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than this; a broken one is shown after that many.
_MAX_HELD_TOKENS = 8


@dataclass(eq=False)
class AnswerText:
    """The text of one answer, token by token.

    tokenizer: None leaves the text empty. stop: texts of which the first to appear ends the answer and is cut off.
    """

    #: None if answers are shown as token ids
    tokenizer: Decodes | None
    #: the texts that end it
    stop: Sequence[str] = ()
    #: the text so far
    text: str = field(default="", init=False)
    #: True once it holds one of the texts that end it
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
        # Added once it has been decoded, since a tokenizer may fail.
        before = self.tokenizer.decode(self._tokens[self._begin : self._end])
        now = self.tokenizer.decode([*self._tokens[self._begin :], token])
        self._tokens.append(token)
        num_held = len(self._tokens) - self._end
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and num_held < _MAX_HELD_TOKENS):
            return ""
        self.text += now[len(before) :]
        self._begin, self._end = self._end, len(self._tokens)
        self._cut()
        # The end of the text may begin a stop string.
        longest = 0 if self.stopped else min(max(map(len, self.stop), default=1) - 1, len(self.text))
        ends = (length for length in range(longest, 0, -1) if any(s.startswith(self.text[-length:]) for s in self.stop))
        return self._show(next(ends, 0))

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        if self.tokenizer is not None:
            before = self.tokenizer.decode(self._tokens[self._begin : self._end])
            self.text += self.tokenizer.decode(self._tokens[self._begin :])[len(before) :]
            self._cut()
        return self._show(0)

    def _cut(self) -> None:
        places = [place for stop in self.stop if (place := self.text.find(stop)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _show(self, num_held: int) -> str:
        shown, self._shown = self._shown, max(self._shown, len(self.text) - num_held)
        return self.text[shown : self._shown]


# ---- Checks of what a generation is asked for: prompts, their parameters, and answers to skip


Prompts = Sequence[Sequence[int]]


def checked_prompts(
    prompts: Any, params: Any, stages: Sequence[Stage], limits: Limits | None
) -> tuple[Prompts, list[SamplingParams]]:
    """The prompts as lists, and one of `params` for each. Raises: ValueError for what cannot be generated."""
    check_argument("prompts", prompts, Sequence)
    token_lists: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        check_argument(name := f"prompts[{number}]", prompt, Sequence)
        tokens = prompt.tolist() if isinstance(prompt, Tensor) else prompt
        try:
            token_lists.append(list(map(index, tokens)))
        except TypeError:
            raise ValueError(mismatch(name, list(tokens), Sequence[int])) from None
    check_argument("params", params, SamplingParams | Sequence[SamplingParams] | None)
    params = (
        [params or SamplingParams()] * len(token_lists) if isinstance(params, SamplingParams | None) else list(params)
    )
    if len(params) != len(token_lists):
        raise ValueError(
            f"{len(params)} SamplingParams were given for {len(token_lists)} prompts; give one, or one for each"
        )
    for stage in stages:
        stage.check_cached()
    check_prompts(token_lists, params, limits)
    return token_lists, params


def check_prompts(
    prompts: Prompts, params: Sequence[SamplingParams], limits: Limits | None, names: Sequence[str] | None = None
) -> None:
    """Refuse prompts that a model of these limits cannot continue; None where the limits are not known.

    names: what each prompt is called in messages; left out, they count from 0.

    Raises:
        ValueError: naming the prompt, or the setting, and what would be possible.
    """
    for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        name = f"prompt {number}" if names is None else names[number]
        if not prompt:
            raise ValueError(f"{name} is empty; it needs at least one token to begin with")
        if min(prompt) < 0:
            raise ValueError(f"{name} holds the token {min(prompt)}; tokens count from 0")
        if limits is None:
            continue
        known = f"the model knows 0 to {limits.vocab_size - 1}"
        if max(prompt) >= limits.vocab_size:
            raise ValueError(f"{name} holds the token {max(prompt)}; {known}")
        named = {
            "end_tokens": sampling.end_tokens,
            "begins_with": sampling.begins_with,
            "logit_bias": tuple(token for token, _ in sampling.biases),
            "bad_words": tuple(token for word in sampling.bad_words for token in word),
        }
        for setting, tokens in named.items():
            if max(tokens, default=0) >= limits.vocab_size:
                raise ValueError(f"{setting} holds the token {max(tokens)}; {known}")
        if sampling.top_log_probs > limits.vocab_size:
            raise ValueError(f"top_log_probs={sampling.top_log_probs}: the model knows {limits.vocab_size} tokens")
        if len({word[0] for word in sampling.bad_words if len(word) == 1}) >= limits.vocab_size:
            raise ValueError("bad_words hold every token alone, so none could be drawn; leave some out")
        if sampling.min_new_tokens and len(set(sampling.end_tokens)) >= limits.vocab_size:
            raise ValueError(
                f"min_new_tokens={sampling.min_new_tokens}: every token is an end token, none could be drawn"
            )
        longest, most = limits.max_length, f"the model's max_length={limits.max_length}"
        if limits.max_generated_length is not None:
            longest = limits.max_generated_length
            most = f"{longest}, where the model's rotary factors change for all tokens before (longrope)"
        if len(prompt) + sampling.max_new_tokens > longest:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and with max_new_tokens={sampling.max_new_tokens} more it would "
                f"pass {most}"
            )
