"""A training loop of your own, over packed sequences: python examples/from_a_training_loop.py

In two stages: torchrun --nproc-per-node 2 examples/from_a_training_loop.py
"""

import os
import random
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import penstock as ps

WIDTH, HEADS, FOLDER = 64, 4, "runs/sums"


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens, sequences):  # [T]: all sequences of a microbatch end to end
        return self.tokens(tokens) + self.positions(sequences.positions)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))

    def forward(self, x, sequences):  # [T, WIDTH]
        qkv = self.qkv(self.norm(x)).view(len(x), 3 * HEADS, -1).transpose(0, 1).split(sequences.lengths, dim=1)
        attended = torch.cat([scaled_dot_product_attention(*own.chunk(3), is_causal=True) for own in qkv], dim=1)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.mlp(x)


def batch_of(seed):
    draw = random.Random(seed)
    pairs = [(draw.randrange(1000), draw.randrange(1000)) for _ in range(32)]
    return ps.PackedBatch.from_documents([list(f"{a}+{b}={a + b}\n".encode()) for a, b in pairs])


num_ranks, num_steps = int(os.environ.get("WORLD_SIZE", "1")), int((sys.argv[1:] or ["20"])[0])
if num_ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [Embed(), *(Block() for _ in range(4)), nn.Linear(WIDTH, 128)]
adamw, cosine = torch.optim.AdamW, torch.optim.lr_scheduler.CosineAnnealingLR
optimizer = ps.OptimizerConfig(factory=partial(adamw, lr=3e-3), scheduler=partial(cosine, T_max=40), clip_norm=1.0)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)  # of (logits, labels)

engine = ps.Engine.from_layers(layers, hidden_size=WIDTH, layout=ps.Layout(pp=num_ranks), optimizer=optimizer)
if os.path.exists(FOLDER):
    engine.load(FOLDER)
for step in range(engine.step + 1, num_steps + 1):
    result = engine.train_batch(batch_of(step), loss_fn, micro_batches=ps.MicroBatchSpec(num=4))
    if step % 5 == 0:
        validation = engine.evaluate(batch_of(0), loss_fn).loss
        if engine.grid.rank == 0:
            numbers = f"loss {result.loss:.4f}, rate {result.learning_rate:.5f}, validation {validation:.4f}"
            print(f"step {step}: {numbers}")
engine.save(FOLDER)
if num_ranks > 1:
    dist.destroy_process_group()
