"""Settings of sampling, and of the end of a sequence."""

from dataclasses import dataclass

from penstock.settings.declare import AT_LEAST_0, AT_LEAST_1, Bounds, ConfigError, Settings, setting


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
    max_rows_per_slot: int = setting(16, "That limit; each row has a place in the KV cache.", AT_LEAST_1)
    prefill_tokens: int = setting(
        512, "Prompt tokens that a slot reads in a round; prompts are cut at its multiples.", AT_LEAST_1
    )


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
        "Draw from the k likeliest tokens, ties included; left out, from all.",
        AT_LEAST_1,
    )
    top_p: float = setting(
        1.0,
        "Draw from the likeliest tokens that together have this probability.",
        Bounds(above=0, most=1),
    )
    chained: bool = setting(False, "Apply top_p to the tokens that top_k leaves, not to the whole distribution.")
    end_tokens: tuple[int, ...] = setting(
        (), "Token ids that end the answer, as its last token; left out, only its length does.", AT_LEAST_0
    )
    seed: int = setting(
        0, "Decides the draw together with the prompt and the position.", Bounds(least=0, below=1 << 64)
    )
    num_samples: int = setting(1, "Answers to the prompt; its cache is computed once.", AT_LEAST_1)
    raw_log_probs: bool = setting(False, "Also return log-probabilities under the model's own distribution.")
    filter_mask: bool = setting(False, "Return, for each token, the mask of tokens that could not have been drawn.")

    def _check(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"sampling.min_new_tokens = {self.min_new_tokens}: at most sampling.max_new_tokens = "
                f"{self.max_new_tokens} is possible"
            )

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is taken instead of a drawn one."""
        return self.temperature == 0

    @property
    def recipe(self) -> tuple[object, ...]:
        """The settings that turn logits into a distribution; rows of equal recipes are drawn together."""
        return (self.temperature, self.top_k, self.top_p, self.chained, self.end_tokens, self.raw_log_probs)
