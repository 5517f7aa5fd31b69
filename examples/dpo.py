"""Direct preference optimisation: a model that counts up or down as it likes learns to count up, in two stages.

A pair of answers, the chosen and the rejected one, is one item of the batch with two sequences, so no microbatch parts
them. What the model thought of both before it learned from any preference is a key of the batch beside their tokens.

    torchrun --nproc-per-node 2 examples/dpo.py
"""

import argparse
import os
import random
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock import Engine, EngineOptions, Layout, Metric, MicroBatchSpec, PackedBatch, SamplingParams, token_scores
from penstock.data import NO_LABEL
from penstock.model import decoder_units, token_log_probs
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig

END = 10  # follows an answer's last digit
WARM_UP_STEPS, STEPS, NUM_PAIRS = 40, 30, 16
BETA = 0.1  # how much a change of the model counts against the preferences
PARTS = MicroBatchSpec(num=2)


class Pair(NamedTuple):
    """A prompt with the answer that people like better and the other one, as token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def batch_of(pairs: list[Pair]) -> PackedBatch:
    """One item for each pair: chosen, then rejected; only the answers' tokens are labels."""

    def labels(prompt: list[int], answer: list[int]) -> list[int]:
        return [NO_LABEL] * (len(prompt) - 1) + answer + [NO_LABEL]

    return PackedBatch.from_sequences(
        {
            "tokens": [[pair.prompt + pair.chosen, pair.prompt + pair.rejected] for pair in pairs],
            "labels": [[labels(pair.prompt, pair.chosen), labels(pair.prompt, pair.rejected)] for pair in pairs],
        }
    )


def with_reference(engine: Engine, batch: PackedBatch) -> PackedBatch:
    """The batch with the log-probability that the model gives each label now."""
    scores = engine.forward(batch, token_scores(), micro_batches=PARTS, broadcast=True)
    return batch.with_key("reference", scores["log_probs"])


def num_pairs(microbatch: PackedBatch) -> float:
    """The loss weight: the loss is the mean over pairs."""
    return float(microbatch.num_items)


def preference_loss(logits: Tensor, microbatch: PackedBatch, beta: float) -> tuple[Tensor, dict[str, Metric]]:
    """The sum over pairs of minus the logarithm of the probability that the choice is as it was.

    The reward of an answer is how much likelier than the reference the model makes it, times beta.
    Source: arXiv 2305.18290, equation 7.
    """
    log_ratios = token_log_probs(logits, microbatch["labels"]) - microbatch["reference"]  # 0 where no label is
    rewards = beta * torch.stack([own.sum() for own in log_ratios.split(microbatch.sequence_lengths())])
    margins = rewards[0::2] - rewards[1::2]
    rightly = Metric((margins > 0).float().mean(), "mean", weight=microbatch.num_items)
    return -logsigmoid(margins).sum(), {"accuracy": rightly}


def counts(first: int) -> tuple[list[int], list[int]]:
    """The two ways to count on from a digit."""
    return [*range(first + 1, 10), END], [*range(first - 1, -1, -1), END]


def pairs(numbers: random.Random, up: bool | None = None) -> list[Pair]:
    """Pairs in which counting up is chosen, or in which either is where `up` is None."""
    found = []
    for _ in range(NUM_PAIRS):
        first = numbers.randrange(10)
        both = counts(first)
        found.append(Pair([first], *(both if up or numbers.random() < 0.5 else both[::-1])))
    return found


def share_up(engine: Engine) -> float:
    """The share of answers to each digit that count up."""
    answers = engine.generate(
        [[d] for d in range(10)], SamplingParams(max_new_tokens=10, end_tokens=(END,), num_samples=4)
    )
    return fmean(list(answer.tokens) == counts(answer.prompt)[0] for answer in answers)


def learn(engine: Engine) -> None:
    numbers = random.Random(0)
    for _ in range(WARM_UP_STEPS):  # on both ways to count, and so on neither more than the other
        engine.train_batch(batch_of(pairs(numbers)), micro_batches=PARTS)
    # The reference is the model as it is now, so all that it has to say is asked for before anything is learned.
    batches = [with_reference(engine, batch_of(pairs(numbers, up=True))) for _ in range(STEPS)]
    before = share_up(engine)
    for batch in batches:
        result = engine.train_batch(batch, partial(preference_loss, beta=BETA), num_pairs, PARTS)
        if dist.get_rank() == 0 and result.step % 10 == 0:
            print(f"step {result.step}: loss {result.loss:.4f}, {result.metrics['accuracy']:.0%} of pairs right")
    after = share_up(engine)
    if dist.get_rank() == 0:
        print(f"{before:.0%} of answers counted up, {after:.0%} do now")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start its processes by torchrun --nproc-per-node 2 examples/dpo.py")
    dist.init_process_group("gloo")
    config = ModelConfig(11, 64, 192, num_layers=2, num_heads=4, max_length=16)
    options = EngineOptions(optimizer=OptimizerConfig(LearningRate(2e-3)), device="cpu")
    engine = Engine(decoder_units(config), config.hidden_size, Layout(pp=dist.get_world_size()), options)
    learn(engine)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
