"""What every test shares: one thread, and GPU tests only where there is a GPU."""

import gc
import os

# Set before torch is first imported, here and in the processes the tests start: sums must not depend on how many
# cores the machine has, and several ranks share them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

# An example's time says how busy the machine is, not whether it passes.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests marked `gpu` where no CUDA device is found."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Let no collection walk through all that was imported, thousands of tests long."""
    gc.collect()
    gc.freeze()
