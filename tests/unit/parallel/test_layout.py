"""The layout against tables made by brute force, over sizes and all orders of its axes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from penstock.parallel import connect
from penstock.settings import AXES, Coordinates, Groups, Layout

ORDERS = list(itertools.permutations(AXES))
SIZES = [dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product((1, 2, 3), repeat=4)]


def _table(layout: Layout) -> list[dict[str, int]]:
    """Every rank's place, by counting up the axes as digits, the last of the order fastest."""
    sizes = [range(getattr(layout, axis)) for axis in layout.axes]
    return [dict(zip(layout.axes, digits, strict=True)) for digits in itertools.product(*sizes)]


def _classes(table: list[dict[str, int]], same: tuple[str, ...]) -> Groups:
    """The ranks sorted into groups of those that agree in some axes."""
    places = {tuple(place[axis] for axis in same) for place in table}
    groups = [tuple(r for r, p in enumerate(table) if tuple(p[axis] for axis in same) == place) for place in places]
    return tuple(sorted(groups))


@pytest.mark.shows(83)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_ranks_and_groups_match_brute_force(order: tuple[str, ...]) -> None:
    for sizes in SIZES:
        layout = Layout(**sizes, order="-".join(order))
        table = _table(layout)
        assert layout.world_size == len(table) == math.prod(sizes.values())
        for rank, place in enumerate(table):
            assert layout.coordinates(rank) == Coordinates(**place)
            assert layout.rank_of(**place) == rank
        for axis in AXES:
            along = layout.groups(axis)
            assert along == _classes(table, tuple(other for other in AXES if other != axis))
            # Along one axis the order of ranks is that of places.
            assert all([table[rank][axis] for rank in ranks] == list(range(sizes[axis])) for ranks in along)
        assert layout.groups("dp", "cp") == _classes(table, ("pp", "tp"))


@pytest.mark.shows(83)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_groups_of_experts_match_brute_force(order: tuple[str, ...]) -> None:
    for dp, cp, pp, tp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2)):
        for ep in (ep for ep in (1, 2, 4, 8) if dp * cp % ep == 0):
            layout = Layout(pp, dp, cp, tp, ep, order="-".join(order))
            seeing_other_tokens = layout.groups("dp", "cp")
            of = {
                rank: (number, ranks.index(rank)) for number, ranks in enumerate(seeing_other_tokens) for rank in ranks
            }
            same_experts = {rank: (number, place % ep) for rank, (number, place) in of.items()}
            share_experts = {rank: (number, place // ep) for rank, (number, place) in of.items()}
            copy_of_the_model = {rank: place // ep for rank, (_, place) in of.items()}
            for found, key in (
                (layout.expert_copies(), same_experts),
                (layout.expert_groups(), share_experts),
                (layout.model_copies(), copy_of_the_model),
            ):
                by_key: dict[object, list[int]] = {}
                for rank in range(layout.world_size):
                    by_key.setdefault(key[rank], []).append(rank)
                assert found == tuple(sorted(tuple(ranks) for ranks in by_key.values()))


def test_by_default_tp_is_fastest_and_dp_slowest() -> None:
    layout = Layout(pp=3, dp=2, cp=2, tp=2)
    assert layout.groups("tp")[:2] == ((0, 1), (2, 3))
    assert layout.groups("pp")[0] == (0, 4, 8)
    assert layout.groups("dp")[0] == (0, 12)
    assert Layout(pp=3, dp=2).groups("pp") == ((0, 1, 2), (3, 4, 5))


@pytest.mark.shows(83)
@pytest.mark.parametrize("world_size", range(1, 13))
def test_a_wrong_world_is_refused_with_all_sizes(world_size: int) -> None:
    for sizes in SIZES:
        layout = Layout(**sizes)
        if world_size == layout.world_size:
            layout.check(world_size)
            continue
        with pytest.raises(ValueError) as caught:
            layout.check(world_size)
        for axis, size in sizes.items():
            assert f"{axis}={size}" in str(caught.value)
        assert f"needs {layout.world_size} processes, but there are {world_size}" in str(caught.value)


def test_experts_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"parallel.ep = 4 does not divide parallel.dp x parallel.cp = 6; possible are 1, 2, 3, 6$"
    ):
        Layout(pp=2, dp=3, cp=2, ep=4)


def test_one_process_needs_no_groups_and_no_torch_distributed() -> None:
    assert not torch.distributed.is_initialized()
    grid = connect(Layout(), "cpu")
    assert (grid.rank, grid.place, grid.ep_rank, grid.world_size, grid.pp_ranks) == (0, Coordinates(), 0, 1, (0,))
    host = (grid.control, grid.background, grid.pp_control, grid.batch_control, grid.model_control)
    device = (grid.tp_group, grid.cp_group, grid.ep_group, grid.dp_cp_group, grid.edp_group, grid.mirror_group)
    assert (*host, *device) == (None,) * 11


def test_one_process_does_not_fill_a_larger_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs 2 processes, but there are 1"):
        connect(Layout(pp=2), "cpu")
    # As torchrun says it to each of them.
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"needs 2 processes, which have not met; call torch\.distributed\.init"):
        connect(Layout(pp=2), "cpu")
