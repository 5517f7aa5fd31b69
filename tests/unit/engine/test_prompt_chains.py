"""Prompts that take rows and beginnings of others, in any order, give what each of them gives alone."""

import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from penstock import Engine, SamplingParams
from penstock.engine.generation.options import GenerateOptions

NUM_TOKENS, PIECE = 6, 2
# A thousand take minutes.
NUM_CHAINS = 1000 if os.environ.get("PENSTOCK_EVERY_CASE") else 15


@pytest.mark.shows(198)
@pytest.mark.parametrize("native", [True, False], ids=["native", "by transformers"])
def test_any_chain_of_prompts_gives_what_each_gives_alone(native: bool, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = Engine.from_hf(tmp_path, native=native, device="cpu")
    params = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, num_samples=2)

    def answers(prompts: Sequence[tuple[int, ...]], options: GenerateOptions) -> list[tuple[list[int], list[float]]]:
        return [(list(one.tokens), list(one.log_probs)) for one in engine.generate(prompts, params, options).sequences]

    @cache
    def alone(prompt: tuple[int, ...]) -> list[tuple[list[int], list[float]]]:
        return answers([prompt], GenerateOptions(prefill_tokens=PIECE))

    draw = random.Random(7)
    for number in range(NUM_CHAINS):
        # Few tokens and short pieces, so that many begin alike by whole pieces.
        prompts = [tuple(draw.choices((1, 2), k=draw.randint(1, 7))) for _ in range(draw.randint(2, 9))]
        rows, slots, longest_first = draw.randint(1, 3), draw.randint(1, 2), draw.random() < 0.5
        options = GenerateOptions(
            num_slots=slots, rows_per_slot=rows, prefill_tokens=PIECE, longest_first=longest_first
        )
        together, expected = answers(prompts, options), [answer for prompt in prompts for answer in alone(prompt)]
        assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected], f"chain {number}: {prompts}"
        for (_, log_probs), (_, wanted) in zip(together, expected, strict=True):
            assert log_probs == pytest.approx(wanted, abs=1e-5), f"chain {number}: {prompts}"
    engine.close()
