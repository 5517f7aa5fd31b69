"""Reproducible tokens: what they cost in training, scoring and decoding, and how many tokens differ without and with.

Both engines stand in this process and take turns; times are those of its one computing thread.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ranks import spread
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions, token_scores
from penstock.model import decoder_units
from penstock.settings import Layout, ModelConfig, SamplingParams

WHOLE_TOKENS = 2048
"""Tokens of a batch that is trained on or scored."""


@dataclass(frozen=True)
class Reproducing:
    """The model, the lengths of the texts that are trained on and scored, and the answers that are decoded."""

    num_layers: int = 6
    hidden_size: int = 512
    vocab_size: int = 4096
    lengths: tuple[int, ...] = (64, 200, 500)
    num_rows: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 40
    num_rounds: int = 4

    def engine(self, reproducible: bool) -> Engine:
        config = ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=11 * self.hidden_size // 4,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // 64,
            max_length=max(*self.lengths, 90 + self.new_tokens),
        )
        options = EngineOptions(device="cpu", reproducible=reproducible)
        return Engine(decoder_units(config), config.hidden_size, Layout(), options)


def measure(asked: Reproducing, progress: Callable[[str], None]) -> dict[str, Any]:
    """Ratios of the reproducible engine's time over the plain one's, and the tokens that differ in each."""
    torch.set_num_threads(1)
    sides = [asked.engine(reproducible) for reproducible in (False, True)]
    numbers, parts, found = random.Random(0), MicroBatchSpec(num=2), {}

    def texts(lengths: list[int]) -> list[list[int]]:
        return [[numbers.randrange(asked.vocab_size) for _ in range(length)] for length in lengths]

    for length in asked.lengths:
        batch = PackedBatch.from_documents(texts([length] * max(2, WHOLE_TOKENS // length)))
        jobs: dict[str, Callable[[Engine], Any]] = {
            "training": lambda engine, batch=batch: engine.train_batch(batch, micro_batches=parts),
            "scoring": lambda engine, batch=batch: engine.forward(batch, token_scores(), micro_batches=parts),
        }
        for name, job in jobs.items():
            found[f"{name}, texts of {length} tokens"] = _ratio(sides, job, asked.num_rounds)
            progress(f"{name}, {length}: {found[f'{name}, texts of {length} tokens']['median']:.3f}")
    params = SamplingParams(max_new_tokens=asked.new_tokens)
    for rows in asked.num_rows:
        prompts = texts([numbers.choice((5, 30, 90)) for _ in range(rows)])
        name = f"decoding, {rows} answers"
        found[name] = _ratio(sides, lambda engine, p=prompts: engine.generate(p, params), asked.num_rounds)
        progress(f"{name}: {found[name]['median']:.3f}")
    prompts = texts([numbers.randrange(1, 90) for _ in range(max(asked.num_rows))])
    differing = [_num_differing(engine, prompts, params) for engine in sides]
    return {
        "time over that of the plain mode": found,
        "tokens": len(prompts) * asked.new_tokens,
        "tokens that scoring gives other bits": {"plain": differing[0], "reproducible": differing[1]},
    }


def _ratio(sides: list[Engine], job: Callable[[Engine], Any], num_rounds: int) -> dict[str, Any]:
    """Median and range of the second side's time over the first's, each pair in turn; the first pair is not counted."""
    ratios = []
    for _ in range(num_rounds + 1):
        times = []
        for engine in sides:
            start = time.process_time()
            job(engine)
            times.append(time.process_time() - start)
        ratios.append(times[1] / times[0])
    return spread(ratios[1:])


def _num_differing(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> int:
    """The tokens whose log-probability by scoring is not, bit for bit, that of generation."""
    answers = engine.generate(prompts, params)
    texts = [(prompts[answer.prompt], list(answer.tokens), list(answer.log_probs)) for answer in answers]
    batch = PackedBatch.from_sequences(
        {
            "tokens": [prompt + tokens for prompt, tokens, _ in texts],
            "labels": [[NO_LABEL] * (len(prompt) - 1) + tokens + [NO_LABEL] for prompt, tokens, _ in texts],
            "log_probs": [[0.0] * (len(prompt) - 1) + log_probs + [0.0] for prompt, _, log_probs in texts],
        }
    )
    scores = engine.forward(batch, token_scores(), micro_batches=MicroBatchSpec(num=3))
    return int((scores["log_probs"] != batch["log_probs"]).sum())
