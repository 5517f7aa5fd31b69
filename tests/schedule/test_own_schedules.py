"""A user's own schedule: handed over, registered, or named by its module or file; and proved."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from penstock import schedule
from penstock.cli.main import main
from penstock.schedule import Placement, PlacementKind, Schedule, ScheduleError, builders
from penstock.schedule.builders import registry
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import RunConfig, ScheduleConfig
from penstock.settings.objects import load_object
from tests.schedule import families

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_schedule.py"
eager_1f1b = load_object(f"{EXAMPLE}:eager_1f1b")
SIZES = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 4), (4, 16), (8, 32)]


def backwards_first(ranks: int, microbatches: int) -> Schedule:
    """An order that cannot be: the last rank begins with a backward."""
    built = schedule.build("1f1b", ranks=ranks, microbatches=microbatches)
    orders = (*built.orders[:-1], tuple(reversed(built.orders[-1])))
    return Schedule("backwards-first", built.placement, microbatches, orders)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry, put back after the test."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.shows(110)
@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_all_ways_give_the_same_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, microbatches: int
) -> None:
    (tmp_path / "mine_own.py").write_text(EXAMPLE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    schedule.register("my-eager", eager_1f1b)
    built = eager_1f1b(ranks, microbatches)
    wanted = schedule.lower(schedule.early_gradients(built))
    schedule.verify(wanted)
    for given in (eager_1f1b, "my-eager", f"{EXAMPLE}:eager_1f1b", "mine_own:eager_1f1b"):
        choice = ScheduleChoice.of(given)
        choice.checked_program(ranks, microbatches)
        assert choice.program(ranks, microbatches) == wanted
        assert choice.placement(ranks) == built.placement
    own = ScheduleChoice.of(built)
    own.checked_program(ranks, microbatches)
    assert own.program(ranks, microbatches) == schedule.lower(built) and own.placement(ranks) == built.placement
    del sys.modules["mine_own"]


@pytest.mark.shows(110)
def test_it_is_proved_before_it_runs() -> None:
    for given in (backwards_first, backwards_first(3, 4)):
        with pytest.raises(ScheduleError):
            ScheduleChoice.of(given).checked_program(3, 4)


@pytest.mark.shows(110)
def test_the_example_beats_1f1b_where_messages_take_long(capsys: pytest.CaptureFixture[str]) -> None:
    code = EXAMPLE.read_text().partition("def eager_1f1b")[2].partition("\n\n\n")[0].splitlines()
    assert len(code) <= 12, "ten lines, with its head and its docstring"
    for ranks, microbatches in ((2, 8), (4, 16), (8, 32)):
        for transfer in (0.5, 1.0):
            costs = schedule.Costs(transfer=transfer)
            plain = schedule.build("1f1b", ranks=ranks, microbatches=microbatches)
            times = [
                schedule.simulate(schedule.lower(order), costs).makespan
                for order in (plain, eager_1f1b(ranks, microbatches))
            ]
            assert times[1] < times[0]
    assert main(["schedule", "show", f"{EXAMPLE}:eager_1f1b", "--ranks", "2", "--microbatches", "3"]) == 0
    assert "eager-1f1b, 2 ranks, 3 microbatches" in capsys.readouterr().out


@pytest.mark.shows(110)
def test_a_builder_may_take_options_and_stages() -> None:
    def mine(ranks: int, microbatches: int, *, stages_per_rank: int = 2, group_size: int | None = None) -> Schedule:
        return schedule.build(
            "interleaved",
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group_size=group_size,
        )

    assert schedule.options(mine) == {"group_size": None} and schedule.default_stages(mine) == 2
    found = ScheduleChoice(ScheduleConfig("mine", stages_per_rank=3, group_size=4), own=mine)
    assert found.placement(2).stages_per_rank == 3
    assert found.build(2, 8) == mine(2, 8, stages_per_rank=3, group_size=4) != mine(2, 8, stages_per_rank=3)
    with pytest.raises(ValueError, match="schedule eager_1f1b has no option 'stages_per_rank'"):
        schedule.build(eager_1f1b, ranks=2, microbatches=2, stages_per_rank=2)


@pytest.mark.shows(110)
@pytest.mark.usefixtures("entries")
def test_what_is_no_schedule_is_refused() -> None:
    def needs_more(ranks: int, microbatches: int, depth: int) -> Schedule:
        return eager_1f1b(ranks, depth)

    def too_many(ranks: int, microbatches: int) -> Schedule:
        return eager_1f1b(ranks, microbatches + 1)

    with pytest.raises(ValueError, match="there is a schedule '1f1b' already"):
        schedule.register("1f1b", eager_1f1b)
    with pytest.raises(ScheduleError, match="needs_more, asked for 2 ranks and 4 microbatches, raised TypeError"):
        schedule.build(needs_more, ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match="too_many gave a schedule for 2 ranks and 5 microbatches, where 2 and 4"):
        schedule.build(too_many, ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match="gave a list, which is no penstock"):
        schedule.build(lambda ranks, microbatches: [], ranks=2, microbatches=4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError, match="eager-1f1b is for 2 ranks and 4 microbatches, not for 2 and 8"):
        ScheduleChoice.of(eager_1f1b(2, 4)).program(2, 8)
    with pytest.raises(ValueError, match=r"a schedule is a name, .* not an int"):
        ScheduleChoice.of(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math:nonsense", "there is no 'nonsense' in math"),
        ("no_such_package.schedules:mine", "there is no module 'no_such_package'"),
        ("missing.py:mine", "there is no file 'missing.py'"),
        ("math:pi", "'math:pi' is a float"),
        ("one-f-one-b", r"no schedule .one-f-one-b.*afab, 1f1b, .*, or package.module:function"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleChoice(RunConfig(schedule=ScheduleConfig(name)).schedule).checked_program(2, 4)


# ---- files: any stages in any row


@pytest.mark.shows(110)
def test_rows_may_hold_any_stages() -> None:
    found = schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert found.placement == Placement(PlacementKind.MAP, 2, homes=(0, 1, 0))
    assert isinstance(found, Schedule)
    schedule.verify(schedule.lower(found))


NEW_BUILDER = """
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.registry import builder

SIZES = []

@builder("new-1f1b")
def new_1f1b(ranks, microbatches, stages_per_rank=1):
    SIZES.append((ranks, microbatches))
    return one_f_one_b(ranks, microbatches, stages_per_rank)
"""


@pytest.mark.usefixtures("entries")
def test_a_file_among_the_builders_is_all_that_a_published_schedule_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new_1f1b.py").write_text(NEW_BUILDER)
    monkeypatch.setattr(builders, "__path__", [*builders.__path__, str(tmp_path)])
    module = importlib.import_module("penstock.schedule.builders.new_1f1b")
    schedule.register("my-eager", eager_1f1b)
    assert registry.is_published("new-1f1b") and not registry.is_published("my-eager")
    assert families.stages_of("new-1f1b") == (1,)
    module.SIZES.clear()
    # Otherwise such a placement takes an order of thousands of ranks.
    assert ScheduleChoice.of("new-1f1b").placement(4096).num_ranks == 4096 and module.SIZES == [(8, 32)]
    del sys.modules["penstock.schedule.builders.new_1f1b"]


def test_a_builder_is_asked_for_at_most_five_million_forwards():
    asked = []

    def mine(ranks: int, microbatches: int) -> Schedule:
        asked.append(ranks * microbatches)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        schedule.build(mine, ranks=2, microbatches=2_500_000)
    with pytest.raises(ValueError, match="make 5000002 forwards; at most 5000000 are possible"):
        schedule.build(mine, ranks=2, microbatches=2_500_001)
    assert asked == [5_000_000]
