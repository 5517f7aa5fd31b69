"""The settings of generation: the tokens that are drawn, the end of a sequence, and the rows that go round."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    ConfigError,
    Settings,
    TableValue,
    setting,
)

# As in OpenAI's API, from which the two penalties come.
PENALTY = Bounds(least=-2, most=2)


@dataclass(frozen=True)
class RingConfig(Settings, section="generate"):
    """The sequences that go round the ring of stages together; no setting changes a token.

    >>> RingConfig(rows_per_slot=4).prefill_tokens
    512
    """

    num_slots: int | None = setting(
        None, "Groups of answers under way at the same time; left out, as many as stages.", AT_LEAST_1
    )
    rows_per_slot: int | None = setting(None, "Answers of a slot; left out, all there are, up to a limit.", AT_LEAST_1)
    max_rows_per_slot: int | None = setting(
        None, "That limit; left out, 16, and for `generate` on a GPU what its free memory has room for.", AT_LEAST_1
    )
    prefill_tokens: int = setting(
        512, "Prompt tokens that a slot reads in a round; prompts are cut at its multiples.", AT_LEAST_1
    )


@dataclass(frozen=True)
class LogitBias(TableValue):
    """Numbers that are added to the logits of some tokens.

    >>> LogitBias.read({5: -1}).by_token
    ((5, -1.0),)
    """

    by_token: tuple[tuple[int, float], ...] = ()

    @classmethod
    def read(cls, table: Mapping[Any, Any]) -> Self:
        """Make it of a table from token ids to numbers. Raises: ConfigError for anything else."""
        found = {}
        for token, bias in table.items():
            is_number = isinstance(bias, int | float) and abs(bias) < float("inf")
            if not str(token).isdecimal() or not is_number:
                raise ConfigError(
                    f"sampling.logit_bias: {token!r} = {bias!r} is not possible; give token ids and finite numbers"
                )
            found[int(token)] = float(bias)
        return cls(tuple(sorted(found.items())))

    def table(self) -> dict[str, Any]:
        """The table from which `read` makes an equal object."""
        return {str(token): bias for token, bias in self.by_token}


@dataclass(frozen=True)
class SamplingParams(Settings, section="sampling"):
    """The distribution that tokens are drawn from, and when an answer ends.

    >>> SamplingParams(temperature=0).greedy
    True
    """

    max_new_tokens: int = setting(64, "Tokens of an answer, at most.", AT_LEAST_1)
    min_new_tokens: int = setting(0, "No end token is drawn before the answer has as many tokens.", AT_LEAST_0)
    temperature: float = setting(1.0, "Divides the logits; 0 takes the likeliest token (greedy).", AT_LEAST_0)
    top_k: int | None = setting(
        None,
        "Draw from the k likeliest tokens, ties included; 0, from all.",
        AT_LEAST_0,
    )
    top_p: float = setting(
        1.0,
        "Draw from the likeliest tokens that together have this probability; 1, from all.",
        Bounds(above=0, most=1),
    )
    chained: bool = setting(False, "Apply top_p to the tokens that top_k leaves, not to the whole distribution.")
    min_p: float = setting(
        0.0, "Draw from tokens with at least this share of the likeliest one's probability.", Bounds(least=0, most=1)
    )
    repetition_penalty: float = setting(
        1.0, "Divides positive logits, and multiplies others, of tokens in the prompt or the answer so far.", ABOVE_0
    )
    presence_penalty: float = setting(0.0, "Subtracted from the logits of tokens in the answer so far.", PENALTY)
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from the logits of tokens in the answer so far, once for each time that they are there.",
        PENALTY,
    )
    logit_bias: LogitBias | Mapping[Any, Any] = setting(LogitBias(), "Added to the logits of tokens, by their ids.")
    bad_words: tuple[tuple[int, ...], ...] = setting((), "Runs of token ids that an answer never completes.")
    end_tokens: tuple[int, ...] = setting(
        (), "Token ids that end the answer, as its last token; left out, only its length does.", AT_LEAST_0
    )
    stop: tuple[str, ...] = setting((), "Texts that end an answer once it contains one; they need a tokenizer.")
    begins_with: tuple[int, ...] = setting(
        (),
        "Token ids that the answer begins with, each reported as the model's own distribution has it; what comes after "
        "them is as if they were the prompt's.",
        AT_LEAST_0,
    )
    seed: int = setting(
        0, "Decides the draw together with the prompt and the position.", Bounds(least=0, below=1 << 64)
    )
    num_samples: int = setting(1, "Answers to the prompt; its cache is computed once.", AT_LEAST_1)
    raw_log_probs: bool = setting(False, "Also return log-probabilities under the model's own distribution.")
    top_log_probs: int = setting(
        0, "Also return the n likeliest tokens of each step, by the model's own log-probabilities.", AT_LEAST_0
    )
    filter_mask: bool = setting(False, "Return, for each token, the mask of tokens that could not have been drawn.")

    def _check(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"sampling.min_new_tokens = {self.min_new_tokens}: at most sampling.max_new_tokens = "
                f"{self.max_new_tokens} is possible"
            )
        if len(self.begins_with) > self.max_new_tokens:
            raise ConfigError(
                f"sampling.begins_with has {len(self.begins_with)} tokens: at most sampling.max_new_tokens = "
                f"{self.max_new_tokens} are possible"
            )
        if "" in self.stop:
            raise ConfigError("sampling.stop holds an empty text, which every answer contains; give some characters")
        for word in self.bad_words:
            if not word or min(word) < 0:
                raise ConfigError(f"sampling.bad_words holds {list(word)}; give one or more token ids from 0 on")

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken instead of a drawn one."""
        return self.temperature == 0

    @cached_property
    def recipe(self) -> tuple[object, ...]:
        """The settings that turn logits into a distribution; rows of equal recipes are drawn together."""
        shape = (self.temperature, self.top_k or None, self.top_p, self.chained, self.min_p)
        return (*shape, *self._penalties, self.logit_bias, self.bad_words, self.end_tokens, self.raw_log_probs)

    @cached_property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Token ids, ascending, and what is added to their logits."""
        assert isinstance(self.logit_bias, LogitBias), "made of any mapping"
        return self.logit_bias.by_token

    @cached_property
    def reads_answer(self) -> bool:
        """True if the distribution of a token depends on the tokens before it in other ways than by the model."""
        return bool(self.bad_words) or self._penalties != (1.0, 0.0, 0.0)

    @property
    def _penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty
