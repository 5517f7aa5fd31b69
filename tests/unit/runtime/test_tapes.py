"""Tapes are held from F to the last backward, and nobody gets one that is not held."""

import gc
import weakref

import pytest

from penstock.runtime.stage import Tapes


@pytest.mark.shows(16)
def test_a_tape_is_given_while_it_is_held_and_only_then() -> None:
    tapes = Tapes()
    with pytest.raises(KeyError, match="no tape of microbatch 3 of stage 1; live are those of microbatch none"):
        tapes[1, 3]
    made = tapes.make(1, 3)
    assert tapes[1, 3] is made
    assert not made.segments
    with pytest.raises(KeyError, match="microbatch 4 of stage 1; live are those of microbatch 3 of stage 1"):
        tapes[1, 4]
    assert tapes.pop((1, 3)) is made
    with pytest.raises(KeyError):
        tapes.pop((1, 3))
    assert len(tapes) == 0


@pytest.mark.shows(16)
def test_what_is_taken_or_cleared_is_gone() -> None:
    tapes = Tapes()
    alive = [weakref.ref(tapes.make(0, m)) for m in range(3)]
    tapes.pop((0, 1))
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, True]
    tapes.clear()
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert tapes.peak == 3
