"""Group relative policy optimisation: a model learns to count up from a digit by reward alone, in two stages.

Each prompt is answered many times over, and an answer's advantage is how much better it did than its group. The policy
is held back in two ways: an answer's importance ratio, how much likelier the model has made it since it was drawn,
counts up to a clip alone, and a second engine with the weights of the beginning says how far it has moved in all.

    torchrun --nproc-per-node 2 examples/grpo.py
"""

import argparse
import os
import random
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Engine, EngineOptions, Layout, Metric, MicroBatchSpec, PackedBatch, SamplingParams, token_scores
from penstock.data import NO_LABEL
from penstock.model import decoder_units, token_log_probs
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig

END = 10  # follows an answer's last digit
NUM_PROMPTS, NUM_ANSWERS = 16, 8  # of a round: prompts, and answers to each
MOST_ROUNDS = 200
UPDATES = 2  # steps on the answers of a round
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 1.0  # of draws, and so of every log-probability that is compared with theirs
BETA = 0.001  # what a nat away from the reference costs, in units of an advantage
PARTS = MicroBatchSpec(num=2)


class Answer(NamedTuple):
    """What the model wrote after a prompt, each token's log-probability then, and the advantage over its group."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    advantage: float


def batch_of(answers: list[Answer]) -> PackedBatch:
    """Prompts and answers packed; only the answers' tokens are labels, and what is known of each stands beside it."""

    def beside(answer: Answer, values: list, nothing: float) -> list:  # where a token is a label: at the one before it
        return [nothing] * (len(answer.prompt) - 1) + values + [nothing]

    return PackedBatch.from_sequences(
        {
            "tokens": [answer.prompt + answer.tokens for answer in answers],
            "labels": [beside(answer, answer.tokens, NO_LABEL) for answer in answers],
            "log_probs": [beside(answer, answer.log_probs, 0.0) for answer in answers],
            "advantages": [beside(answer, [answer.advantage] * len(answer.tokens), 0.0) for answer in answers],
        }
    )


def advantages(rewards: Tensor) -> Tensor:
    """How much better each answer did than its group, of rewards [groups, answers]. Source: arXiv 2402.03300, 4.1.2."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def policy_loss(
    logits: Tensor, microbatch: PackedBatch, clip_low: float, clip_high: float, beta: float
) -> tuple[Tensor, dict[str, Metric]]:
    """The sum over the answers' tokens of minus the clipped gain, and of beta times the divergence from the reference.

    The engine divides it by the number of these tokens, so a long answer counts for more than a short one.
    Source: arXiv 2402.03300, equations 3 and 4; the two clips and the mean over tokens: arXiv 2503.14476, equation 8;
    the ratio before the divergence: arXiv 2512.02556, section 3.1.
    """
    answered = microbatch["labels"] != NO_LABEL
    log_probs = token_log_probs(logits, microbatch["labels"], TEMPERATURE)
    ratios, gains = torch.exp(log_probs - microbatch["log_probs"]), microbatch["advantages"]
    kept = ratios.clamp(1 - clip_low, 1 + clip_high)
    above = microbatch["reference"] - log_probs
    divergences = ratios * (above.exp() - above - 1)  # the ratio makes the gradient unbiased
    losses = beta * divergences - torch.minimum(ratios * gains, kept * gains)
    clipped = (ratios * gains > kept * gains).float()
    count = int(answered.sum())
    return losses[answered].sum(), {
        "divergence": Metric(divergences[answered].mean(), "mean", weight=count),
        "clipped": Metric(clipped[answered].mean(), "mean", weight=count),
    }


def reward(prompt: list[int], tokens: list[int]) -> float:
    """The share of the right answer with which this one begins; it counts up to 9 and ends."""
    right = [*range(prompt[0] + 1, 10), END]
    num_right = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(tokens))
    return num_right / len(right)


def answers_and_reward(engine: Engine, numbers: random.Random, seed: int) -> tuple[list[Answer], float]:
    """The model's own answers to new prompts, and their mean reward."""
    prompts = [[numbers.randrange(10)] for _ in range(NUM_PROMPTS)]
    params = SamplingParams(10, temperature=TEMPERATURE, end_tokens=(END,), num_samples=NUM_ANSWERS, seed=seed)
    drawn = engine.generate(prompts, params)
    rewards = torch.tensor([reward(prompts[one.prompt], list(one.tokens)) for one in drawn]).view(NUM_PROMPTS, -1)
    every = zip(drawn, advantages(rewards).flatten().tolist(), strict=True)
    answers = [Answer(prompts[one.prompt], list(one.tokens), list(one.log_probs), gain) for one, gain in every]
    return answers, float(rewards.mean())


def learn(engine: Engine, reference: Engine, goal: float) -> None:
    """Draw, score by the reference and learn, until the mean reward passes the goal."""
    numbers, start = random.Random(0), time.perf_counter()
    loss = partial(policy_loss, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, beta=BETA)
    for number in range(1, MOST_ROUNDS + 1):
        answers, mean = answers_and_reward(engine, numbers, seed=number)
        batch = batch_of(answers)
        # Nothing has been learned since the answers were drawn, so scoring finds what generation said of them.
        scores = engine.forward(batch, token_scores(TEMPERATURE), micro_batches=PARTS, broadcast=True)
        off = float(torch.exp(scores["log_probs"] - batch["log_probs"]).sub(1).abs().max())
        first = reference.forward(batch, token_scores(TEMPERATURE), micro_batches=PARTS, broadcast=True)
        batch = batch.with_key("reference", first["log_probs"])
        for _ in range(UPDATES):
            result = engine.train_batch(batch, loss, micro_batches=PARTS)
        if dist.get_rank() == 0 and (number % 10 == 1 or mean > goal):
            moved = (
                f"{result.metrics['divergence']:.2f} nats from the reference, {result.metrics['clipped']:.0%} clipped"
            )
            drawn = f"reward {mean:.3f}, importance ratios 1 ± {off:.0e}"
            print(f"round {number:3}, {time.perf_counter() - start:3.0f} s: {drawn}, {moved}", flush=True)
        if mean > goal:
            return
    raise SystemExit(f"after {MOST_ROUNDS} rounds the mean reward is only {mean:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", type=float, default=0.8, help="end when the mean reward of a round is higher")
    parser.add_argument("--reproducible", action="store_true", help="importance ratios of fresh answers are exactly 1")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start its processes by torchrun --nproc-per-node 2 examples/grpo.py")
    dist.init_process_group("gloo")
    config = ModelConfig(11, 64, 192, num_layers=2, num_heads=4, max_length=16)
    optimizer = OptimizerConfig(LearningRate(4e-3))
    options = EngineOptions(optimizer=optimizer, device="cpu", reproducible=given.reproducible)
    units, layout = decoder_units(config), Layout(pp=dist.get_world_size())
    engine = Engine(units, config.hidden_size, layout, options)
    # Initial weights depend on the seed alone; of a model in a folder it would be another `Engine.from_hf`.
    reference = Engine(units, config.hidden_size, layout, options, learns=False)
    learn(engine, reference, given.goal)
    reference.close()
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
