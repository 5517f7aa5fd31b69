"""An encoder and a decoder in four stages:  torchrun --nproc-per-node 4 examples/encoder_decoder.py

It learns to write words backwards. The encoder reads the key `source`; its output travels beside the decoder's stream.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Engine, Layout, LearningRate, MicroBatchSpec, OptimizerConfig, PackedBatch

WIDTH, HEADS, REACH, VOCAB, START = 32, 4, 8, 28, 27


class Attention(nn.Module):
    """Attention of rows to those of their item up to `ahead` later, with T5's bias for each distance in the item."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.distance = nn.LayerNorm(WIDTH), nn.Embedding(2 * REACH + 1, HEADS)
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, item: Tensor, other_item: Tensor, ahead: int = REACH) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        k, v = self.kv(other).unflatten(-1, (HEADS, -1)).transpose(0, 1).chunk(2, -1)
        at, other_at = ((rows[:, None] == rows).tril().sum(1) for rows in (item, other_item))
        steps, unseen = other_at[None] - at[:, None], item[:, None] != other_item
        bias = self.distance(steps.clamp(-REACH, REACH) + REACH).permute(2, 0, 1)
        seen = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(unseen | (steps > ahead), float("-inf")))
        return x + self.out(seen.transpose(0, 1).flatten(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Read(nn.Embedding):
    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        return super().forward(source)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), mlp()

    def forward(self, x: Tensor, source_item: Tensor) -> Tensor:
        x = self.attention(x, x, source_item, source_item)
        return x + self.mlp(x)


class Join(nn.Embedding):
    def forward(self, memory: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(tokens), memory


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.itself, self.source, self.mlp = Attention(), Attention(), mlp()

    def forward(self, x: Tensor, memory: Tensor, item: Tensor, source_item: Tensor) -> tuple[Tensor, Tensor]:
        x = self.itself(x, x, item, item, ahead=0)
        x = self.source(x, memory, item, source_item)
        return x + self.mlp(x), memory


class Write(nn.Linear):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x)


def words(generator: torch.Generator) -> PackedBatch:
    """Words of unequal lengths, and beside the tokens which item each belongs to; 26 ends a word."""
    lengths = torch.randint(3, 9, (32,), generator=generator).tolist()
    source = [torch.randint(0, 26, (n,), generator=generator) for n in lengths]
    target = [torch.cat([torch.tensor([START]), word.flip(0), torch.tensor([26])]) for word in source]
    batch = PackedBatch.from_documents(target)
    items = {"source_item": source, "item": target}
    beside = {name: [torch.full((len(word),), i) for i, word in enumerate(of)] for name, of in items.items()}
    return batch.update(PackedBatch.from_sequences({"source": source, **beside}, batch.ids))


if __name__ == "__main__":
    if "RANK" not in os.environ:
        argparse.ArgumentParser(usage=__doc__).error("start its processes by torchrun")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder, decoder = [EncoderLayer() for _ in range(3)], [DecoderLayer() for _ in range(3)]
    layers = [Read(VOCAB, WIDTH), *encoder, Join(VOCAB, WIDTH), *decoder, Write(WIDTH, VOCAB)]
    engine = Engine.from_layers(layers, WIDTH, Layout(pp=4), optimizer=OptimizerConfig(LearningRate(0.01)))
    for seed in range(80):
        result = engine.train_batch(words(torch.Generator().manual_seed(seed)), micro_batches=MicroBatchSpec(num=8))
    if dist.get_rank() == 0:
        print(f"step {result.step}: {result.loss:.4f} nats a letter, gradient norm {result.grad_norm:.4f}")
    dist.destroy_process_group()
