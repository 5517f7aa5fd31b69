"""The cut into stages: the best that brute force finds, every unit once."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import Placement, PlacementKind, balanced_cut, check_cut, partition, read_layout


def all_cuts(num_units: int, num_stages: int):
    for inner in itertools.combinations(range(1, num_units), num_stages - 1):
        borders = (0, *inner, num_units)
        yield tuple(range(start, stop) for start, stop in itertools.pairwise(borders))


def loads(times, cut) -> list:
    return [sum(times[unit] for unit in stage) for stage in cut]


def badness(times, cut) -> tuple:
    """The largest load first, then how uneven the loads are."""
    return max(loads(times, cut)), sum(load * load for load in loads(times, cut))


@pytest.mark.shows(79)
def test_the_cut_is_the_best_there_is():
    chance = random.Random(0)
    num_cases = 0
    for num_units in range(1, 11):
        for num_stages in range(1, num_units + 1):
            for high in (1, 3, 20):
                times = [chance.randint(0, high) for _ in range(num_units)]
                best = min(badness(times, cut) for cut in all_cuts(num_units, num_stages))
                assert badness(times, partition(times, num_stages)) == best
                num_cases += 1
    assert num_cases == 3 * 55


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=40), st.data())
def test_every_unit_is_placed_once_and_no_stage_is_empty(times: list[float], data: st.DataObject):
    num_stages = data.draw(st.integers(1, len(times)))
    cut = partition(times, num_stages)
    assert len(cut) == num_stages and all(cut)
    assert [unit for stage in cut for unit in stage] == list(range(len(times)))
    assert check_cut([len(stage) for stage in cut], len(times), num_stages) == cut


def rank_badness(times, cut) -> tuple:
    """The largest load of a rank that holds both ends of what is left, then how uneven ranks are, then stages."""
    stages = loads(times, cut)
    ranks = [first + last for first, last in zip(stages, reversed(stages))][: len(stages) // 2]
    return max(ranks), sum(load * load for load in ranks), sum(load * load for load in stages)


@pytest.mark.shows(79)
def test_the_slowest_rank_of_a_v_is_the_fastest_there_is():
    chance = random.Random(1)
    differs = 0
    for num_ranks in (1, 2, 3):
        for num_units in range(2 * num_ranks, 11):
            for high in (1, 3, 20, 0):
                times = [chance.randint(0, high) for _ in range(num_units)]
                if not high:
                    # Layers that repeat, between an embedding and a head.
                    layers = [chance.randint(1, 9), chance.randint(1, 9)] * 5
                    times = [1, *layers[: num_units - 2], chance.randint(0, 9)]
                best = min(rank_badness(times, cut) for cut in all_cuts(num_units, 2 * num_ranks))
                found = balanced_cut(times, Placement(PlacementKind.V, num_ranks, 2))
                assert check_cut([len(stage) for stage in found], num_units, 2 * num_ranks) == found
                assert rank_badness(times, found) == best
                differs += rank_badness(times, partition(times, 2 * num_ranks))[0] > best[0]
    assert differs > 5, "the slowest stage alone does not tell"


def test_a_cut_of_other_placements_looks_at_stages():
    times = [1.0, 5.0, 2.0, 2.0, 3.0, 1.0, 4.0, 1.0]
    for placement in (Placement(PlacementKind.LOOP, 4), Placement(PlacementKind.LOOP, 2, 2)):
        assert balanced_cut(times, placement) == partition(times, 4)
    assert balanced_cut(times, Placement(PlacementKind.BIDIRECTIONAL, 2, 2)) == partition(times, 2)
    with pytest.raises(ValueError, match=r"8 units.*at most 8 stages, not into 10"):
        balanced_cut(times, Placement(PlacementKind.V, 5, 2))


def test_equal_times_that_floats_cannot_hold_are_cut_evenly():
    assert [len(stage) for stage in partition([0.1] * 8, 4)] == [2, 2, 2, 2]
    assert sorted(len(stage) for stage in partition([0.1] * 10, 3)) == [3, 3, 4]
    # The largest of three stages is 2 anyway; the other four units are then spread, not heaped.
    assert sorted(loads([2, 1, 1], partition([2, 1, 1], 2))) == [2, 2]
    assert loads([9, 1, 1, 1, 1], partition([9, 1, 1, 1, 1], 3)) == [9, 2, 2]


@pytest.mark.parametrize(
    ("times", "num_stages", "words"),
    [
        ([1.0, 1.0], 3, ["2 units", "at most 2 stages", "not into 3"]),
        ([1.0, 1.0], 0, ["stages", "at least 1", "0"]),
        ([1.0, -2.0], 1, ["unit 1", "at least 0", "-2.0"]),
        ([float("nan")], 1, ["unit 0", "nan"]),
        ([], 1, ["0 units"]),
    ],
)
def test_impossible_cuts_say_why(times, num_stages, words):
    with pytest.raises(ValueError) as caught:
        partition(times, num_stages)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([3, 3], ["[3, 3]", "2 stages", "3"]),
        ([3, 3, 1], ["places 7 units", "has 8"]),
        ([4, 4, 0], ["at least 1", "0"]),
    ],
)
def test_a_cut_by_hand_places_every_unit_once(sizes, words):
    assert check_cut([5, 2, 1], 8, 3) == (range(5), range(5, 7), range(7, 8))
    with pytest.raises(ValueError) as caught:
        check_cut(sizes, 8, 3)
    assert all(word in str(caught.value) for word in words)


LAYOUTS = {
    # Megatron-Core's own example, of 61 layers over 32 stages.
    ("Et*3|(tt|)*29,m|L", 63): [4] + [2] * 29 + [0, 1],
    ("Et*3|(tt|)*29,mL", 63): [4] + [2] * 29 + [1],
    ("E|(t|)*2,,tL", 8): [1, 2, 2, 3],
    ("t|t | t\n", 3): [1, 1, 1],
    ("((Et|)*1(t|)*2)*1|L", 5): [2, 1, 1, 0, 1],
}


@pytest.mark.shows(185)
@pytest.mark.parametrize(("text", "num_units"), LAYOUTS)
def test_a_layout_in_letters_is_the_cut_that_it_spells(text: str, num_units: int) -> None:
    per_layer = 2 if (text, num_units) == ("E|(t|)*2,,tL", 8) else 1
    assert read_layout(text, num_units, per_layer) == tuple(LAYOUTS[text, num_units])


@pytest.mark.shows(185)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et|x", "'x' at character 4 is none of"),
        ("Et)|L", r"'\)' at character 3"),
        ("E(t(t|)*2L", "parenthesis at character 2 has no end"),
        ("*3t", r"'\*' at character 1"),
        ("Et*|L", r"'\*' at character 3"),
        ("t*999999(t*9999)*9999", r"'\*9999' at character 17 makes more letters"),
        ("tE|L", "'E' at character 2 comes after 't'; the order is E, then every t"),
        ("EL|t", "'t' at character 4 comes after 'L'; the order is E, then every t"),
        ("E(tm|)*2L", "'t' at character 3 comes after 'm'"),
        ("Ett|ttLL", "'L' at character 8 comes after 'L'"),
        ("E|L", "it has 0 t, each a layer of 2 of the model's units, of which there are 8 besides E and L"),
        ("", "it has 0 t, each a layer of 2 of the model's units, of which there are 10$"),
        ("Ettt|L", "it has 3 t, each a layer of 2 of the model's units, of which there are 8 besides E and L"),
        ("Ett|tt", "of which there are 9 besides E$"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_layout(text, 10, 2)
