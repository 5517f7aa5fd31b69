"""A sequence of generation: one prompt with what has been generated for it, from request to answer."""

import hashlib
import math
import struct
from array import array
from collections import Counter, abc
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # schedules load none but their own settings
    from penstock.settings import SamplingParams

NO_ROW = -1


class Token(NamedTuple):
    """A sampled token.

    log_prob: under the distribution it was drawn from. raw_log_prob: under the model's own, None unless requested.
    likeliest: the ids and log-probabilities of the likeliest tokens under the model's own, as many as requested.
    version: that of the weights it was drawn from.

    >>> Token(7, -0.5).raw_log_prob is None
    True
    """

    id: int
    log_prob: float = 0.0
    raw_log_prob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()
    version: int = 0


class Ending(Enum):
    """The reason why a sequence ended: an end token, its length, or a caller that stopped it (a stop string).

    NOT_FINITE: its logits were NaN or infinite, so its last token means nothing.

    >>> Ending("length") is Ending.LENGTH
    True
    """

    END_TOKEN = "end_token"
    LENGTH = "length"
    STOPPED = "stopped"
    NOT_FINITE = "not_finite"


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt with what has been generated for it, from request to answer.

    >>> from penstock import SamplingParams
    >>> one, other = Sequence.all_of([[5, 3]], [SamplingParams(max_new_tokens=2, num_samples=2)])
    >>> one.append(Token(7, -0.5))
    >>> one.tokens, one.ending
    ((7,), None)
    """

    # ---- the request

    #: its place among all sequences, and in the result
    number: int
    #: number of its prompt; samples of one prompt share it
    prompt: int
    #: number of this sample among those of its prompt
    sample: int
    #: token ids of the prompt
    prompt_tokens: abc.Sequence[int] = field(repr=False)
    #: the distribution that tokens are drawn from, and the conditions that end the answer
    params: "SamplingParams" = field(repr=False)
    #: identifies the sequence to the random numbers, whatever else is generated
    identity: int = field(default=0, repr=False)

    # ---- the answer

    #: None while the sequence is being generated
    ending: Ending | None = None
    #: a tensor [tokens, vocabulary], true for tokens that could not be drawn; None unless requested
    filter_mask: Any = field(default=None, repr=False)
    #: new tokens with their log-probabilities, in order
    generated: list[Token] = field(default_factory=list)

    # ---- the scheduler's notes

    #: ids of prompt and new tokens
    token_ids: list[int] = field(init=False, repr=False)
    #: row of the KV cache while it is computed; None while it waits and once it has ended
    row: int | None = field(default=None, repr=False)
    #: tokens to be read before the next one is sampled: those of the prompt, and new ones once the weights have changed
    num_to_read: int = field(init=False, repr=False)
    #: tokens in its row of the KV cache, counting those of batches in flight
    num_cached: int = field(default=0, repr=False)
    #: row that holds the beginning of this prompt, to be copied with the next batch
    source: int = field(default=NO_ROW, repr=False)

    # ---- the last stage's notes

    #: new tokens so far, where the next one's distribution depends on them
    drawn: list[int] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_tokens)
        self.num_to_read = len(self.token_ids)

    @classmethod
    def all_of(
        cls, prompts: abc.Sequence[abc.Sequence[int]], params: "abc.Sequence[SamplingParams]"
    ) -> "list[Sequence]":
        """Make the requested sequences in the order of the results; `params` has one entry for each prompt.

        An identity depends on the prompt, with what the answer is given to begin with, and on how many equal ones
        precede it, so the order of different prompts does not matter.
        """
        sequences: list[Sequence] = []
        seen = Counter[bytes]()
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            content = hashlib.blake2b(array("q", (*prompt, *own.begins_with)).tobytes(), digest_size=16).digest()
            for sample in range(own.num_samples):
                name = content + struct.pack("<QQ", seen[content], sample)
                identity = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
                sequences.append(cls(len(sequences), number, sample, prompt, own, identity))
            seen[content] += 1
        return sequences

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens, including an end token."""
        return tuple(token.id for token in self.generated)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """The log-probability of each new token, under the distribution it was drawn from.

        For a greedy choice that is the model's own distribution, after penalties and biases, without bad words and end
        tokens that come too early.
        """
        return tuple(token.log_prob for token in self.generated)

    @property
    def raw_log_probs(self) -> tuple[float, ...] | None:
        """The log-probability of each new token, under the model's own distribution; None unless requested."""
        if not self.params.raw_log_probs:
            return None
        return tuple(token.raw_log_prob for token in self.generated if token.raw_log_prob is not None)

    @property
    def top_log_probs(self) -> tuple[tuple[tuple[int, float], ...], ...] | None:
        """For each new token the likeliest tokens at its place, likeliest first, with their log-probabilities.

        These are under the model's own distribution. None unless requested.
        """
        return tuple(token.likeliest for token in self.generated) if self.params.top_log_probs else None

    @property
    def versions(self) -> tuple[int, ...]:
        """For each new token the version of the weights it was drawn from (`Engine.version`)."""
        return tuple(token.version for token in self.generated)

    @property
    def num_tokens(self) -> int:
        """The number of new tokens so far."""
        return len(self.generated)

    @property
    def last_token(self) -> int:
        """The newest token."""
        return self.generated[-1].id

    def append(self, token: Token) -> None:
        """Add a sampled token, which may end the sequence."""
        self.generated.append(token)
        self.token_ids.append(token.id)
        if not math.isfinite(token.log_prob):
            self.ending = Ending.NOT_FINITE
        elif token.id in self.params.end_tokens and len(self.generated) > len(self.params.begins_with):
            self.ending = Ending.END_TOKEN
        elif len(self.generated) == self.params.max_new_tokens:
            self.ending = Ending.LENGTH
