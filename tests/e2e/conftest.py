"""What is demanded of every command that the tests call, whatever else they look at."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

OF_RUNS = ("PENSTOCK", "TORCHELASTIC", "MASTER", "RANK", "WORLD_SIZE", "LOCAL_", "GLOO", "OMP")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True, scope="module")
def process_kept() -> Iterator[None]:
    """Commands leave the process that calls them as it was: the next must not take itself for a worker of the first."""
    before = of_process()
    yield
    assert of_process() == before


def of_process() -> Mapping[str, Any]:
    """The variables by which processes of a run know each other, and the signal handlers."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(OF_RUNS)}
    return {**variables, **{number.name: signal.getsignal(number) for number in SIGNALS}}
