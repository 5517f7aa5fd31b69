"""The prompts of a generation, read and checked against the model before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from torch import Tensor

from penstock.model import Limits
from penstock.runtime import Stage
from penstock.settings import SamplingParams
from penstock.settings.declare import check_argument, mismatch

Prompts = Sequence[Sequence[int]]


def read_prompts(
    prompts: Any, params: Any, stages: Sequence[Stage], limits: Limits | None
) -> tuple[Prompts, list[SamplingParams]]:
    """The prompts as lists, with a `SamplingParams` for each. Raises: ValueError for what cannot be generated."""
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
    """Refuse prompts that a model with these limits cannot continue.

    limits: None if they are unknown. names: of the prompts in messages; left out, their numbers from 0.

    Raises: ValueError naming the prompt or setting, and what would be possible.
    """
    for number, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        name = f"prompt {number}" if names is None else names[number]
        if not prompt:
            raise ValueError(f"{name} is empty; it needs at least one token to begin with")
        if min(prompt) < 0:
            raise ValueError(f"{name} holds the token {min(prompt)}; tokens count from 0")
        if limits is None:
            continue
        vocabulary = f"the model knows 0 to {limits.vocab_size - 1}"
        if max(prompt) >= limits.vocab_size:
            raise ValueError(f"{name} holds the token {max(prompt)}; {vocabulary}")
        named = {
            "end_tokens": sampling.end_tokens,
            "begins_with": sampling.begins_with,
            "logit_bias": tuple(token for token, _ in sampling.biases),
            "bad_words": tuple(token for word in sampling.bad_words for token in word),
        }
        for setting, tokens in named.items():
            if max(tokens, default=0) >= limits.vocab_size:
                raise ValueError(f"{setting} holds the token {max(tokens)}; {vocabulary}")
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
