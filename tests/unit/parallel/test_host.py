"""What processes ask a store, also where it is gone or silent, and where this process ends."""

import subprocess
import sys
import threading

import pytest

from penstock.parallel.host import answer_of_store


def test_a_store_that_is_gone_or_silent_gives_what_is_said_for_it() -> None:
    ended = threading.Event()

    def gone() -> bool:
        raise RuntimeError("connection reset")

    assert answer_of_store(lambda: True, 60)
    assert answer_of_store(gone, 60, if_gone=True)
    assert answer_of_store(lambda: ended.wait() and False, 0.01, if_silent=True)
    ended.set()


def test_it_is_asked_where_no_thread_starts_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert answer_of_store(lambda: True, 60)


def test_a_process_may_ask_as_it_ends() -> None:
    words = (
        "import atexit; from penstock.parallel.host import answer_of_store as ask; "
        "atexit.register(ask, lambda: True, 60)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
