"""The overlap benchmark's link finds the rate at which the plain step waits for a share that counts, and keeps it."""

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from benchmarks.overlap import FASTEST_BITS, LEAST_SHARE, MOST_SHARE, Figures, Link

from benchmarks import overlap
from penstock.schedule.recording import CollectiveTotal


@dataclass
class FakeNetwork:
    """Notes the rates that it is given, in words of `tc`."""

    rates: list[str] = field(default_factory=list)

    def set_rate(self, rate: str) -> None:
        self.rates.append(rate)


def plain_step(link: Link, compute_s: float, num_bytes: float = 4e7) -> list[Figures]:
    """A step that computes so long and then waits for all its bytes."""
    exposed_s = 8 * num_bytes / link.rate
    return [
        Figures(compute_s + exposed_s, 0.0, CollectiveTotal(exposed=exposed_s, hidden=0.0, num_bytes=int(num_bytes)))
    ]


def link_at(rate: float, fixed: bool = False) -> tuple[Link, FakeNetwork]:
    network = FakeNetwork()
    return Link(cast(Any, network), rate, fixed), network


@pytest.mark.parametrize("compute_s", [1.0, 3.0, 20.0])
def test_the_rate_is_found_and_left_alone_while_the_share_counts(compute_s: float) -> None:
    link, network = link_at(FASTEST_BITS)
    trials = [link.suits(plain_step(link, compute_s)) for _ in range(overlap._NUM_TRIALS)]
    assert trials[1:] == [True] * (len(trials) - 1)
    assert LEAST_SHARE <= overlap._share(plain_step(link, compute_s)) <= MOST_SHARE
    assert len(network.rates) == 1


def test_a_slower_machine_gets_a_slower_link_and_a_faster_one_a_faster() -> None:
    link, _ = link_at(FASTEST_BITS)
    while not link.suits(plain_step(link, 4.0)):
        pass
    before = link.rate
    assert not link.suits(plain_step(link, 8.0))
    slow = link.rate
    assert not link.suits(plain_step(link, 4.0))
    assert slow == pytest.approx(before / 2) and link.rate == pytest.approx(before)


def test_a_rate_that_was_asked_for_stays_and_so_does_the_fastest() -> None:
    for link, network in (link_at(1e6, fixed=True), link_at(FASTEST_BITS)):
        assert link.suits(plain_step(link, 0.001))
        assert network.rates == []
