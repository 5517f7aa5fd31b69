"""Settings: what a file and a command line can say, what is refused and how, and when two runs are the same."""

import json
import re
import tomllib
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from penstock.cli.train import read_arguments
from penstock.engine.folders.run_check import check_run
from penstock.engine.folders.runs import to_toml
from penstock.settings import (
    SETTINGS,
    ConfigError,
    RunConfig,
    differences,
    from_dict,
    read_config,
)
from penstock.settings.declare import possible
from penstock.settings.optimizer import LearningRate
from penstock.settings.run import from_values

NAMES = list(SETTINGS)
# A continued run may change these; docs and the class's docstring promise it.
MAY_CHANGE = re.compile(
    r"output|(log|watch|checkpoint|validation|schedule|parallel)\..*|train\.(steps|epochs|num_microbatches|max_microbatch_tokens)"
    r"|data\.(cache|corpus|validation_corpus)|optimizer\.zero"
)


# Values that may stand beside the defaults, for settings where twice the default may not.
OTHER: dict[str, Any] = {
    "model.num_kv_heads": 2,
    "model.num_full_layers": 2,
    "model.native": False,
    "data.label_share": 0.25,
    "train.precision": "bf16",
    "parallel.order": "tp-cp-pp-dp",
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.8,
    "optimizer.final_learning_rate": 1e-4,
    "adapter.dropout": 0.25,
    "adapter.target_modules": ("k_proj", "gate_proj"),
    "optimizer.arguments": {"amsgrad": True, "maximize": False},
    "optimizer.groups": [{"pattern": "*.norm.*", "weight_decay": 0.0, "name": "sgd", "arguments": {"momentum": 0.5}}],
}
# The same as words of the command line, where these are TOML.
WORDS = {
    "optimizer.arguments": "{amsgrad = true, maximize = false}",
    "optimizer.groups": '[{pattern = "*.norm.*", weight_decay = 0.0, name = "sgd", arguments = {momentum = 0.5}}]',
}
# Settings of the same section that another value needs.
BESIDE: dict[str, dict[str, Any]] = {"parallel.ep": {"dp": 2}, "optimizer.num_decay_steps": {"decay": "cosine"}}


def another_value(name: str) -> Any:
    """A value of the setting's type that differs from its default."""
    annotation, value = SETTINGS[name].type, RunConfig().flat()[name]
    if name in OTHER:
        return OTHER[name]
    if possible(annotation):
        return next(choice for choice in possible(annotation) if choice != value)
    kinds = [kind for kind in (get_args(annotation) or [annotation]) if kind is not type(None)]
    if get_origin(annotation) is tuple or any(get_origin(kind) is tuple for kind in kinds):
        return ("a:b", "c.d:e") if get_args(annotation)[0] is str else (2, 1)
    if kinds[0] is bool:
        return not value
    if kinds[0] is str:
        return f"{value or 'a'}-other"
    return kinds[0]((value or 3) * 2)


def with_setting(name: str, value: Any) -> RunConfig:
    section, _, key = name.rpartition(".")
    table = {key: value, **BESIDE.get(name, {})}
    return from_dict({section: table} if section else table)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('output = "somewhere"\n[train]\nsteps = 12\n')
    return path


def test_every_setting_goes_through_a_file_and_the_command_line(run_file: Path):
    for name in NAMES:
        value = another_value(name)
        changed = with_setting(name, value)
        assert changed.flat()[name] == value != RunConfig().flat()[name], name
        assert from_dict(tomllib.loads(to_toml(changed))) == changed, name
        assert from_dict(json.loads(json.dumps(changed.to_dict()))) == changed, name
        words = [str(item).lower() for item in (value if isinstance(value, tuple) else (value,))]
        words = [WORDS[name]] if name in WORDS else words
        beside = {f"{name.partition('.')[0]}.{key}": item for key, item in BESIDE.get(name, {}).items()}
        flags = [word for key, item in beside.items() for word in (f"--{key}", str(item))]
        given = read_arguments([str(run_file), f"--{name}", *words, *flags]).config
        assert given.flat()[name] == value, name
        # A rank of two has half as many sequences, so that those that are left out are fewer.
        fewer = (
            {"train.num_microbatches"} if name in ("parallel.dp", "parallel.ep", "data.num_sequences") else set[str]()
        )
        changed_names = {name, *beside} | fewer
        others = {key: item for key, item in given.flat().items() if key not in changed_names}
        assert others == {key: item for key, item in read_config(run_file).flat().items() if key not in changed_names}


@pytest.mark.parametrize("words", [["--train.steps", "3", "FILE"], ["--train.steps", "3", "--output", "out", "FILE"]])
def test_the_file_may_come_last(run_file: Path, words: list[str]) -> None:
    given = read_arguments([str(run_file) if word == "FILE" else word for word in words])
    assert given.run == str(run_file) and given.config.train.steps == 3
    assert given.config == read_arguments([str(run_file), *words[:-1]]).config


def test_a_misspelt_setting_names_the_right_one(run_file: Path):
    for name in NAMES:
        section, _, key = name.rpartition(".")
        wrong = f"{section}.{key}x" if section else f"{key}x"
        told = f"(the nearest one is {re.escape(name)}|did you mean '--{name}'?.)$"
        with pytest.raises(ConfigError, match=told):
            with_setting(wrong, 1)
        with pytest.raises(ConfigError, match=told):
            read_arguments([str(run_file), f"--{wrong}", "1"])


def test_a_value_of_a_wrong_type_is_refused_by_name(run_file: Path):
    for name in NAMES:
        with pytest.raises(ConfigError, match=rf"{re.escape(name)}(\[0\])? = .*: expected "):
            with_setting(name, {"a": 1} if name == "output" else [[]])
        if SETTINGS[name].type is not str and str not in get_args(SETTINGS[name].type):
            with pytest.raises(ConfigError, match=f"{re.escape(name)} = 'abc': expected "):
                read_arguments([str(run_file), f"--{name}", "abc"])


def test_the_digest_covers_what_decides_the_numbers():
    for name in NAMES:
        changed = with_setting(name, another_value(name))
        if name == "train.steps":
            # With a constant learning rate the length of a run decides nothing else.
            assert changed.digest() == RunConfig().digest()
            falls = {"optimizer": {"decay": "cosine"}}
            assert from_dict({**falls, "train": {"steps": 7}}).digest() != from_dict(falls).digest()
            continue
        assert (changed.digest() == RunConfig().digest()) == bool(MAY_CHANGE.fullmatch(name)), name
        told = [text.partition(" ")[0] for text in differences(changed.identity(), RunConfig().identity())]
        assert (name in told) == (not MAY_CHANGE.fullmatch(name)), name


@pytest.mark.parametrize(("num_sequences", "dp", "found"), [(5, 1, 5), (6, 2, 3), (16, 2, 8), (64, 1, 8), (1, 1, 1)])
def test_a_run_that_names_no_microbatches_has_no_more_than_sequences(num_sequences: int, dp: int, found: int) -> None:
    run = from_dict({"data": {"num_sequences": num_sequences}, "parallel": {"dp": dp}})
    assert run.train.num_microbatches == found
    # As the run's own file says it from then on.
    assert from_dict(tomllib.loads(to_toml(run))) == run


@pytest.mark.parametrize("name", ["parallel.dp", "train.num_microbatches", "train.max_microbatch_tokens"])
def test_means_over_microbatches_and_ranks_depend_on_their_number(name: str):
    section, _, key = name.partition(".")
    mean = {"train": {"normalize": "microbatch_mean"}}
    changed = {**mean, section: {**mean.get(section, {}), key: 512}}
    assert from_dict(changed).digest() != from_dict(mean).digest()


IMPOSSIBLE = {
    "more stages than units": ({"parallel": {"pp": 11}}, "11 stages.*10 units.*at most 10"),
    "more stages than units, two a rank": (
        {"parallel": {"pp": 6}, "schedule": {"name": "interleaved", "stages_per_rank": 2}},
        "12 stages.*at most 10",
    ),
    "heads": ({"model": {"num_heads": 5}}, "num_heads = 5 does not divide .*128; possible are 1, 2, 4, 8"),
    "kv heads": ({"model": {"num_kv_heads": 3}}, "num_kv_heads = 3 does not divide .*4; possible are 1, 2, 4$"),
    "odd head": ({"model": {"head_dim": 15}}, "width of 15 is odd"),
    "too long": ({"data": {"sequence_length": 4096}}, "4096 is longer than model.max_length = 2048"),
    "an order of three": ({"parallel": {"order": "tp-dp-pp"}}, "'tp-dp-pp' must name each of dp, pp, cp and tp once"),
    "uneven ep": (
        {"parallel": {"dp": 4, "ep": 3}},
        "parallel.ep = 3 does not divide parallel.dp x parallel.cp = 4; possible are 1, 2, 4",
    ),
    "heads that tp cannot share": (
        {"model": {"num_heads": 4, "intermediate_size": 48}, "parallel": {"tp": 3, "dp": 2}},
        "parallel.tp = 3 cannot share 4 query heads, 4 key heads and an MLP of model.intermediate_size = 48 evenly; "
        "possible are 1, 2, 4",
    ),
    "a width that tp cannot share": (
        {"model": {"num_heads": 4, "intermediate_size": 50}, "parallel": {"tp": 4}},
        "an MLP of model.intermediate_size = 50 evenly; possible are 1, 2",
    ),
    "uneven dp": ({"parallel": {"dp": 3}}, "8 cannot be shared evenly by parallel.dp = 3; 6 or 9 can"),
    "microbatches": ({"train": {"num_microbatches": 9}}, "9 is more than the 8 sequences.*at most 8"),
    "microbatches of a dp rank": (
        {"parallel": {"dp": 2}, "train": {"num_microbatches": 8}},
        "8 is more than the 4 sequences",
    ),
    "budget": ({"train": {"max_microbatch_tokens": 255}}, "255 is less than one sequence"),
    "cut that loses a unit": (
        {"parallel": {"pp": 2}, "schedule": {"cut": [5, 4]}},
        "places 9 units, the model has 10",
    ),
    "a layout of other stages": (
        {"parallel": {"pp": 2}, "schedule": {"cut": "E|tt|ttL"}},
        r"cut = 'E\|tt\|ttL': the cut \[1, 4, 5\] is for 3 stages, there are 2",
    ),
    "unknown schedule": ({"schedule": {"name": "1b1f"}}, "no schedule '1b1f'.*1f1b"),
    "no training schedule": ({"schedule": {"name": "inference"}}, "cannot train"),
    "more processes than any machine has": (
        {"parallel": {"pp": 2**11, "dp": 2**10}},
        "parallel.dp = 1024 x parallel.pp = 2048 x .* is 2097152 processes; at most 1048576 are possible",
    ),
    "null character": ({"output": "a\0b"}, "without null characters"),
    "all warm-up": ({"optimizer": {"decay": "cosine", "num_warmup_steps": 100}}, "leaves nothing of the 100 steps"),
    "rising rate": ({"optimizer": {"final_learning_rate": 1.0}}, "the rate can only rise to that"),
}


@pytest.mark.parametrize("table, told", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_combination_is_refused_in_one_sentence(table: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        check_run(from_dict(table))
    assert "\n" not in str(caught.value)


def test_the_world_must_fit_the_layout():
    layout = from_dict({"parallel": {"pp": 2, "dp": 3}}).parallel
    layout.check(6)
    with pytest.raises(ConfigError, match=r"dp=3 x pp=2 x .* needs 6 processes, .* 4; start as many"):
        layout.check(4)


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "takes the path of a run's TOML file, such as examples/tiny.toml, or settings alone"),
        (["-x", "3"], "penstock train has no use for '-x'"),
        (["no/such.toml"], "no/such.toml cannot be read: No such file"),
        (["FILE", "--dryrun"], "no option of penstock train is called '--dryrun'; did you mean '--dry-run'"),
        (["FILE", "--steps", "3"], "there is no setting steps; the nearest one is train.steps"),
        (["FILE", "--dry-run", "3"], "penstock train has no use for '3'"),
        (["FILE", "--resume", "--fresh"], "exclude each other"),
        (["FILE", "--train.steps"], "train.steps = None: expected int"),
        (["FILE", "--train.steps", "3", "4"], "train.steps = '3 4': expected int"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_sentence(words: list[str], told: str, run_file: Path):
    with pytest.raises(ConfigError, match=told) as caught:
        read_arguments([str(run_file) if word == "FILE" else word for word in words])
    assert "\n" not in str(caught.value)


def test_settings_alone_are_enough():
    arguments = read_arguments(["--model.pretrained", "folder", "--data.corpus=chat.jsonl", "--fresh"])
    assert arguments.config == from_dict({"model": {"pretrained": "folder"}, "data": {"corpus": "chat.jsonl"}})
    assert arguments.fresh


def test_none_on_the_command_line_is_none():
    arguments = read_arguments(["--data.cache", "None", "--data.validation_corpus", "none"])
    assert (arguments.config.data.cache, arguments.config.data.validation_corpus) == (None, None)


@pytest.mark.parametrize(
    "text, told",
    [
        ("[trian]\nsteps = 3", r"no section \[trian\]; the nearest one is \[train\]"),
        ("train = 3", "train is a section"),
        ("[train]\nsteps = true", "train.steps = True: expected int, got bool"),
        ("[train]\nsteps = 3.5", "train.steps = 3.5: expected int, got float"),
        ("steps = 3", "no setting steps; the nearest one is train.steps"),
        ("[model]\nlearning_rate = 3", "the nearest one is optimizer.learning_rate"),
        ("[train\nsteps = 3", "is not TOML"),
        ("output = " + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_wrong_file_is_told_by_its_path_in_one_sentence(text: str, told: str, tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_switches_are_read_beside_settings(run_file: Path):
    arguments = read_arguments([str(run_file), "--dry-run", "--train.steps=3", "--json", "--schedule.cut", "1", "9"])
    assert (arguments.dry_run, arguments.json, arguments.resume) == (True, True, False)
    assert (arguments.config.train.steps, arguments.config.schedule.cut) == (3, (1, 9))


@pytest.mark.shows(183)
def test_words_of_other_programs_are_answered_with_ours():
    settings = {
        "batch_size": "data.num_sequences",
        "train.batch_size": "data.num_sequences",
        "train.max_steps": "train.steps",
        "train.num_train_epochs": "train.epochs",
        "train.dtype": "train.precision",
        "parallel.pipeline_parallel_size": "parallel.pp",
        "lr": "optimizer.learning_rate",
        "optimizer.warmup-ratio": "optimizer.num_warmup_steps",
    }
    for word, ours in settings.items():
        section, _, key = word.rpartition(".")
        with pytest.raises(ConfigError, match=f"the nearest one is {ours}$"):
            from_dict({section: {key: 1}} if section else {key: 1})
        with pytest.raises(ConfigError, match=f"(the nearest one is {ours}|did you mean '--{ours}'.)$"):
            read_arguments([f"--{word}", "1"])
    with pytest.raises(ConfigError, match='the nearest one is "cuda"'):
        from_values({"parallel.device": "gpu"})
    with pytest.raises(ConfigError, match="there is no schedule 'zbv'; did you mean 'zb-v'"):
        check_run(from_values({"schedule.name": "zbv"}))
    # Of a warm-up that is a share, any length of run has some steps, rounded up.
    share = from_values({"optimizer.num_warmup_steps": "7%", "train.steps": 10})
    assert read_arguments(["--optimizer.num_warmup_steps", "7%"]).config.optimizer == share.optimizer
    for steps in (1, 10, 15, 100, 101):
        own = check_run(from_values({"optimizer.num_warmup_steps": "7%", "train.steps": steps}))
        rate = own.optimizer.over(steps).learning_rate
        assert isinstance(rate, LearningRate)
        assert rate.num_warmup_steps == (ceil(Fraction(7, 100) * steps) if steps > 1 else 0)
    assert share.digest() == from_values({"optimizer.num_warmup_steps": 1, "train.steps": 10}).digest()
    for wrong in ("100%", "-1%", "7", "some"):
        with pytest.raises(ConfigError, match=r"such as \"7%\""):
            from_values({"optimizer.num_warmup_steps": wrong})
