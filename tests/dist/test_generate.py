"""Generation over real processes: the same tokens as transformers' and as one process's, on any ring."""

from functools import partial
from typing import Any

import pytest
import torch

from penstock import Engine, Layout, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import decoder_units
from tests.dist.launch import run_ranks
from tests.generation import load, random_prompts
from tests.unit.model.test_parity import FAMILIES, hugging_face_model, hugging_face_name

NUM_NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=0)
OPTIONS = (
    GenerateOptions(),
    GenerateOptions(num_slots=3, rows_per_slot=1, prefill_tokens=5),
    GenerateOptions(num_slots=5, rows_per_slot=2),
)


def make_engine(config: Any, weights: dict[str, Any], pp: int, schedule: str = "1f1b", tp: int = 1) -> Engine:
    options = EngineOptions(schedule=schedule, timeout_s=60)
    units = partial(decoder_units, config, None)
    engine = Engine(units, config.hidden_size, Layout(pp=pp, tp=tp), options)
    parts = {name: shard.of(weights[name.removesuffix("@2")]) for name, shard in engine.shards.items()}
    load(engine.parameters(), weights | parts)
    return engine


def greedy(rank: int, pp: int, tp: int, config: Any, weights: dict[str, Any], prompts: list[list[int]]) -> list[Any]:
    engine = make_engine(config, weights, pp, tp=tp)
    found = [[list(answer.tokens) for answer in engine.generate(prompts, GREEDY, options)] for options in OPTIONS]
    engine.close()
    engine.grid.close()
    return found


def expected(pp: int) -> tuple[Any, dict[str, Any], list[list[int]], list[list[int]]]:
    """A family's config and weights, prompts, and transformers' answers to them."""
    family = list(FAMILIES.values())[pp]
    config = type(family.config)(**{**vars(family.config), "max_length": 128})
    reference = hugging_face_model(type(family)(family.config_type, family.model_type, config, family.more))
    state = reference.state_dict()
    weights = {
        unit.full_name(name): state[hugging_face_name(unit.full_name(name))]
        for unit in decoder_units(config)
        for name, _ in unit.build().named_parameters()
    }
    prompts = random_prompts()
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        mask = torch.ones_like(given)
        tokens = reference.generate(  # pyright: ignore[reportCallIssue]
            given,
            attention_mask=mask,
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tokens[0, len(prompt) :].tolist())
    return config, weights, prompts, answers


@pytest.mark.shows(62)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_greedy_tokens_are_those_of_transformers(pp: int, tp: int) -> None:
    config, weights, prompts, answers = expected(pp)
    assert len({tuple(answer) for answer in answers}) == len(prompts), "answers that are alike show nothing"
    for found in run_ranks(pp * tp, greedy, pp, tp, config, weights, prompts):
        assert found == [answers] * len(OPTIONS)
