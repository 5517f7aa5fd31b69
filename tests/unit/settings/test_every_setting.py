"""Every setting is one object in the file, on the command line and in the engine: each takes and refuses the same."""

# pyright: reportArgumentType=false

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from penstock.cli.train import read_arguments
from penstock.engine.folders.run_check import check_run
from penstock.engine.folders.runs import to_toml
from penstock.engine.options import EngineOptions
from penstock.schedule import builders
from penstock.schedule.choice import ScheduleChoice
from penstock.settings import (
    SETTINGS,
    ConfigError,
    Decay,
    LearningRate,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SamplingParams,
    ScheduleConfig,
    Setting,
    WeightDecay,
    from_dict,
    walk_settings,
)
from penstock.settings.declare import Bounds, from_words, parts_of, plain, possible, value_of
from penstock.settings.run import section_summaries
from tests.unit.settings.test_config import BESIDE, another_value, with_setting

SAMPLING = {own.name: own for own in walk_settings(SamplingParams())}
CHOICES = [(name, value) for name, own in SETTINGS.items() for value in possible(own.type)]
# Settings without which a run cannot have that value.
NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("rope.scaling", "llama3"): {"rope.original_length": 64},
    ("rope.scaling", "yarn"): {"rope.original_length": 64},
    ("schedule.placement", "loop"): {"schedule.name": "auto"},
    ("schedule.placement", "v"): {"schedule.name": "auto"},
}


def as_table(values: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (table.setdefault(section, {}) if section else table)[key] = value
    return table


def words_of(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list | tuple) else (value,))]


def as_words(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", *words_of(value))]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.touch()
    return path


@pytest.mark.parametrize("name, value", CHOICES)
def test_every_value_of_every_enum_reaches_the_engine_from_file_and_command_line(
    name: str, value: str, run_file: Path
) -> None:
    values = {name: value, **NEEDS.get((name, value), {})}
    config = check_run(from_dict(as_table(values)))
    assert config.flat()[name] == value
    assert read_arguments([str(run_file), *as_words(values)]).config == config
    run_file.write_text(to_toml(config))
    assert read_arguments([str(run_file)]).config == config
    options = EngineOptions.of(config)
    held = (
        *walk_settings(config.model.whole(64)),
        *walk_settings(config.parallel),
        *walk_settings(config.schedule),
        *walk_settings(options),
    )
    taken = {own.name: plain(own.default) for own in held}
    assert taken.get(name, config.flat()[name]) == value
    assert options.optimizer.learning_rate(3) > 0  # pyright: ignore[reportCallIssue, reportOptionalCall]


@pytest.mark.parametrize("name, value", CHOICES)
def test_a_name_is_spelt_alike_in_file_and_command_line(name: str, value: str) -> None:
    own = SETTINGS[name]
    for spelling in (value.upper(), value.title(), value.replace("-", "_"), value.upper().replace("-", "_")):
        assert plain(own.matched(spelling)) == plain(from_words(own, [spelling])) == value
    for spelling in (f"{value} ", f"{value}s", "-"):
        for read in (own.matched, lambda given: from_words(own, [given])):
            with pytest.raises(ConfigError, match=rf"{name}(\[0\])? = .*: expected"):
                read(spelling)


@pytest.mark.parametrize("words", [["2", "0", "3"], ["2,0,3"], ["[2, 0, 3]"], ["2 0 3"], ["2,", "0,", "3"]])
def test_a_list_of_numbers_may_be_written_as_in_files(words: list[str]) -> None:
    assert from_words(SETTINGS["schedule.cut"], words) == from_words(SETTINGS["schedule.placement"], words) == (2, 0, 3)
    assert from_words(SETTINGS["schedule.cut"], ["E|t,t|L"]) == "E|t,t|L"


TAKEN = [
    own.name
    for own in SETTINGS.values()
    if own.section in ("schedule", "optimizer")
    or own.name in ("train.seed", "train.precision", "train.recompute")
    or own.name in ("parallel.attention", "parallel.device", "parallel.timeout_s")
]


@pytest.mark.parametrize("name", TAKEN)
def test_every_setting_that_the_engine_takes_reaches_its_options(name: str, run_file: Path) -> None:
    changed = with_setting(name, another_value(name))
    run_file.write_text(to_toml(changed))
    config = read_arguments([str(run_file)]).config
    found = {own.name: plain(own.default) for own in walk_settings(EngineOptions.of(config))}
    assert found[name] == another_value(name) != RunConfig().flat()[name]
    # Nothing else has changed with it but the end of the run's rates.
    usual = {own.name: plain(own.default) for own in walk_settings(EngineOptions.of(RunConfig()))}
    beside = {f"optimizer.{key}" for key in BESIDE.get(name, {})}
    others = {key for key in TAKEN if found[key] != usual[key]} - {name, "optimizer.num_decay_steps", *beside}
    assert TAKEN and not others


def numbers_of(own: Setting) -> set[type]:
    """The kinds of numbers that a setting takes, or that a list of its values holds."""
    inner = {item for part in parts_of(own.type) for item in (part, *get_args(part))}
    return inner & {int, float}


def beyond(own: Setting) -> Iterator[Any]:
    """Values that the setting may not have: the nearest ones outside of its bounds, and what is no finite number."""
    as_list = any(get_origin(part) is tuple for part in parts_of(own.type))
    yield from ([1, number] if as_list and number > 0 else [number] if as_list else number for number in _beyond(own))


def _beyond(own: Setting) -> Iterator[float]:
    bounds = own.bounds
    assert bounds is not None
    is_whole = float not in numbers_of(own)
    least, step = bounds.least, 1 if is_whole else 0.5
    yield from () if least is None else (least - step,)
    yield from () if bounds.above is None else (bounds.above, bounds.above - step)
    yield from () if bounds.most is None else (bounds.most + step,)
    yield from () if bounds.below is None else (bounds.below, bounds.below + step)
    yield from () if bounds.limit is None else (bounds.limit + step, 10**13, 10**300)
    yield from () if is_whole else (math.nan, math.inf)


BOUNDED = [name for name, own in SETTINGS.items() if own.bounds]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_value_out_of_bounds_is_refused_alike_and_by_name_wherever_it_comes_from(name: str, run_file: Path) -> None:
    *owner, attribute = SETTINGS[name].path
    for value in beyond(SETTINGS[name]):
        ways = (
            lambda: from_dict(as_table({name: value})),  # noqa: B023
            lambda: read_arguments([str(run_file), f"--{name}", *words_of(value)]),  # noqa: B023
            lambda: replace(value_of(RunConfig(), tuple(owner)), **{attribute: value}),  # noqa: B023
        )
        messages = set()
        for way in ways:
            with pytest.raises(ConfigError) as caught:
                way()
            messages.add(str(caught.value))
        (message,) = messages
        shown = float(value) if SETTINGS[name].type in (float, float | None) else value
        assert message.count(f"{name} = {shown}") == 1 and "\n" not in message
        assert any(text in message for text in ("must be", "is possible", "finite"))


@pytest.mark.parametrize("own", [own for own in SAMPLING.values() if own.bounds], ids=lambda own: own.key)
def test_settings_of_sampling_are_bounded_too(own: Setting) -> None:
    for value in beyond(own):
        with pytest.raises(ConfigError, match=rf"sampling\.{own.key} = "):
            SamplingParams(**{own.key: value})


def test_every_setting_says_what_it_does_in_a_sentence() -> None:
    for own in (*SETTINGS.values(), *SAMPLING.values()):
        assert own.help[0] in '"' + own.help[0].upper() and own.help.endswith(".") and "\n" not in own.help, own.name
        assert own.take(own.default) == own.default, own.name
        assert own.section in {"", "sampling", *section_summaries()}, own.name


def test_a_number_has_bounds_unless_all_are_possible() -> None:
    numbers = {own.name: own for own in (*SETTINGS.values(), *SAMPLING.values()) if numbers_of(own)}
    assert {"schedule.cut", "train.recompute", "experts.dense_layers", "sampling.end_tokens"} <= numbers.keys()
    assert {name for name, own in numbers.items() if own.bounds is None or not has_least(own.bounds)} == set()
    # What the machine counts with has an upper bound too.
    whole = {name: own.bounds for name, own in numbers.items() if int in numbers_of(own)}
    assert {name for name, own in whole.items() if own is None or not has_most(own)} == set()


def has_least(bounds: Bounds) -> bool:
    return (bounds.least, bounds.above) != (None, None)


def has_most(bounds: Bounds) -> bool:
    return (bounds.most, bounds.below, bounds.limit) != (None, None, None)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: EngineOptions(optimizer=None), "optimizer = None is not possible; give an OptimizerConfig"),
        (lambda: EngineOptions(learns="no"), "learns = 'no': expected bool"),
        (lambda: EngineOptions(measure_lengths=(0, -1)), r"measure_lengths = \[0, -1\] .* each must be at least 1"),
        (lambda: EngineOptions(measure_lengths="long"), "measure_lengths = 'long': expected"),
        (
            lambda: EngineOptions(schedule=3),
            "schedule = 3: expected ScheduleConfig or str or function or Schedule",
        ),
        (lambda: EngineOptions(recompute=(-1,)), r"train.recompute = \[-1\] is not possible"),
        (lambda: RunConfig(model="x"), "model = 'x': expected ModelConfig"),
        (lambda: RunConfig(optimizer=None), "optimizer = None: expected OptimizerConfig"),
        (lambda: ModelConfig(experts={"num_experts": 2}), "model.experts = .*: expected ExpertConfig"),
        (lambda: LearningRate(initial="x"), "optimizer.initial = 'x': expected float"),
        (lambda: LearningRate(peak=10**400), "optimizer.learning_rate = inf is not a finite number"),
        (lambda: LearningRate(initial=-1), r"optimizer\.initial = -1\.0 is not possible"),
        (lambda: LearningRate(0.1, initial=1), r"optimizer\.initial = 1\.0 is above optimizer\.learning_rate = 0\.1"),
        (lambda: WeightDecay(last=0.1, ramp="linear", num_steps=0), r"optimizer\.num_steps = 0 .* at least 1"),
        (
            lambda: ScheduleConfig(overlap=False, early_release=True),
            "schedule.early_release = true .* schedule.overlap = false",
        ),
        (lambda: WeightDecay(last=0.1, ramp="linear", num_steps=0.5), "optimizer.num_steps = 0.5: expected int"),
        (lambda: OptimizerConfig(learning_rate="x"), "optimizer.learning_rate = .*: expected .* or float"),
    ],
)
def test_python_is_refused_what_a_field_cannot_hold(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_python_may_spell_a_name_with_underscores() -> None:
    assert Decay("inverse_sqrt") is Decay.INVERSE_SQRT
    assert from_dict({"optimizer": {"decay": "inverse_sqrt"}}) == from_dict({"optimizer": {"decay": "inverse-sqrt"}})


def rates_of(optimizer: OptimizerConfig) -> tuple[LearningRate, WeightDecay]:
    rate, decay = optimizer.learning_rate, optimizer.weight_decay
    assert isinstance(rate, LearningRate) and isinstance(decay, WeightDecay)
    return rate, decay


def test_ends_that_are_left_out_are_those_of_the_run() -> None:
    config = from_dict({"optimizer": {"decay": "cosine", "final_weight_decay": 0.2}, "train": {"steps": 7}})
    rate, decay = rates_of(EngineOptions.of(config).optimizer)
    assert (rate(7), decay(7)) == (0.0, 0.2)
    assert rate(6) > 0 and 0.1 < decay(6) < 0.2
    # Outside of a run nothing ends.
    rate, _ = rates_of(OptimizerConfig())
    assert rate(10**6) == rate.peak


@pytest.mark.parametrize("name", [name for name in builders.names() if name not in ("auto", "inference")])
def test_a_builder_is_given_exactly_the_options_it_has(name: str) -> None:
    every = {option for other in builders.names() for option in builders.options(other)}
    settings = {own.key: own for own in walk_settings(ScheduleConfig()) if own.key in every}
    assert {"group_size", "split_backward", "max_live_microbatches", "placement"} <= settings.keys()
    for option, own in settings.items():
        value: Any = True if own.type is bool else possible(own.type)[0] if possible(own.type) else 2
        choice = ScheduleChoice(replace(ScheduleConfig(name), **{option: value}))
        if option in builders.options(name):
            choice.checked_program(2, 8)
            assert choice.build(2, 8) == builders.build(name, ranks=2, microbatches=8, **{option: value})
        else:
            with pytest.raises(ConfigError, match=rf"schedule\.{option} = .* is no option of .*'{name}'; possible are"):
                choice.checked_program(2, 8)


# Checkpoints of earlier versions say more, such as the corpus; that is not compared.
DEFAULT_DIGEST = "b2b5c3659a7126cd"


def test_runs_of_earlier_versions_are_continued() -> None:
    assert from_dict({"optimizer": {"decay": "cosine"}}).digest() == DEFAULT_DIGEST, "their files say it"
    assert json.loads(json.dumps(RunConfig().identity()))["model.num_kv_heads"] is None


def test_reading_settings_loads_nothing_but_the_standard_library() -> None:
    probe = (
        "import sys, penstock.settings, penstock.engine.folders.run_check; "
        "print(*sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == ""
