"""What a process prints when the run cannot go on: one sentence, and a traceback for the unexpected alone."""

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.main import sentence
from penstock.cli.processes.meeting import Group
from penstock.cli.processes.session import _report_failure, leave_together, reports_first
from penstock.parallel.host import ProcessEnded
from penstock.runtime import PipelineError

GROUP = Group(0, 2, 0, "127.0.0.1", 1, "a test")


@pytest.mark.parametrize("error", [ProcessEnded("rank 1 has ended"), PipelineError("rank 1 has ended")])
def test_a_peer_that_has_ended_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]):
    try:
        raise error from RuntimeError("Connection reset by peer")
    except type(error) as raised:
        _report_failure(GROUP, raised)
    assert capsys.readouterr().err == "penstock: process 0: rank 1 has ended\n"


def test_a_path_that_a_library_gives_in_bytes_is_shown_as_text():
    assert sentence(FileExistsError(17, "File exists", "run/\u00e9".encode())) == "run/\u00e9: file exists"


@pytest.mark.parametrize("kind", [ValueError, PipelineError])
def test_what_would_move_a_terminals_cursor_is_shown_as_text(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    _report_failure(GROUP, kind("caf\x1b[31m\x00 \x9b2J \ttab\r\nsecond"))
    err = capsys.readouterr().err
    assert "caf\\x1b[31m\\x00 \\x9b2J " in err and not set(err) & {"\x1b", "\x00", "\x9b", "\r"}


def test_the_unexpected_has_its_traceback(capsys: pytest.CaptureFixture[str]):
    _report_failure(GROUP, ZeroDivisionError("division by zero"))
    err = capsys.readouterr().err
    assert "Traceback" in err or "ZeroDivisionError" in err
    assert err.endswith("penstock: process 0: division by zero\n")


def test_a_store_that_nobody_writes_to_is_one_sentence_without_its_keys(capsys: pytest.CaptureFixture[str]):
    store = PrefixStore("of the secret", TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=0.1)))
    with pytest.raises(dist.DistError) as caught:
        store.get("never")
    _report_failure(GROUP, caught.value)
    assert capsys.readouterr().err == "penstock: process 0: another process did not answer within 100 ms\n"


def test_the_process_with_the_store_stays_until_the_others_ask_it_nothing_more():
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    other = replace(GROUP, rank=1)
    assert reports_first(store)
    holder = threading.Thread(target=leave_together, args=(store, GROUP, True))
    holder.start()
    assert not reports_first(store)
    holder.join(0.1)
    assert holder.is_alive(), "the other may still ask"
    leave_together(store, other, False)
    holder.join(4.0)
    assert not holder.is_alive(), "nobody asks any more"
