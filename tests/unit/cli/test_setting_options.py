"""Options of commands that are settings have the type, default, help and bounds of the declaration, and one check."""

import re

import pytest

from penstock.cli import doctor
from penstock.cli.main import main
from penstock.cli.models import generate, score, session
from penstock.cli.options import Options
from penstock.settings import ConfigError, ParallelConfig, Setting
from penstock.settings.declare import possible

COMMANDS: dict[str, tuple[tuple[Options, ...], list[str]]] = {
    "generate": ((generate.Generate.layout, session.RING_OPTIONS), ["MODEL", "a"]),
    "score": ((score.Score.layout, score._SCORING), ["MODEL", "texts.jsonl"]),
    "doctor": ((doctor._PARALLEL,), ["--no-links"]),
}
OPTIONS = [
    (command, name, own)
    for command, (groups, _) in COMMANDS.items()
    for options in groups
    for name, own in options.items()
]
BOUNDED = [(command, name, own) for command, name, own in OPTIONS if own.bounds]


def too_large(own: Setting) -> str | None:
    assert own.bounds is not None
    return None if own.bounds.limit is None else str(own.bounds.limit + 1)


def test_the_options_are_settings() -> None:
    names = {(command, name) for command, name, _ in BOUNDED}
    assert {("generate", "pp"), ("generate", "slots"), ("score", "timeout"), ("doctor", "ep")} <= names
    for command, name, own in OPTIONS:
        assert own.section in {"parallel", "generate", "score", "data"}
        if own.section == "parallel" and (command, name) != ("doctor", "timeout"):
            assert own.default == getattr(ParallelConfig(), own.path[-1])


@pytest.mark.parametrize("command, name, own", BOUNDED)
def test_a_value_out_of_bounds_is_refused_by_section_and_name(
    command: str, name: str, own: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    values = [value for value in ("0", "-1", too_large(own)) if value is not None]
    if float in (own.type, *getattr(own.type, "__args__", ())):
        values += ["nan", "inf"]
    for value in values:
        assert main([command, *COMMANDS[command][1], f"--{name.replace('_', '-')}={value}"]) == 2
        told = capsys.readouterr().err
        assert len(told.splitlines()) == 1
        with pytest.raises(ConfigError) as caught:
            own.take(float(value) if own.type is float else int(value))
        assert told == f"penstock: {caught.value}\n" and f"{own.section}.{own.key} = " in told


@pytest.mark.parametrize("command, name, own", OPTIONS)
def test_help_and_default_are_those_of_the_setting(
    command: str, name: str, own: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = " ".join(capsys.readouterr().out.split())
    # argparse breaks lines also after a hyphen.
    said = re.sub(r"\s+", "", own.help.rstrip("."))
    assert said in re.sub(r"\s+", "", told)
    for value in (own.default, *possible(own.type)):
        assert value is None or str(value) in told
