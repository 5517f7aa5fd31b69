"""What depends on a processor's instructions, tested once more with those of an older one."""

import os
import subprocess
import sys

import pytest
import torch
from benchmarks.int8 import AVX2, INSTRUCTIONS

from tests.subjects import ROOT

_TESTS = (
    "tests/unit/model/test_linear.py",
    "tests/unit/model/test_packed_weights.py",
    "tests/unit/model/test_quantized.py",
    "tests/unit/model/test_reproducible.py",
    "tests/dist/test_quantized.py::"
    "test_tokens_of_every_kind_of_product_have_the_same_bits_in_any_pipeline_slot_and_batch",
)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="every test runs with no more than AVX2"
)
def test_products_of_every_kind_keep_their_promises_with_avx2_alone() -> None:
    # Libraries read these variables once, so a process of its own is needed.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *_TESTS]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | INSTRUCTIONS[AVX2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
