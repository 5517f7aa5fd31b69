"""The example that brings a plain training loop: its losses are Penstock's, in one process and in stages."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "bring_your_script.py"


@pytest.mark.shows(118)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_loop_and_penstock_print_equal_losses(num_ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    if num_ranks == 1:
        command = [sys.executable]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLE)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"step (\d+): (\d\.\d{4}) plain, (\d\.\d{4}) with Penstock", done.stdout)
    assert [int(step) for step, _, _ in losses] == list(range(1, 11))
    assert all(plain == ours for _, plain, ours in losses)
    assert float(losses[-1][2]) < float(losses[0][2]) - 0.5


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
