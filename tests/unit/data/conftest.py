"""A renderer of chat templates that the tests of a file share."""

from collections.abc import Iterator

import pytest

from penstock.data.guard import Guard


@pytest.fixture(scope="module")
def one_renderer() -> Iterator[None]:
    """One process for all templates of a file, where each corpus would start its own."""
    shared, started = Guard(), Guard._started
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "_started", lambda _: started(shared))
        yield
