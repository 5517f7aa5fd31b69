"""A reward model from comparisons: transformers' layers in two stages learn to tell right counts from wrong ones.

A pair of texts, the better and the worse one, is one item of the batch with two sequences, so no microbatch parts them;
a text's reward is what the model's head gives for its last token. With a folder of your own in place of the small one
that is made here, such as a language model saved with a head for one label, the rest stays as it is.

    torchrun --nproc-per-node 2 examples/reward_model.py
"""

import argparse
import os
import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock import Engine, EngineOptions, Layout, Metric, MicroBatchSpec, PackedBatch
from penstock.settings import LearningRate, OptimizerConfig

STEPS, NUM_PAIRS = 80, 32
CENTRE = 0.01  # holds the rewards around 0, which comparisons alone do not determine
PARTS = MicroBatchSpec(num=4)

Pair = tuple[list[int], list[int]]
"""The better and the worse of two texts, as token ids."""


def batch_of(pairs: list[Pair], margins: list[float] | None = None) -> PackedBatch:
    """One item for each pair: better, then worse; `margins` say by how much, where that is known."""
    batch = PackedBatch.from_sequences({"tokens": [list(pair) for pair in pairs]})
    return batch.with_key("margins", torch.tensor(margins or [0.0] * len(pairs)), "item")


def rewards_of(output: Tensor, microbatch: PackedBatch) -> Tensor:
    """The reward of each text, of outputs [tokens, 1]."""
    return torch.stack([own[-1, 0] for own in output.split(microbatch.sequence_lengths())])


def num_pairs(microbatch: PackedBatch) -> float:
    """The loss weight: the loss is the mean over pairs."""
    return float(microbatch.num_items)


def comparison_loss(output: Tensor, microbatch: PackedBatch, centre: float) -> tuple[Tensor, dict[str, Metric]]:
    """The sum over pairs of minus the logarithm of the probability that the better text wins by its margin.

    Source: the Bradley-Terry model as in arXiv 2203.02155, equation 1; margins: arXiv 2307.09288, equation 2.
    """
    rewards = rewards_of(output, microbatch)
    better, worse = rewards[0::2], rewards[1::2]
    losses = -logsigmoid(better - worse - microbatch["margins"]) + centre * (better + worse).square()
    rightly = Metric((better > worse).float().mean(), "mean", weight=microbatch.num_items)
    return losses.sum(), {"accuracy": rightly}


def pairs(numbers: random.Random) -> list[Pair]:
    """Texts that count up from a digit, and the same with one digit changed."""
    found = []
    for _ in range(NUM_PAIRS):
        first = numbers.randrange(8)
        right = list(range(first, numbers.randrange(first + 2, 11)))
        wrong = list(right)
        place = numbers.randrange(1, len(wrong))
        wrong[place] = (wrong[place] + numbers.randrange(1, 10)) % 10
        found.append((right, wrong))
    return found


def learn(engine: Engine) -> None:
    numbers, loss = random.Random(0), partial(comparison_loss, centre=CENTRE)
    for _ in range(STEPS):
        result = engine.train_batch(batch_of(pairs(numbers)), loss, num_pairs, PARTS)
        if dist.get_rank() == 0 and result.step % 20 == 0:
            print(f"step {result.step}: loss {result.loss:.4f}, {result.metrics['accuracy']:.0%} of pairs right")
    unseen = [batch_of(pairs(random.Random(seed))) for seed in (1, 2, 3, 4)]
    told = engine.evaluate(unseen, loss, num_pairs, PARTS)
    texts = [[1, 2, 3, 4], [1, 2, 3, 9]]
    rewards = engine.forward(
        batch_of([(texts[0], texts[1])]), rewards_of, micro_batches=MicroBatchSpec(), broadcast=True
    )
    if dist.get_rank() == 0:
        print(f"{told.metrics['accuracy']:.0%} of new pairs right")
        print(", ".join(f"{text}: {float(own):+.2f}" for text, own in zip(texts, rewards, strict=True)))


def make_model(folder: Path) -> None:
    """A small model with random weights and a head for one label."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start its processes by torchrun --nproc-per-node 2 examples/reward_model.py")
    dist.init_process_group("gloo")
    options = EngineOptions(optimizer=OptimizerConfig(LearningRate(2e-3)), device="cpu")
    with TemporaryDirectory() as own:
        if dist.get_rank() == 0:
            make_model(Path(own))
        folders = [own]
        dist.broadcast_object_list(folders)
        engine = Engine.from_hf(folders[0], Layout(pp=dist.get_world_size()), options, native="auto")
        learn(engine)
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
