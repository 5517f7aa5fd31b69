"""Sizes that cannot be are refused at once, by name: before a schedule is built, and where a model is cut."""

from typing import Any

import pytest

from penstock import schedule
from penstock.cli.main import main
from penstock.engine.folders.run_check import check_run
from penstock.schedule import builders, choice
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import ConfigError, from_dict


class BuiltTooMuch(Exception):
    """A schedule was built of more ranks than a placement needs."""


@pytest.fixture
def few_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets builders build for few ranks alone; returns the numbers of ranks for which they do."""
    built, original = [], builders.build

    def build(name: str, *, ranks: int, **options: Any) -> schedule.Schedule:
        if ranks > 9:
            raise BuiltTooMuch(ranks)
        built.append(ranks)
        return original(name, ranks=ranks, **options)

    monkeypatch.setattr(choice.builders, "build", build)
    return built


@pytest.mark.parametrize("name", [name for name in builders.names(with_aliases=True) if builders.trains(name)])
@pytest.mark.parametrize("pp", [12, 2000, 1_000_000])
def test_more_ranks_than_units_are_refused_before_anything_is_built(
    name: str, pp: int, few_ranks_alone: list[int]
) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.pp = {pp} with schedule.name = '{name}' .* at most 10 are"):
        check_run(from_dict({"parallel": {"pp": pp}, "schedule": {"name": name}}))
    assert not few_ranks_alone


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_more_stages_than_units_are_refused_before_the_schedule_is_built(name: str, few_ranks_alone: list[int]) -> None:
    table = {"parallel": {"pp": 1000}, "schedule": {"name": name}, "model": {"num_layers": 600}}
    with pytest.raises(ConfigError, match=r"asks for at least 2000 stages, .* at most 1202 are possible"):
        check_run(from_dict(table))
    assert few_ranks_alone


@pytest.mark.parametrize("name", builders.names())
def test_a_placement_is_that_of_the_schedule_for_any_number_of_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ranks in (2, 3, 9, 10, 13, 16):
        monkeypatch.setattr(choice, "_MANY_RANKS", 2)
        given = ScheduleChoice.of(name)
        microbatches = 1 if given.is_searched else 4 * ranks
        try:
            expected = builders.build(name, ranks=ranks, microbatches=microbatches).placement
        except ValueError as error:
            with pytest.raises(ValueError, match="ranks"):
                given.placement(ranks)
            assert "ranks" in str(error)
        else:
            assert given.placement(ranks) == expected, ranks


@pytest.mark.parametrize("command", ["show", "simulate", "compare"])
def test_a_schedule_of_more_actions_than_fit_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = [] if command == "compare" else ["1f1b"]
    assert main(["schedule", command, *name, "--ranks", "1000000000"]) == 2
    assert "1000000000 ranks of 1 stages and" in capsys.readouterr().err
