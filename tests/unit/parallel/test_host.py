"""What processes ask a store, also where it is gone or silent, and where this process ends."""

import threading

from penstock.parallel.host import answer_of_store


def test_a_store_that_is_gone_or_silent_gives_what_is_said_for_it() -> None:
    ended = threading.Event()

    def gone() -> bool:
        raise RuntimeError("connection reset")

    assert answer_of_store(lambda: True, 60)
    assert answer_of_store(gone, 60, if_gone=True)
    assert answer_of_store(lambda: ended.wait() and False, 0.01, if_silent=True)
    ended.set()
