"""Text about images, unequally many for each text, or none:  torchrun --nproc-per-node 2 examples/vision_language.py

The key `images` has a row per image. The first stage alone looks at them, and puts each image's patches in the place of
the text's tokens `PATCH`. The model learns to say in which corner each image is bright.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Engine, Layout, LearningRate, MicroBatchSpec, OptimizerConfig, PackedBatch
from penstock.data import NO_LABEL
from penstock.model import Sequences

WIDTH, HEADS, SIZE, NUM_PATCHES = 32, 4, 8, 4
PATCH, ASK, VOCAB = 4, 5, 6  # 0 to 3 are the corners


class LookAndRead(nn.Module):
    """Token ids and images -> the stream: the words' embeddings, and in the place of `PATCH` the images' patches."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.patches, self.corners = nn.Conv2d(1, WIDTH, SIZE // 2, SIZE // 2), nn.Embedding(NUM_PATCHES, WIDTH)

    def forward(self, tokens: Tensor, images: Tensor, sequences: Sequences) -> Tensor:
        seen = self.patches(images).flatten(2).transpose(1, 2) + self.corners.weight
        x = self.words(tokens).masked_scatter((tokens == PATCH)[:, None], seen)
        return x + self.places(sequences.positions)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        seen = [
            F.scaled_dot_product_attention(*part.chunk(3, -1), is_causal=True)
            for part in qkv.split(list(sequences.lengths), 1)
        ]
        x = x + self.out(torch.cat(seen, 1).transpose(0, 1).flatten(1))
        return x + self.mlp(x)


def pictures(generator: torch.Generator) -> PackedBatch:
    """Texts on none to three images: their patches, then a question and the bright corner of each."""
    texts, labels, images = [], [], []
    for _ in range(24):
        corners = torch.randint(0, 4, (int(torch.randint(0, 4, (1,), generator=generator)),), generator=generator)
        seen = torch.rand(len(corners), 1, SIZE, SIZE, generator=generator)
        for image, corner in zip(seen, corners.tolist(), strict=True):
            image[0].unflatten(0, (2, -1)).unflatten(2, (2, -1))[corner // 2, :, corner % 2] += 1.0
        before = [PATCH] * (NUM_PATCHES * len(corners)) + [ASK]
        text = [*before, *corners.tolist()[:-1]]
        texts.append(torch.tensor(text))
        labels.append(torch.tensor([NO_LABEL] * (len(text) - len(corners)) + corners.tolist()))
        images.append(seen)
    return PackedBatch.from_sequences({"tokens": texts, "labels": labels, "images": images})


if __name__ == "__main__":
    if "RANK" not in os.environ:
        argparse.ArgumentParser(usage=__doc__).error("start its processes by torchrun")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [LookAndRead(), Block(), Block(), Block(), nn.Linear(WIDTH, VOCAB)]
    engine = Engine.from_layers(layers, WIDTH, Layout(pp=2), optimizer=OptimizerConfig(LearningRate(0.01)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(80):
        result = engine.train_batch(pictures(generator), micro_batches=MicroBatchSpec(num=4))
    if dist.get_rank() == 0:
        print(f"step {result.step}: {result.loss:.4f} nats a corner, gradient norm {result.grad_norm:.4f}")
    dist.destroy_process_group()
