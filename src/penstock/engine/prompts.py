"""Checks of what a generation is asked for: prompts, their parameters, and answers to skip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from penstock.model import Limits
from penstock.runtime import Stage
from penstock.settings import SamplingParams
from penstock.settings.arguments import type_in_words

Prompts = Sequence[Sequence[int]]
_MOST_QUOTED = 100


def checked_prompts(
    prompts: Any, params: Any, stages: Sequence[Stage], limits: Limits | None
) -> tuple[Prompts, list[SamplingParams]]:
    """The prompts as lists, and one of `params` for each. Raises: ValueError for what cannot be generated."""
    prompts = _token_ids(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping | str) or not isinstance(params, Iterable):
        raise ValueError(f"params={params!r} is {type_in_words(params)}; give SamplingParams, or a list of them")
    params = list(params)
    for number, own in enumerate(params):
        if not isinstance(own, SamplingParams):
            raise ValueError(f"params[{number}]={own!r} is {type_in_words(own)}; give SamplingParams")
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} SamplingParams were given for {len(prompts)} prompts; give one, or one for each"
        )
    for stage in stages:
        stage.check_cached()
    check_prompts(prompts, params, limits)
    return prompts, params


def _token_ids(prompts: Any) -> list[list[int]]:
    """The prompts as lists of numbers. Raises: ValueError naming the prompt that is anything else."""
    given = f"prompts={prompts!r}"[:_MOST_QUOTED]
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"{given} is {type_in_words(prompts)}; give a list of prompts, each a list of token ids")
    found: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Tensor) and prompt.dim() == 1 and not prompt.is_floating_point():
            prompt = prompt.tolist()
        if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable) or isinstance(prompt, Tensor):
            quoted = repr(prompt)[:_MOST_QUOTED]
            raise ValueError(f"prompt {number} is {quoted}, {type_in_words(prompt)}; give a list of token ids")
        found.append([])
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise ValueError(f"prompt {number} has {token!r} at its place {place}; token ids are whole numbers")
            found[-1].append(int(token))
    return found


def check_skipped(skip: Set[int], num_answers: int) -> None:
    for number in sorted(skip):
        if not 0 <= number < num_answers:
            raise ValueError(f"skip names the answer {number}; there are {num_answers}, counted from 0")


def check_prompts(
    prompts: Prompts, params: Sequence[SamplingParams], limits: Limits | None, names: Sequence[str] | None = None
) -> None:
    """Refuse prompts that a model of these limits cannot continue; None where the limits are not known.

    names: what each prompt is called in messages; left out, they count from 0.

    Raises:
        ValueError: naming the prompt, or the setting, and what would be possible.
    """
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        name = f"prompt {number}" if names is None else names[number]
        if not prompt:
            raise ValueError(f"{name} is empty; it needs at least one token to begin with")
        if min(prompt) < 0:
            raise ValueError(f"{name} holds the token {min(prompt)}; tokens count from 0")
        if limits is None:
            continue
        if max(prompt) >= limits.vocab_size:
            known = f"the model knows 0 to {limits.vocab_size - 1}"
            raise ValueError(f"{name} holds the token {max(prompt)}; {known}")
        named = {
            "end_tokens": own.end_tokens,
            "logit_bias": tuple(token for token, _ in own.biases),
            "bad_words": tuple(token for word in own.bad_words for token in word),
        }
        for setting, tokens in named.items():
            if max(tokens, default=0) >= limits.vocab_size:
                raise ValueError(f"{setting}={tokens}: the model knows 0 to {limits.vocab_size - 1}")
        if own.top_log_probs > limits.vocab_size:
            raise ValueError(f"top_log_probs={own.top_log_probs}: the model knows {limits.vocab_size} tokens")
        if len({word[0] for word in own.bad_words if len(word) == 1}) >= limits.vocab_size:
            raise ValueError("bad_words hold every token alone, so none could be drawn; leave some out")
        if own.min_new_tokens and len(set(own.end_tokens)) >= limits.vocab_size:
            raise ValueError(f"min_new_tokens={own.min_new_tokens}: every token is an end token, none could be drawn")
        if len(prompt) + own.max_new_tokens > limits.max_length:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and with max_new_tokens={own.max_new_tokens} more it would "
                f"pass the model's max_length={limits.max_length}"
            )
        longest = limits.max_generated_length
        if longest is not None and len(prompt) + own.max_new_tokens > longest:
            raise ValueError(
                f"{name} has {len(prompt)} tokens, and with max_new_tokens={own.max_new_tokens} more it would "
                f"pass {longest}, where the model's rotary factors change for all tokens before (longrope); at most "
                f"{longest} tokens can be generated and read"
            )
