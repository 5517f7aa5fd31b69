"""Your own layers in two stages:  torchrun --nproc-per-node 2 examples/own_layers.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch

dist.init_process_group("gloo")
torch.manual_seed(0)
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
layers = [nn.Embedding(256, 64), *blocks, nn.Linear(64, 256)]
engine = Engine.from_layers(layers, hidden_size=64, layout=Layout(pp=2))

lines = Path(__file__).read_bytes().split(b"\n")  # of unequal lengths, and none is padded
batch = PackedBatch.from_documents([list(line) for line in lines if line])
for _ in range(60):
    result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
if dist.get_rank() == 0:
    print(f"step {result.step}: {result.loss:.3f} nats a byte, gradient norm {result.grad_norm:.3f}")
dist.destroy_process_group()
