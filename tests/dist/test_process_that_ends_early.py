"""A process that ends before it makes its engine: the others say so at once, instead of waiting for it."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from penstock import Engine, Layout
from tests.dist.launch import run_outcomes
from tests.hugging_face import make_model

# The others would wait this long.
TIMEOUT_S = 60.0
# Seconds on a machine that may have several other things to do.
LIMIT_S = 10.0


def make(rank: int, folder: Path | None, others_are_late: bool, store: Path | None = None) -> str:
    if store is not None:
        # As torchrun's scripts on GPUs have it, with NCCL in the second place.
        dist.destroy_process_group()
        dist.init_process_group("cpu:gloo,meta:gloo", init_method=store.as_uri(), rank=rank, world_size=2)
    if rank == 1:
        raise OSError("shard 7 cannot be read")
    if others_are_late:
        # They find its connection closed, where otherwise they wait for its word.
        time.sleep(2.0)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        if folder is None:
            layers = [nn.Embedding(16, 8), nn.Linear(8, 16)]
            Engine.from_layers(layers, 8, Layout(dp=2), timeout_s=TIMEOUT_S, device="cpu")
        else:
            Engine.from_hf(folder, Layout(dp=2), timeout_s=TIMEOUT_S, device="cpu")
    assert time.monotonic() - start < LIMIT_S
    return str(caught.value)


@pytest.mark.parametrize(
    ("pretrained", "others_are_late", "is_mixed"),
    [(False, False, False), (False, True, False), (True, False, False), (False, False, True)],
)
def test_a_process_that_ends_before_its_engine_is_named(
    pretrained: bool, others_are_late: bool, is_mixed: bool, tmp_path: Path
) -> None:
    if pretrained:
        make_model("llama").save_pretrained(tmp_path)
    folder, store = tmp_path if pretrained else None, tmp_path / "store" if is_mixed else None
    first, second = run_outcomes(2, make, folder, others_are_late, store)
    assert first.value == (
        "rank 1 has ended, or has not reached the construction of the engine in time; its own output says why"
    )
    assert second.error is not None and "OSError: shard 7 cannot be read" in second.error
