"""How a sequence is sampled and when it ends; no torch here, so that it can be checked before anything heavy."""

from dataclasses import dataclass

_SEED_LIMIT = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """What is drawn from, and for how long.

    Args:
        max_new_tokens: tokens of an answer, at most.
        min_new_tokens: end tokens are not drawn before there are so many.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the so many likeliest tokens are left, and those as likely as the last of them; None for all.
        top_p: only the likeliest tokens that together have this probability are left, at least one.
        chained: top_p looks at what top_k has left, instead of both at the whole distribution.
        end_tokens: each of them ends the answer, and is its last token; none of them, and only length does.
        seed: decides the draw together with the prompt and the position.
        num_samples: answers to the prompt; its cache is computed once.
        raw_log_probs: give the tokens' log-probabilities under the model's own distribution too.
        filter_mask: give for each token which tokens could not have been drawn.

    Raises:
        ValueError: naming the setting, its value and what would be possible.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    chained: bool = False
    end_tokens: tuple[int, ...] = ()
    seed: int = 0
    num_samples: int = 1
    raw_log_probs: bool = False
    filter_mask: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_tokens", tuple(self.end_tokens))
        for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0), ("num_samples", 1), ("seed", 0)):
            self._require(name, _is_whole(getattr(self, name), least), f"it must be a whole number, at least {least}")
        self._require("seed", self.seed < _SEED_LIMIT, "it must be below 2**64")
        most = f"at most max_new_tokens={self.max_new_tokens} is possible"
        self._require("min_new_tokens", self.min_new_tokens <= self.max_new_tokens, most)
        warm = _is_number(self.temperature) and 0 <= self.temperature < float("inf")
        self._require("temperature", warm, "it must be 0 (greedy) or a positive number")
        self._require("top_k", self.top_k is None or _is_whole(self.top_k, 1), "it must be None, or at least 1")
        self._require("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "it must be above 0 and at most 1")
        self._require("end_tokens", all(_is_whole(token, 0) for token in self.end_tokens), "they must be token ids")

    def _require(self, name: str, condition: bool, rule: str) -> None:
        if not condition:
            raise ValueError(f"{name}={getattr(self, name)!r}: {rule}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of drawing one."""
        return self.temperature == 0

    @property
    def recipe(self) -> tuple[object, ...]:
        """What decides how logits become a distribution; rows of equal recipes are drawn together."""
        return (self.temperature, self.top_k, self.top_p, self.chained, self.end_tokens, self.raw_log_probs)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
