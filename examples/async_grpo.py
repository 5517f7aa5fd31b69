"""Generate and train at the same time: two processes answer sums, two others learn from the answers, both without rest.

The task is that of reinforce.py. Ranks 0 and 1 hold the engine that learns, ranks 2 and 3 one that answers. When the
first has learned it sends its weights; the other stops between two tokens, takes them and goes on. No answer is learned
from that is older than a bound: a round of answers begins only once the weights are new enough for it, and the version
that every token bears is looked at again before each step.

    torchrun --nproc-per-node 4 examples/async_grpo.py [--compare]
"""

import argparse
import itertools
import json
import os
import random
import time
from collections import Counter, deque
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from penstock import Engine, EngineOptions, GenerateOptions, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.data import NO_LABEL
from penstock.model import decoder_units, token_statistics
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig

CHARACTERS = "0123456789+=\n"
END = CHARACTERS.index("\n")
WARM_UP_STEPS, MOST_ROUNDS = 20, 400
NUM_SUMS, NUM_ANSWERS = 32, 16  # of a round: different sums, and answers to each
UPDATES = 1  # steps on the answers of a round
CLIP = 0.2  # how far an importance ratio may move away from 1 before its answer stops to count
EXPLORE = 0.05  # what a nat of entropy is worth, in units of a normalised reward
PARTS = MicroBatchSpec(num=4)
SYNCHRONOUS = UPDATES - 1  # the age that the answers of the newest weights reach in their last step
AT_ONCE = GenerateOptions(rows_per_slot=NUM_SUMS * NUM_ANSWERS // 2)
CONFIG = ModelConfig(len(CHARACTERS), 64, 192, num_layers=2, num_heads=4, max_length=16)


class Answer(NamedTuple):
    """What the model wrote after a prompt, how likely it was then, and the oldest weights that it was drawn from."""

    prompt: list[int]
    tokens: list[int]
    log_probs: list[float]
    advantage: float
    version: int


class Run(NamedTuple):
    """One run: how many steps an answer may age, what emulated devices take longer, and how answers travel."""

    name: str
    bound: int
    goal: float
    token_s: float
    step_s: float
    store: Any


def sums(numbers: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, each with the one answer that is right."""
    pairs = [(numbers.randrange(10), numbers.randrange(10)) for _ in range(count)]
    texts = [(f"{a}+{b}=", f"{a + b}\n") for a, b in pairs]
    return [([*map(CHARACTERS.index, prompt)], [*map(CHARACTERS.index, answer)]) for prompt, answer in texts]


def batch_of(answers: list[Answer]) -> PackedBatch:
    """Prompts and answers packed; what is known of an answer's token stands where it is a label, at the one before."""

    def beside(answer: Answer, values: list, nothing: float) -> list:
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
    """Minus the clipped gain of all tokens and what their entropy is worth. Source: arXiv 1707.06347, equation 7."""
    new = token_statistics(logits, microbatch["labels"])
    ratios, advantages = torch.exp(new.log_probs - microbatch["log_probs"]), microbatch["advantages"]
    gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gains + EXPLORE * new.entropies)[microbatch["labels"] != NO_LABEL].sum()


def answer_sums(run: Run, trainer: Engine, sampler: Engine) -> None:
    """Answer round after round, with the newest weights that there are, until the trainer has learned enough."""
    numbers = random.Random(1)

    def interrupt() -> bool:
        time.sleep(run.token_s)
        return trainer.weights_wait(sampler)

    def take_weights() -> bool:
        trainer.send_weights(sampler)
        return not run.store.check([f"{run.name}/done"])

    take_weights()
    for number in itertools.count():
        # At the last step on round `number` the weights will have seen this many.
        while WARM_UP_STEPS + UPDATES * (number + 1) - 1 - sampler.version > run.bound:
            if not take_weights():
                return
        asked = sums(numbers, NUM_SUMS)
        params = SamplingParams(max_new_tokens=4, end_tokens=(END,), num_samples=NUM_ANSWERS, seed=number)
        start = time.perf_counter()
        written = sampler.generate([prompt for prompt, _ in asked], params, AT_ONCE, interrupt=interrupt)
        while not written.is_complete:
            if not take_weights():
                return
            written = sampler.resume()
        right = torch.tensor([list(one.tokens) == asked[one.prompt][1] for one in written]).float().view(NUM_SUMS, -1)
        took_s = time.perf_counter() - start
        advantages = ((right - right.mean(1, keepdim=True)) / (right.std(1, keepdim=True) + 1e-4)).flatten().tolist()
        every = ((one, gain, min(one.versions)) for one, gain in zip(written, advantages, strict=True))
        answers = [(asked[one.prompt][0], one.tokens, one.log_probs, gain, oldest) for one, gain, oldest in every]
        if sampler.grid.rank == 0:
            run.store.set(f"{run.name}/{number}", json.dumps([float(right.mean()), took_s, answers]))


def learn(run: Run, trainer: Engine, sampler: Engine) -> float:
    """Learn from round after round of answers until the share of right ones passes the goal; returns the seconds."""
    numbers = random.Random(0)
    for _ in range(WARM_UP_STEPS):
        given = [Answer(prompt, tokens, [0.0] * len(tokens), 0.0, 0) for prompt, tokens in sums(numbers, NUM_SUMS)]
        trainer.train_batch(batch_of(given), micro_batches=PARTS)
    trainer.send_weights(sampler)
    ages, shares, times, start = Counter[int](), deque[float](maxlen=5), [0.0, 0.0], time.perf_counter()
    for number in range(MOST_ROUNDS):
        share, answering_s, rows = json.loads(run.store.get(f"{run.name}/{number}"))
        answers, begin = [Answer(*row) for row in rows], time.perf_counter()
        for _ in range(UPDATES):
            kept = [answer for answer in answers if trainer.version - answer.version <= run.bound]
            ages.update(trainer.version - answer.version for answer in kept)
            if kept:
                trainer.train_batch(batch_of(kept), policy_loss, micro_batches=PARTS)
            time.sleep(run.step_s)
        times = [times[0] + answering_s, times[1] + time.perf_counter() - begin]
        shares.append(share)
        done = len(shares) == 5 and fmean(shares) > run.goal
        if trainer.grid.rank == 0:
            run.store.delete_key(f"{run.name}/{number - 1}")
            if done:
                run.store.set(f"{run.name}/done", "")
            if number % 10 == 0 or done:
                too_old = UPDATES * NUM_SUMS * NUM_ANSWERS * (number + 1) - ages.total()
                seen = f"{fmean(shares):5.1%} right, answers by age {dict(sorted(ages.items()))}, {too_old} too old"
                told = f"{run.name} round {number + 1:3}, {time.perf_counter() - start:3.0f} s: {seen}"
                print(f"{told}; {times[0] / (number + 1):.2f} + {times[1] / (number + 1):.2f} s a round", flush=True)
        trainer.send_weights(sampler)
        if done:
            return time.perf_counter() - start
    raise SystemExit(f"after {MOST_ROUNDS} rounds only {fmean(shares):.1%} of the answers are right")


def execute(run: Run) -> float:
    """Make both engines on every rank, and do this rank's part; the seconds to the goal, where it learns."""
    units, options = decoder_units(CONFIG), EngineOptions(optimizer=OptimizerConfig(LearningRate(2e-3)), device="cpu")
    trainer = Engine(units, CONFIG.hidden_size, Layout(pp=2, ranks=range(2)), options)
    sampler = Engine(units, CONFIG.hidden_size, Layout(pp=2, ranks=range(2, 4)), options, learns=False)
    took_s = learn(run, trainer, sampler) if trainer.is_here else answer_sums(run, trainer, sampler) or 0.0
    sampler.close()
    trainer.close()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", type=float, default=0.9, help="end when this share of five rounds' answers is right")
    parser.add_argument("--bound", type=int, default=UPDATES + SYNCHRONOUS, help="steps that an answer may age")
    parser.add_argument("--compare", action="store_true", help="with the synchronous loop, on emulated devices")
    parser.add_argument("--token-s", type=float, default=0.12, help="what a token takes longer there")
    parser.add_argument("--step-s", type=float, default=0.6, help="what a step takes longer there")
    given = parser.parse_args()
    if given.bound < SYNCHRONOUS:
        parser.error(f"--bound {given.bound} is too small: {UPDATES} steps on the newest answers need {SYNCHRONOUS}")
    if os.environ.get("WORLD_SIZE") != "4":
        parser.error("start its processes by torchrun --nproc-per-node 4 examples/async_grpo.py")
    store, rank, world_size = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    emulated = (given.token_s, given.step_s) if given.compare else (0.0, 0.0)
    bounds = ({"synchronous": SYNCHRONOUS} if given.compare else {}) | {"asynchronous": given.bound}
    times = [execute(Run(name, bound, given.goal, *emulated, store)) for name, bound in bounds.items()]
    if rank == 0 and given.compare:
        print(f"time to {given.goal:.0%} right: {times[0]:.0f} s and {times[1]:.0f} s, {times[0] / times[1]:.2f} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
