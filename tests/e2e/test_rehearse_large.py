"""A rank of the largest published run is rehearsed in seconds, on one core."""

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fork_server import Forked, run_command

pytestmark = pytest.mark.subject("src/penstock/**/*.py")


def run_and_measure(arguments: Sequence[str]) -> int:
    """`run_command`, which at its end says how many seconds of a core and how many KiB of memory it took."""
    code, used = run_command(arguments), resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]), file=sys.stderr)
    return code


def test_a_rank_of_16384_devices_takes_half_a_minute_of_one_core(tmp_path: Path) -> None:
    # Llama 3.1 405B, arXiv 2407.21783, on pp 16, tp 8, dp 128; the other ranks of a stage do the same.
    sizes = {"vocab": 128256, "hidden": 16384, "intermediate": 53248}
    model = "".join(f"{name}_size = {size}\n" for name, size in sizes.items())
    run = tmp_path / "run.toml"
    run.write_text(
        f"""output = "runs/none"
[model]
{model}num_layers = 126
num_heads = 128
num_kv_heads = 8
max_length = 8192
[data]
corpus = "nowhere"
sequence_length = 8192
num_sequences = 2048
[parallel]
pp = 16
tp = 8
dp = 128
[optimizer]
zero = true
[train]
num_microbatches = 16
precision = "bf16"
"""
    )
    words = ["rehearse", str(run), "--device", "cuda", "--rank", "127", "--json"]
    process = Forked(run_and_measure, words, environ=os.environ)
    out, err = process.communicate()
    assert process.returncode == 0, err
    [found], (used_s, most_kib) = json.loads(out), json.loads(err.splitlines()[-1])
    assert used_s < 30 and most_kib < 4 << 20
    # A stage of 8 layers keeps 3.2 billion parameters of each in bf16, cut by tp; ZeRO shares the optimizer out.
    assert found["most_bytes"]["parameters"] == pytest.approx(2 * 8 * 3.187e9 / 8, rel=0.1)
    assert found["most_bytes"]["optimizer"] < found["most_bytes"]["parameters"] / 16
