"""What processes ask a store, also where it is gone or silent, and what they do and gather together."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.parallel.host import answer_of_store, on_all_ranks


def test_a_store_that_is_gone_or_silent_gives_what_is_said_for_it() -> None:
    ended = threading.Event()

    def gone() -> bool:
        raise RuntimeError("connection reset")

    assert answer_of_store(lambda: True, 60)
    assert answer_of_store(gone, 60, if_gone=True)
    assert answer_of_store(lambda: ended.wait() and False, 0.01, if_silent=True)
    ended.set()


def test_an_act_is_over_before_the_context_in_which_ranks_wait_for_each_other() -> None:
    events: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        events.append("begin")
        yield
        events.append("end")

    def gather(value: Any) -> list[Any]:
        events.append("gather")
        return [value]

    on_all_ranks(lambda: events.append("act"), gather, within=waiting())
    assert events == ["act", "begin", "gather", "end"]
