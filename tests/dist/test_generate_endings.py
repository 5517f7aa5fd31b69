"""Generation over real processes: all ranks leave however answers end, and training does not notice."""

from dataclasses import replace
from typing import Any

import pytest

from penstock import Engine, Layout, SamplingParams
from penstock.engine import EngineOptions
from penstock.model import decoder_units
from tests.dist.launch import run_ranks
from tests.generation import CONFIG, generate_together, load, random_prompts, random_weights

PARAMS = SamplingParams(max_new_tokens=8, temperature=1.2, top_p=0.9, raw_log_probs=True, filter_mask=True)
LENGTHS = ([1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1], [1] * 5, [4] * 4, [1, 9, 1], [2, 3], [5], [1], [])


def make_engine(pp: int) -> Engine:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=pp), EngineOptions(timeout_s=60))
    load(engine.parameters(), random_weights())
    return engine


def case(lengths: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = random_prompts([1 + i % 3 for i in range(len(lengths))])
    return prompts, [replace(PARAMS, max_new_tokens=length) for length in lengths]


def plain(answers: Any) -> list[Any]:
    return [(a.tokens, a.log_probs, a.raw_log_probs, a.ending.value, a.filter_mask.sum(-1).tolist()) for a in answers]


def ended(answer: Any) -> tuple[Any, ...]:
    return answer.tokens, answer.log_probs, answer.ending


def all_endings(rank: int, pp: int) -> list[Any]:
    engine, found = make_engine(pp), []
    for lengths in LENGTHS:
        told: dict[int, Any] = {}
        result = engine.generate(*case(lengths), on_answer=told.__setitem__)
        # Told once it has ended, where the ring begins, and as it is in the result.
        assert sorted(told) == (list(range(len(lengths))) if rank == 0 else [])
        assert all(ended(answer) == ended(result[number]) for number, answer in told.items())
        assert len(set(result.num_forwards)) == 1, "a stage has computed what others have not"
        assert engine.pipeline.transport.num_pending() == 0
        assert engine.generator.ring.host.num_pending() == 0
        found.append(plain(result))
    engine.close()
    return found


@pytest.mark.shows(67, 70, 71, 73)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_all_ranks_leave_with_the_same_answers_however_they_end(pp: int) -> None:
    expected = [plain(generate_together(1, *case(lengths)).answers) for lengths in LENGTHS]
    assert [len(answers) for answers in expected] == [len(lengths) for lengths in LENGTHS]
    assert run_ranks(pp, all_endings, pp) == [expected] * pp


ENDS = tuple(range(0, CONFIG.vocabulary, 2))
"""Half of the vocabulary, so that an answer rarely has more than a few tokens."""
BOUNDS = ((0, 1), (1, 1), (0, 12), (3, 12), (7, 12), (12, 12))
"""The fewest and the most new tokens."""


def bounded(rank: int, temperature: float) -> list[list[tuple[int, ...]]]:
    """The answers to the same prompts under each of the bounds, in a call each and then all in one call."""
    engine, prompts = make_engine(2), random_prompts([3, 1, 6, 2])
    params = [
        SamplingParams(temperature=temperature, min_new_tokens=least, max_new_tokens=most, end_tokens=ENDS)
        for least, most in BOUNDS
    ]
    found = [[answer.tokens for answer in engine.generate(prompts, one)] for one in params]
    mixed = engine.generate([prompts[0]] * len(params), params)
    found.append([answer.tokens for answer in mixed])
    engine.close()
    return found


@pytest.mark.shows(65)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_keep_to_the_fewest_and_the_most_tokens_that_were_asked_for(temperature: float) -> None:
    first, second = run_ranks(2, bounded, temperature)
    assert first == second
    *calls, mixed = first
    cases = [(bounds, tokens) for bounds, call in zip(BOUNDS, calls, strict=True) for tokens in call]
    cases += zip(BOUNDS, mixed, strict=True)
    for (least, most), tokens in cases:
        ended = [place for place, token in enumerate(tokens) if token in ENDS]
        assert max(least, 1) <= len(tokens) <= most
        assert all(place >= least for place in ended), "no end token comes before the fewest"
        # The first end token, and nothing else but length, ends an answer.
        assert ended == [len(tokens) - 1] if ended else len(tokens) == most
    lengths = {bounds: [len(tokens) for tokens in call] for bounds, call in zip(BOUNDS, calls, strict=True)}
    assert min(lengths[0, 12]) < 3, "answers that would not have ended earlier show nothing"
    assert lengths[0, 1] == lengths[1, 1] == [1] * 4 and lengths[12, 12] == [12] * 4
