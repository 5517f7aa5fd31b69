"""A model in two stages under Ray Train, which starts both workers anew, from the last checkpoint, when it loses one.

    pip install ray && python examples/ray_trainer.py --folder runs/ray

Over several hosts `--folder` must be one that all of them see. `--lose-worker-after 20` kills a worker after that step.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

try:
    import ray.train  # pyright: ignore[reportMissingImports]
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    print(f"ray_trainer.py needs Ray ({error}); install it by: pip install ray", file=sys.stderr)
    sys.exit(2)
import torch
from torch import nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch


def train(config: dict[str, Any]) -> None:
    """The loop of each worker; Ray has set RANK, WORLD_SIZE and torch's process group."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    layers = [nn.Embedding(256, 64), *blocks, nn.Linear(64, 256)]
    engine = Engine.from_layers(layers, hidden_size=64, layout=Layout(pp=2))
    folder, lost = Path(config["folder"]) / "checkpoints", Path(config["folder"]) / "lost-a-worker"
    if folder.exists():
        engine.load(folder)
    rank = ray.train.get_context().get_world_rank()
    while engine.step < config["steps"]:
        lines = [f"{engine.step + line} plus {line} is {engine.step + 2 * line}\n" for line in range(32)]
        batch = PackedBatch.from_documents([list(line.encode()) for line in lines])
        result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
        if engine.step % 10 == 0:
            engine.save(folder)
            ray.train.report({"step": engine.step, "loss": result.loss})
            if rank == 0:
                print(f"step {engine.step}: {result.loss:.4f} nats a byte")
        if rank == 1 and engine.step == config["lose_worker_after"] and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/ray", help="where checkpoints and Ray's own records are kept")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lose-worker-after", type=int, metavar="STEP", help="kill a worker once, after this step")
    options = parser.parse_args()
    folder = Path(options.folder).resolve()
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),  # left out, Ray takes nccl where there are GPUs
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(
            name="penstock", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
