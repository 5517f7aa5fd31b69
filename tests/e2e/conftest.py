"""What is demanded of every command that the tests call, whatever else they look at."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True, scope="module")
def process_kept() -> Iterator[None]:
    """Commands leave the process that calls them as it was: the next must not take itself for a worker of the first."""
    before = of_process()
    yield
    assert of_process() == before


def of_process() -> Mapping[str, Any]:
    """The environment and the signal handlers; pytest's own variable says which test runs."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**variables, **{number.name: signal.getsignal(number) for number in SIGNALS}}
