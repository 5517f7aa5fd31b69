"""Your own layers in two stages:  torchrun --nproc-per-node 2 examples/own_layers.py"""

import argparse
import os
from pathlib import Path

from torch import distributed, manual_seed, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch

if "RANK" not in os.environ:
    argparse.ArgumentParser(usage=__doc__).error("start its processes by torchrun")
distributed.init_process_group("gloo")
manual_seed(0)
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
layers = [nn.Embedding(256, 64), *blocks, nn.Linear(64, 256)]
engine = Engine.from_layers(layers, hidden_size=64, layout=Layout(pp=2))
# Lines of unequal lengths, and none is padded.
batch = PackedBatch.from_documents([list(line) for line in Path(__file__).read_bytes().split(b"\n") if line])
for _ in range(60):
    result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
if distributed.get_rank() == 0:
    print(f"step {result.step}: {result.loss:.3f} nats a byte, gradient norm {result.grad_norm:.3f}")
distributed.destroy_process_group()
