"""Calls of `Engine.generate` on one engine, one after the other and with requests of every kind; and what they give."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import Engine, SamplingParams, schedule
from penstock.engine import EngineOptions, GenerateOptions
from penstock.engine.generation.answers import GenerateResult
from penstock.model import decoder_units
from penstock.runtime import DecodeForm
from penstock.schedule import Ending
from penstock.settings import Precision
from tests.generation import CONFIG, load, random_prompts, random_weights

SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.2)


def make() -> Engine:
    options = EngineOptions(device="cpu", learns=False)
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=options)
    load(engine.parameters(), random_weights())
    return engine


def tokens(answers: GenerateResult) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


# ---- one call after another

# By prompts, their length and new tokens: more of each than the caches of the small one have room for.
SMALL, LONGER, MORE = (2, 5, 4), (2, 60, 30), (7, 5, 4)


@pytest.mark.shows(69)
@pytest.mark.parametrize("decode", [DecodeForm.LIVE_ROWS, DecodeForm.ALL_ROWS])
@pytest.mark.parametrize("calls", [(SMALL, LONGER), (SMALL, MORE), (LONGER, SMALL), (MORE, LONGER, SMALL)], ids=str)
def test_a_call_gives_what_it_gives_on_a_new_engine_whatever_was_called_before(
    calls: Sequence[tuple[int, int, int]], decode: DecodeForm
) -> None:
    engine, options = make(), GenerateOptions(decode=decode)
    for number, (num_prompts, length, num_new_tokens) in enumerate(calls):
        prompts = random_prompts([length + i % 2 for i in range(num_prompts)], seed=number)
        params = replace(SAMPLED, max_new_tokens=num_new_tokens)
        found = engine.generate(prompts, params, options)
        expected = make().generate(prompts, params, options)
        assert tokens(found) == tokens(expected)
        assert [answer.log_probs for answer in found] == [answer.log_probs for answer in expected]
        assert len(set(tokens(found))) == num_prompts, "answers that are alike show nothing"
        assert all(len(answer.tokens) == num_new_tokens for answer in found)


# ---- requests of every kind in one call

EVEN, ODD = (tuple(range(first, CONFIG.vocabulary, 2)) for first in (0, 1))
KINDS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0),
    "cold": SamplingParams(temperature=0.5),
    "warm": SamplingParams(temperature=2.0),
    "another seed": SamplingParams(seed=7),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.3),
    "both": SamplingParams(top_k=20, top_p=0.5),
    "chained": SamplingParams(top_k=20, top_p=0.5, chained=True),
    "short": SamplingParams(max_new_tokens=3),
    "ends": SamplingParams(end_tokens=EVEN),
    "ends late": SamplingParams(end_tokens=EVEN, min_new_tokens=6),
    "ends elsewhere": SamplingParams(end_tokens=ODD),
    "several": SamplingParams(num_samples=3, raw_log_probs=True, filter_mask=True),
}


@pytest.mark.shows(73, 74)
def test_each_request_of_a_mixed_call_gets_what_it_gets_alone() -> None:
    engine = make()
    requests = [replace(params, max_new_tokens=min(params.max_new_tokens, 12)) for params in KINDS.values()]
    prompts = random_prompts([1 + i % 5 for i in range(len(requests))])
    mixed = engine.generate(prompts, requests)
    seen: dict[str, list[schedule.Sequence]] = {}
    for number, (kind, prompt, params) in enumerate(zip(KINDS, prompts, requests, strict=True)):
        own = seen[kind] = [answer for answer in mixed if answer.prompt == number]
        alone = list(engine.generate([prompt], params))
        assert [_all_of(answer) for answer in own] == [_all_of(answer) for answer in alone], kind
        plain = replace(KINDS["plain"], max_new_tokens=12)
        if params != plain:
            assert [_all_of(answer) for answer in own] != [_all_of(a) for a in engine.generate([prompt], plain)], kind
    assert [len(seen[kind][0].tokens) for kind in ("plain", "short")] == [12, 3]
    assert len(seen["several"]) == 3 and seen["ends"][0].ending is seen["ends late"][0].ending is Ending.END_TOKEN
    assert len(seen["ends"][0].tokens) <= 6 < len(seen["ends late"][0].tokens)


def _all_of(answer: schedule.Sequence) -> tuple[Any, ...]:
    mask = None if answer.filter_mask is None else answer.filter_mask.tolist()
    return answer.sample, answer.tokens, answer.log_probs, answer.raw_log_probs, answer.ending, mask


@pytest.mark.shows(73)
def test_the_same_prompt_is_drawn_by_each_kinds_own_parameters() -> None:
    """One prompt asked in many ways: only what a way leaves to chance may differ from the others."""
    prompt = random_prompts([4])[0]
    ways = [replace(params, max_new_tokens=12, filter_mask=True) for params in KINDS.values()]
    answers = [answer for answer in make().generate([prompt] * len(ways), ways) if answer.sample == 0]
    kept = {}
    for kind, answer in zip(KINDS, answers, strict=True):
        assert answer.filter_mask is not None
        kept[kind] = (~answer.filter_mask[0]).sum().item()
    assert kept["plain"] == kept["warm"] == kept["cold"] == kept["another seed"] == CONFIG.vocabulary
    assert kept["top-k"] == 2 and 1 <= kept["top-p"] < 20
    assert kept["chained"] < kept["both"] <= 20 and kept["ends late"] == CONFIG.vocabulary // 2


# ---- the padded form


def answer(number: int, tokens: Sequence[int]) -> schedule.Sequence:
    generated = [schedule.Token(token, -(number + 1) - i / 8) for i, token in enumerate(tokens)]
    return schedule.Sequence(
        number, number, 0, (), SamplingParams(), ending=Ending.LENGTH, filter_mask=None, generated=generated
    )


def result_of(*answers: Sequence[int]) -> GenerateResult:
    return GenerateResult(tuple(answer(i, tokens) for i, tokens in enumerate(answers)), 1.0, (0.5,), (3,), 3)


def test_answers_side_by_side_are_filled_up_on_the_right() -> None:
    padded = result_of((5, 6, 7), (8,), (), (9, 0)).padded(pad_token=3)
    assert padded.tokens.tolist() == [[5, 6, 7], [8, 3, 3], [3, 3, 3], [9, 0, 3]]
    assert padded.valid.tolist() == [[True] * 3, [True, False, False], [False] * 3, [True, True, False]]
    assert padded.log_probs.tolist() == [[-1.0, -1.125, -1.25], [-2.0, 0.0, 0.0], [0.0] * 3, [-4.0, -4.125, 0.0]]
    assert (padded.tokens.dtype, padded.log_probs.dtype, padded.valid.dtype) == (
        torch.int64,
        torch.float32,
        torch.bool,
    )


@pytest.mark.shows(203)
@pytest.mark.parametrize("penalties", [{}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}], ids=["plain", "penal"])
def test_an_answer_goes_on_after_given_tokens_as_after_a_prompt_with_them(penalties: dict[str, Any]) -> None:
    options = EngineOptions(device="cpu", learns=False, precision=Precision.FP64)
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=options)
    load(engine.parameters(), random_weights())
    prompts = random_prompts([6, 9, 6], seed=1)
    prompts.append(prompts[0])
    plain = SamplingParams(max_new_tokens=12, temperature=1.3, num_samples=2, seed=5, **penalties)
    # Given tokens end no answer, and this one ends some that are drawn.
    plain = replace(plain, end_tokens=tuple(prompts[0][1:]))
    expected = tokens(engine.generate(prompts, plain))
    assert {len(answer) for answer in expected} > {12}
    assert len(set(expected)) == len(expected)
    known = [
        replace(plain, begins_with=tuple(prompt[1:]), max_new_tokens=12 + len(prompt) - 1, raw_log_probs=True)
        for prompt in prompts
    ]
    answers = tokens(engine.generate([prompt[:1] for prompt in prompts], known))
    begins = [params.begins_with for params in known for _ in range(2)]
    assert answers == [begin + answer for begin, answer in zip(begins, expected, strict=True)]
