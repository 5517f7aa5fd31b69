"""A plain PyTorch training loop, and the same with Penstock: python examples/bring_your_script.py

In two stages: torchrun --nproc-per-node 2 examples/bring_your_script.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps

STEPS, RATE, NUM_PARTS = 10, 3e-3, 4
LINES = [list(line)[:64] for line in Path(__file__).read_bytes().split(b"\n") if len(line) > 1][:32]


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return [nn.Embedding(256, 64), *blocks, nn.Linear(64, 256)]


# ---- the loop as it was: one process, gradients added up over four parts of the batch

layers = nn.Sequential(*model())
optimizer = torch.optim.AdamW(layers.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
num_targets, plain = sum(len(line) - 1 for line in LINES), []
for _ in range(STEPS):
    total = 0.0
    for part in range(NUM_PARTS):
        for line in LINES[part::NUM_PARTS]:
            tokens = torch.tensor(line)
            loss = nn.functional.cross_entropy(layers(tokens[:-1]), tokens[1:], reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
    nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    plain.append(total)

# ---- the same with Penstock: as many stages as there are processes

num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
if num_ranks > 1:
    dist.init_process_group("gloo")
options = ps.EngineOptions(
    "1f1b", optimizer=ps.OptimizerConfig(ps.LearningRate(RATE), weight_decay=ps.WeightDecay(0.0))
)
engine = ps.Engine.from_layers(model(), hidden_size=64, layout=ps.Layout(pp=num_ranks), options=options)
batch = ps.PackedBatch.from_documents(LINES)
for expected in plain:
    result = engine.train_batch(batch, micro_batches=ps.MicroBatchSpec(num=NUM_PARTS))
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {result.step}: {expected:.4f} plain, {result.loss:.4f} with Penstock")
if num_ranks > 1:
    dist.destroy_process_group()
