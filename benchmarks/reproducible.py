"""What reproducible tokens cost, and that they are so.

The time of training, scoring and decoding with them over that without, and the tokens that scoring gives other bits
than generation in either mode. Both engines stand in this process and take turns; times are those of its one computing
thread.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import main, new_parser, progress, spread
from penstock.cli.options import Parser
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions, token_scores
from penstock.model import decoder_units
from penstock.settings import Layout, ModelConfig, SamplingParams

WHOLE_TOKENS = 2048
"""Tokens of a batch that is trained on or scored."""


_LONGEST_PROMPT = 90


def _engine(given: argparse.Namespace, reproducible: bool) -> Engine:
    config = ModelConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=11 * given.hidden_size // 4,
        num_layers=given.layers,
        num_heads=given.hidden_size // 64,
        max_length=max(*given.lengths, _LONGEST_PROMPT + given.new_tokens),
    )
    options = EngineOptions(device="cpu", reproducible=reproducible)
    return Engine(decoder_units(config), config.hidden_size, Layout(), options)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Ratios of the reproducible engine's time over the plain one's, and the tokens that differ in each."""
    torch.set_num_threads(1)
    sides = [_engine(given, reproducible) for reproducible in (False, True)]
    numbers, parts, found = random.Random(0), MicroBatchSpec(num=2), {}

    def texts(lengths: list[int]) -> list[list[int]]:
        return [[numbers.randrange(given.vocab_size) for _ in range(length)] for length in lengths]

    for length in given.lengths:
        batch = PackedBatch.from_documents(texts([length] * max(2, WHOLE_TOKENS // length)))
        jobs: dict[str, Callable[[Engine], Any]] = {
            "training": lambda engine, batch=batch: engine.train_batch(batch, micro_batches=parts),
            "scoring": lambda engine, batch=batch: engine.forward(batch, token_scores(), micro_batches=parts),
        }
        for name, job in jobs.items():
            found[f"{name}, texts of {length} tokens"] = _ratio(sides, job, given.rounds)
            progress(f"{name}, {length}: {found[f'{name}, texts of {length} tokens']['median']:.3f}")
    params = SamplingParams(max_new_tokens=given.new_tokens)
    for rows in given.rows:
        prompts = texts([numbers.choice((5, 30, _LONGEST_PROMPT)) for _ in range(rows)])
        name = f"decoding, {rows} answers"
        found[name] = _ratio(sides, lambda engine, p=prompts: engine.generate(p, params), given.rounds)
        progress(f"{name}: {found[name]['median']:.3f}")
    prompts = texts([numbers.randrange(1, _LONGEST_PROMPT) for _ in range(max(given.rows))])
    differing = [_num_differing(engine, prompts, params) for engine in sides]
    return {
        "time over that of the plain mode": found,
        "tokens": len(prompts) * given.new_tokens,
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


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("reproducible", __doc__, "--layers 2 --hidden-size 256")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens of its vocabulary")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 200, 500], help="of texts trained on and scored")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="answers that are decoded at once")
    parser.add_argument("--new-tokens", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=4, help="of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("reproducible"))
