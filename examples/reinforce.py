"""Learn to add from reward: one engine in two stages generates, scores and trains in turn, with one set of weights.

After a short supervised warm-up a small decoder gets about one sum in six right. From then on it is only told whether
its own answers are right: each sum is answered many times over, and an answer counts by how much better it did than
the others to the same sum. How far the model has moved since it gave an answer (its importance weight) is known from
the log-probabilities that generation returns.

    torchrun --nproc-per-node 2 examples/reinforce.py
"""

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Engine, EngineOptions, GenerateOptions, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.data import NO_LABEL
from penstock.engine.scoring import token_scores
from penstock.model import decoder_units, token_statistics
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig

CHARACTERS = "0123456789+=\n"
END = CHARACTERS.index("\n")

WARM_UP_STEPS, MOST_ROUNDS = 20, 400
NUM_SUMS, NUM_ANSWERS = 32, 16  # of a round: different sums, and answers to each
UPDATES = 2  # steps on the answers of a round
CLIP = 0.2  # how far an importance weight may move away from 1 before its answer stops to count
EXPLORE = 0.05  # what a nat of entropy is worth, in units of a normalised reward
PARTS = MicroBatchSpec(num=4)


class Answer(NamedTuple):
    """What the model wrote after a prompt, each token's log-probability then, and the advantage over its group."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    advantage: float


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: Iterable[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


def sums(numbers: random.Random, count: int) -> list[tuple[list[int], str]]:
    """Prompts, each with the one answer that is right."""
    pairs = [(numbers.randrange(10), numbers.randrange(10)) for _ in range(count)]
    return [(encode(f"{a}+{b}="), f"{a + b}\n") for a, b in pairs]


def batch_of(answers: list[Answer]) -> PackedBatch:
    """Prompts and answers packed; only the answers' tokens are labels, and what is known of each stands beside it."""

    def beside(answer: Answer, values: list, nothing: float) -> list:  # where a token is told: at the one before it
        return [nothing] * (len(answer.prompt) - 1) + values + [nothing]

    return PackedBatch.from_sequences(
        {
            "tokens": [answer.prompt + answer.tokens for answer in answers],
            "labels": [beside(answer, answer.tokens, NO_LABEL) for answer in answers],
            "log_probs": [beside(answer, answer.log_probs, 0.0) for answer in answers],
            "advantages": [beside(answer, [answer.advantage] * len(answer.tokens), 0.0) for answer in answers],
        }
    )


def policy_loss(logits: Tensor, microbatch: PackedBatch) -> Tensor:
    """Minus the clipped gain over all tokens, and minus what their entropy is worth.

    Source: arXiv 1707.06347, equation 7.
    """
    new = token_statistics(logits, microbatch["labels"])
    weights, advantages = torch.exp(new.log_probs - microbatch["log_probs"]), microbatch["advantages"]
    gains = torch.minimum(weights * advantages, weights.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gains + EXPLORE * new.entropies)[microbatch["labels"] != NO_LABEL].sum()


def answer_and_reward(engine: Engine, numbers: random.Random, seed: int) -> tuple[list[Answer], float]:
    """The model's own answers to new sums, and the share of them that is right.

    Source of the advantage: arXiv 2402.03300, section 4.1.2.
    """
    asked = sums(numbers, NUM_SUMS)
    params = SamplingParams(max_new_tokens=4, end_tokens=(END,), num_samples=NUM_ANSWERS, seed=seed)
    options = GenerateOptions(rows_per_slot=NUM_SUMS * NUM_ANSWERS // engine.layout.pp)
    written = engine.generate([prompt for prompt, _ in asked], params, options)
    right = torch.tensor([decode(one.tokens) == asked[one.prompt][1] for one in written]).float().view(NUM_SUMS, -1)
    advantages = (right - right.mean(1, keepdim=True)) / (right.std(1, keepdim=True) + 1e-4)
    pairs = zip(written, advantages.flatten().tolist(), strict=True)
    answers = [Answer(asked[one.prompt][0], list(one.tokens), list(one.log_probs), counts) for one, counts in pairs]
    return answers, float(right.mean())


def learn(engine: Engine, goal: float) -> None:
    """Warm up on answers given, then learn from answers found, until the share of right ones passes the goal."""
    numbers, start = random.Random(0), time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        given = [Answer(prompt, encode(text), [0.0] * len(text), 0.0) for prompt, text in sums(numbers, NUM_SUMS)]
        engine.train_batch(batch_of(given), micro_batches=PARTS)
    shares = deque[float](maxlen=5)
    for number in range(1, MOST_ROUNDS + 1):
        answers, share = answer_and_reward(engine, numbers, seed=number)
        batch = batch_of(answers)
        scores = engine.forward(batch, token_scores(entropies=True), micro_batches=PARTS, broadcast=True)
        # Nothing has been learned since the answers were drawn, so scoring finds what generation said of them.
        off = float(torch.exp(scores["log_probs"] - batch["log_probs"]).sub(1).abs().max())
        entropy = float(scores["entropies"][batch["labels"] != NO_LABEL].mean())
        for _ in range(UPDATES):
            engine.train_batch(batch, policy_loss, micro_batches=PARTS)
        shares.append(share)
        mean = fmean(shares)
        done = len(shares) == 5 and mean > goal
        if dist.get_rank() == 0 and (number % 10 == 1 or done):
            told = f"{mean:5.1%} right, entropy {entropy:.2f}, importance weights 1 ± {off:.0e}"
            print(f"round {number:3}, {time.perf_counter() - start:3.0f} s: {told}", flush=True)
        if done:
            return
    raise SystemExit(f"after {MOST_ROUNDS} rounds only {fmean(shares):.1%} of the answers are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", type=float, default=0.9, help="end when this share of five rounds' answers is right")
    goal = parser.parse_args().goal
    if "RANK" not in os.environ:
        parser.error("start its processes by torchrun --nproc-per-node 2 examples/reinforce.py")
    dist.init_process_group("gloo")
    config = ModelConfig(len(CHARACTERS), 64, 192, num_layers=2, num_heads=4, max_length=16)
    options = EngineOptions(optimizer=OptimizerConfig(LearningRate(2e-3)), device="cpu")
    engine = Engine(decoder_units(config), config.hidden_size, Layout(pp=dist.get_world_size()), options)
    learn(engine, goal)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
