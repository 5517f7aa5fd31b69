"""Generation, scoring and training give a token's log-probability the same bits, in any batch, slot, cut and layout."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import (
    Engine,
    EngineOptions,
    GenerateOptions,
    Layout,
    Metric,
    MicroBatchSpec,
    ModelConfig,
    PackedBatch,
    SamplingParams,
    num_loss_tokens,
    token_scores,
)
from penstock.data import NO_LABEL
from penstock.model import decoder_units, token_log_probs
from tests.dist.launch import run_ranks

# The widths are no multiples of a vector's length, and the longest texts take three tiles of keys.
CONFIG = ModelConfig(
    vocab_size=97, hidden_size=48, intermediate_size=60, num_layers=2, num_heads=4, num_kv_heads=2, max_length=320
)
PROMPT_LENGTHS = (1, 3, 30, 64, 127, 200)
NUM_PROMPTS, NUM_SAMPLES, NUM_NEW = 20, 2, 45
WAYS = (
    GenerateOptions(num_slots=1, rows_per_slot=5, prefill_tokens=48),
    GenerateOptions(num_slots=3, rows_per_slot=9, prefill_tokens=100, packed=False, longest_first=False),
    GenerateOptions(num_slots=2, rows_per_slot=36, decode="all-rows"),
)
TEMPERATURE = 0.7
NUM_TOKENS = NUM_PROMPTS * NUM_SAMPLES * NUM_NEW


def prompts() -> list[list[int]]:
    numbers = random.Random(1)
    return [[numbers.randrange(97) for _ in range(numbers.choice(PROMPT_LENGTHS))] for _ in range(NUM_PROMPTS)]


def around(prompt: list[int], values: Any, nothing: float) -> list[Any]:
    """Values of an answer's tokens, at the places that predict them."""
    return [*[nothing] * (len(prompt) - 1), *values, nothing]


def packed(answers: Any) -> PackedBatch:
    asked = prompts()
    rows = [(asked[answer.prompt], answer) for answer in answers]
    return PackedBatch.from_sequences(
        {
            "tokens": [prompt + list(answer.tokens) for prompt, answer in rows],
            "labels": [around(prompt, answer.tokens, NO_LABEL) for prompt, answer in rows],
            "log_probs": [around(prompt, answer.log_probs, 0.0) for prompt, answer in rows],
            "raw_log_probs": [around(prompt, answer.raw_log_probs, 0.0) for prompt, answer in rows],
        }
    )


def counting_loss(logits: Tensor, microbatch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
    """Cross entropy, and the tokens to which the step's own forward gives other bits than generation."""
    own = token_log_probs(logits, microbatch["labels"], TEMPERATURE)
    return -own.sum(), {"differing": Metric((own.detach() != microbatch["log_probs"]).sum())}


def differing(rank: int, layout: Layout, reproducible: bool, num_ways: int = len(WAYS)) -> dict[str, Any]:
    """How many tokens get other bits by each way, and all log-probabilities by the first one."""
    options = EngineOptions("1f1b", device="cpu", reproducible=reproducible)
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, layout, options)
    params = SamplingParams(
        max_new_tokens=NUM_NEW, num_samples=NUM_SAMPLES, seed=3, temperature=TEMPERATURE, raw_log_probs=True
    )
    found = {}
    for number, way in enumerate(WAYS[:num_ways]):
        batch = packed(engine.generate(prompts(), params, way))
        # The raw model's numbers once, and those that tokens were drawn by.
        key, divisor = ("raw_log_probs", 1.0) if number == 1 else ("log_probs", TEMPERATURE)
        spec = MicroBatchSpec(num=2 * number + 1)
        scored = engine.forward(batch, token_scores(divisor), micro_batches=spec, broadcast=True)
        found[f"scoring {number}"] = int((scored["log_probs"] != batch[key]).sum())
        if number == 0:
            first = batch
            assert num_loss_tokens(first) == NUM_TOKENS
        else:
            found[f"generation {number}"] = int((batch["log_probs"] != first["log_probs"]).sum())
    # The step learns, so it is the last of all.
    result = engine.train_batch(first, counting_loss, micro_batches=MicroBatchSpec(num=7))
    engine.close()
    return found | {"training": result.metrics["differing"], "log_probs": first["log_probs"]}


@pytest.mark.shows(64, 128)
def test_tokens_have_the_same_bits_in_generation_scoring_and_training_in_any_layout() -> None:
    alone = differing(0, Layout(), True)
    *_, split = run_ranks(2, differing, Layout(pp=2), True)
    assert torch.equal(alone.pop("log_probs"), split.pop("log_probs"))
    for found in (alone, split):
        assert len(found) == 2 * len(WAYS) and set(found.values()) == {0}, found
    assert 2 * len(WAYS) * NUM_TOKENS > 10_000


def test_without_the_setting_they_do_not() -> None:
    found = differing(0, Layout(), False, num_ways=1)
    assert min(found["scoring 0"], found["training"]) > 100, "else the test above shows nothing"


def refused(rank: int, layouts: list[Layout]) -> list[str]:
    told = []
    for layout in layouts:
        options = EngineOptions(device="cpu", reproducible=True)
        with pytest.raises(ValueError, match=r"^reproducible = true: ") as caught:
            Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, options)
        told.append(str(caught.value))
    return told


@pytest.mark.shows(128)
def test_layouts_that_share_layers_or_sequences_are_refused() -> None:
    every = run_ranks(2, refused, [Layout(tp=2), Layout(cp=2)])
    for told in every:
        assert all("possible are models of Penstock's own dense layers, on pipeline and" in line for line in told)
