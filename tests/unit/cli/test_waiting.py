"""What takes long says so, and what ends says nothing more."""

import io
import re
import threading

from penstock.cli.output import waiting


class Heard(io.StringIO):
    """A file that lets a test wait for its second line."""

    def __init__(self) -> None:
        super().__init__()
        self.has_two = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\n") >= 2:
            self.has_two.set()
        return written


def test_a_long_block_says_how_long_it_has_taken_until_it_ends() -> None:
    file, before = Heard(), threading.active_count()
    with waiting("reading weights", file, every_s=0.01):
        assert file.has_two.wait(60)
    assert threading.active_count() == before
    assert all(re.fullmatch(r"reading weights: \d+ s so far", line) for line in file.getvalue().splitlines())


def test_a_short_block_and_a_silent_rank_say_nothing() -> None:
    file, before = io.StringIO(), threading.active_count()
    with waiting("reading weights", file):
        pass
    with waiting("reading weights", file, speaks=False):
        assert threading.active_count() == before
    assert file.getvalue() == ""
