"""The layout against tables made by brute force, over sizes and both orders of its axes."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from penstock.parallel import Coordinates, Layout

LAYOUTS = [
    Layout(pp, dp, order=order)
    for pp, dp in itertools.product(range(1, 6), repeat=2)
    for order in (("dp", "pp"), ("pp", "dp"))
]


def _table(layout: Layout) -> list[dict[str, int]]:
    """Every rank's place, by counting up the axes as digits, the last of the order fastest."""
    sizes = [range(getattr(layout, axis)) for axis in layout.order]
    return [dict(zip(layout.order, digits, strict=True)) for digits in itertools.product(*sizes)]


@pytest.mark.shows(83)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout} {'-'.join(layout.order)}")
def test_ranks_and_groups_match_brute_force(layout: Layout) -> None:
    table = _table(layout)
    assert layout.world_size == len(table)
    for rank, place in enumerate(table):
        assert layout.coordinates(rank) == Coordinates(**place)
        assert layout.rank_of(**place) == rank
    for axis, other in (("pp", "dp"), ("dp", "pp")):
        expected = [
            tuple(sorted((r for r, p in enumerate(table) if p[other] == index), key=lambda r: table[r][axis]))
            for index in range(getattr(layout, other))
        ]
        assert sorted(layout.groups(axis)) == sorted(expected)
        assert list(layout.groups(axis)) == sorted(layout.groups(axis), key=lambda ranks: ranks[0])


def test_by_default_the_ranks_of_a_pipeline_are_neighbours() -> None:
    assert Layout(pp=3, dp=2).groups("pp") == ((0, 1, 2), (3, 4, 5))


@pytest.mark.shows(83)
@pytest.mark.parametrize("world_size", range(1, 13))
@pytest.mark.parametrize("pp, dp", list(itertools.product((1, 2, 3, 5), repeat=2)))
def test_a_wrong_world_is_refused_with_all_sizes_and_the_layouts_that_fit(pp: int, dp: int, world_size: int) -> None:
    layout = Layout(pp, dp)
    if world_size == pp * dp:
        layout.check(world_size)
        return
    with pytest.raises(ValueError) as caught:
        layout.check(world_size)
    message = str(caught.value)
    assert f"dp={dp} x pp={pp} needs {pp * dp} processes, but there are {world_size}" in message
    offered = re.findall(r"dp=(\d+) x pp=(\d+)", message.split(";")[1])
    assert sorted((int(d), int(p)) for d, p in offered) == [
        (d, world_size // d) for d in range(1, world_size + 1) if world_size % d == 0
    ]


def test_the_layout_nearest_to_the_one_wanted_is_offered_first() -> None:
    with pytest.raises(ValueError, match=r"8 would fit dp=2 x pp=4, or"):
        Layout(pp=4, dp=3).check(8)


@pytest.mark.parametrize("sizes", [{"pp": 0}, {"dp": -1}, {"pp": 2.0}, {"dp": True}])
def test_a_size_that_is_no_count_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be"):
        Layout(sizes.get("pp", 1), sizes.get("dp", 1))


@pytest.mark.parametrize("order", [("dp",), ("dp", "dp"), ("dp", "tp"), ()])
def test_an_order_that_does_not_name_each_axis_once_is_refused(order: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="order"):
        Layout(order=order)


@pytest.mark.parametrize("rank", [-1, 6])
def test_a_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        Layout(pp=3, dp=2).coordinates(rank)


def test_one_process_needs_no_groups_and_no_torch_distributed() -> None:
    assert not torch.distributed.is_initialized()
    grid = Layout().connect(torch.device("cpu"))
    assert (grid.rank, grid.pp_rank, grid.dp_rank, grid.world_size, grid.pp_ranks) == (0, 0, 0, 1, (0,))
    groups = (grid.dp_group, grid.mirror_group, grid.control, grid.background, grid.pp_control)
    assert groups == (None,) * 5


def test_one_process_does_not_fill_a_larger_layout() -> None:
    with pytest.raises(ValueError, match="needs 2 processes, but there are 1"):
        Layout(pp=2).connect(torch.device("cpu"))
