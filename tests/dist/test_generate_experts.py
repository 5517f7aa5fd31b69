"""Generation by pipelines that share experts: in step, each with prompts of its own, and the same tokens as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock import Engine, Layout, SamplingParams
from penstock.engine import EngineOptions, GenerateOptions
from penstock.model import decoder_units
from penstock.runtime import PipelineError, StepError
from penstock.settings import Precision, ScheduleConfig
from tests.covering import EVERY
from tests.dist.grid_cases import SPARSE, VOCABULARY
from tests.dist.launch import run_ranks
from tests.generation import random_prompts

TOLERANCE = 1e-10
PARAMS = SamplingParams(max_new_tokens=7, temperature=1.5, end_tokens=(3,), num_samples=2)
SHARES: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
    ((7, 1, 5, 11), (2, 9)),
    ((4,), ()),
    ((), (3, 3, 1)),
    ((), ()),
)
"""Lengths of the prompts that each of two pipelines is given."""
OPTIONS = (GenerateOptions(), GenerateOptions(num_slots=3, rows_per_slot=1, prefill_tokens=4))
ASKED = [
    (share, options)
    for number, share in enumerate(SHARES)
    for turn, options in enumerate(OPTIONS)
    if EVERY or number == 0 or number % 2 == turn
]
"""What is generated with which options: both of them where both pipelines have prompts, else one."""


def make_engine(layout: Layout, num_local_stages: int = 1) -> Engine:
    choice = ScheduleConfig("1f1b" if num_local_stages == 1 else "zb-v", num_local_stages)
    options = EngineOptions(schedule=choice, precision=Precision.FP64, timeout_s=60)
    return Engine(lambda groups: decoder_units(SPARSE, groups=groups), SPARSE.hidden_size, layout, options)


def prompts_of(place: int, lengths: Sequence[int]) -> list[list[int]]:
    found = random_prompts(lengths, seed=10 + place)
    return [[token % VOCABULARY for token in prompt] for prompt in found]


def close(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


def answers(rank: int, layout: Layout, num_local_stages: int) -> list[Any]:
    engine = make_engine(layout, num_local_stages)
    found = []
    for share, options in ASKED:
        result = engine.generate(prompts_of(engine.grid.dp_rank, share[engine.grid.dp_rank]), PARAMS, options)
        assert engine.pipeline.transport.num_pending() == 0
        assert engine.generator.ring.host.num_pending() == 0
        found.append([(answer.tokens, answer.log_probs, answer.ending) for answer in result])
    close(engine)
    return found


@cache
def expected(place: int) -> list[Any]:
    """Of one process for the prompts that the pipeline at this place is given."""
    engine, found = make_engine(Layout()), []
    for share in SHARES:
        result = engine.generate(prompts_of(place, share[place]), PARAMS)
        own = [(answer.tokens, answer.log_probs, answer.ending) for answer in result]
        found += [own for other, _ in ASKED if other is share]
    return found


@pytest.mark.shows(62, 70, 73)
@pytest.mark.parametrize(
    ("pp", "tp", "num_local_stages"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), *([(2, 1, 1)] if EVERY else [])]
)
def test_each_pipeline_gives_the_answers_of_one_process(pp: int, tp: int, num_local_stages: int) -> None:
    layout = Layout(pp=pp, dp=2, tp=tp, ep=2)
    by_place = [expected(place) for place in range(2)]
    assert len({tokens for case in by_place[0] for tokens, _, _ in case}) >= 8, "answers that are alike show nothing"
    for rank, cases in enumerate(run_ranks(layout.world_size, answers, layout, num_local_stages)):
        for found, wanted in zip(cases, by_place[layout.coordinates(rank).dp], strict=True):
            assert [(tokens, ending) for tokens, _, ending in found] == [(t, ending) for t, _, ending in wanted]
            for (_, log_probs, _), (_, other, _) in zip(found, wanted, strict=True):
                assert log_probs == pytest.approx(other, rel=0, abs=TOLERANCE)


def refusals(rank: int) -> list[str]:
    """What each rank is told where one pipeline's request cannot be, and of a listener that fails on one."""
    engine, told = make_engine(Layout(dp=2, ep=2)), []
    place = engine.grid.dp_rank
    prompts = prompts_of(place, [3, 2])

    def attempt(act: Callable[[], object]) -> None:
        try:
            act()
            told.append("done")
        except StepError as error:
            told.append(f"StepError: {error}, from {type(error.__cause__).__name__}")
        except (ValueError, PipelineError) as error:
            told.append(f"{type(error).__name__}: {error}")

    def listener(number: int, token: int) -> None:
        if place == 1:
            raise KeyError("made to fail")

    attempt(lambda: engine.generate([[1], [VOCABULARY]] if place == 1 else prompts, PARAMS))
    attempt(lambda: engine.generate(prompts, PARAMS, GenerateOptions(num_slots=1 + place)))
    attempt(lambda: engine.generate(prompts, replace(PARAMS, num_samples=1), on_token=listener))
    attempt(lambda: engine.generate(prompts, PARAMS))
    close(engine)
    return told


@pytest.mark.shows(81)
def test_what_one_pipeline_cannot_generate_none_begins() -> None:
    first, second = run_ranks(2, refusals)
    assert first[0].startswith("PipelineError: rank 1 of those that generate together cannot: prompt 1 holds the token")
    assert second[0].startswith("ValueError: prompt 1 holds the token")
    assert first[1].endswith("rank 1 of those that generate together was given num_slots=2, not 1")
    assert second[1].endswith("rank 0 of those that generate together was given num_slots=1, not 2")
    for told in (first, second):
        assert told[2].startswith("StepError: rank 1 (dp 1, pp 0, cp 0, tp 0) failed ")
        assert "KeyError: 'made to fail'" in told[2] and told[3] == "done"
    assert second[2].endswith("from KeyError")
