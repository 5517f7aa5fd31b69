"""The device of tests that also run on a CPU: with PENSTOCK_GPU_TESTS_ON_CPU=1, to try their lines without a GPU."""

import os
from collections.abc import Iterator

import pytest

from penstock.engine.precision import deterministic_kernels
from tests.conftest import GPU_TESTS_ON_CPU


@pytest.fixture
def device() -> str:
    return "cpu" if GPU_TESTS_ON_CPU else "cuda"


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time, as under train.deterministic."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic_kernels():
        yield
