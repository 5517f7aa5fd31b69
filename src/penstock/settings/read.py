"""Reading settings from TOML and the command line, and writing them; an error is one sentence that names the cure."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from penstock.io.documents import parse_toml
from penstock.io.files import read_text
from penstock.settings.declare import ConfigError, Setting, Settings, with_values
from penstock.settings.run import SETTINGS, RunConfig
from penstock.settings.types import checked, is_table, match, mismatch, nearest, parts_of

Values = dict[str, Any]
"""Values of settings by their dotted names."""


@checked
def read_config(path: str | Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        ConfigError: a missing file, invalid TOML, an unknown key (the nearest one is named), or a value of a wrong
            type or out of bounds.

    >>> read_config("missing.toml")
    Traceback (most recent call last):
    penstock.settings.declare.ConfigError: ...
    """
    values = read_values(path)
    try:
        return from_values(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_values(path: str | Path) -> Values:
    """Read the settings that a run's TOML file gives, by name.

    Raises:
        ConfigError: as `read_config`, except for bounds and combinations.
    """
    path = Path(path)
    try:
        table = parse_toml(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a run's TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML of settings: {error}") from None
    try:
        return _values(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of plain values, section by section, with defaults for the others.

    Raises:
        ConfigError: an unknown key, a value of a wrong type or out of bounds, or values that cannot go together.
    """
    return from_values(_values(table))


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of values by their dotted names. Raises: as `from_dict`."""
    return with_values(RunConfig(), {SETTINGS[name].path: value for name, value in values.items()})


def section_summaries() -> dict[str, str]:
    """The sections of the file, in order, each with a one-line summary."""
    config, found = RunConfig(), {}
    for own in SETTINGS.values():
        owner: Any = config
        for name in own.path[:-1]:
            owner = getattr(owner, name)
            assert isinstance(owner, Settings)
            if owner.section == own.section:
                found.setdefault(own.section, (type(owner).__doc__ or "").partition("\n")[0])
    return found


# ---- the command line


def from_words(own: Setting, words: Sequence[str]) -> Any:
    """Read the words after a flag as the value of a setting.

    Raises:
        ConfigError: they are not of its type.
    """
    # Any word is a string, so that None has to come first.
    for kind in sorted(parts_of(own.type), key=lambda kind: kind is not types.NoneType):
        items = get_args(kind)[:1] if get_origin(kind) is tuple else ()
        if is_table(items[0] if items else kind):
            try:
                value = parse_toml(f"value = {' '.join(words)}")["value"]
            except ValueError:
                continue
        else:
            read = [_read_word(items[0] if items else kind, word) for word in words]
            if not all(found for found, _ in read) or not (items or len(words) == 1):
                continue
            value = tuple(value for _, value in read) if items else read[0][1]
        return own.matched(value)
    raise ConfigError(mismatch(own.name, " ".join(words) if words else None, own.type))


def _read_word(kind: Any, word: str) -> tuple[bool, Any]:
    if kind is types.NoneType:
        return word in ("none", "None"), None
    if kind is bool:
        return word.lower() in ("true", "false"), word.lower() == "true"
    if kind in (int, float):
        try:
            return True, kind(word)
        except ValueError:
            return False, None
    return match(kind, word)


# ---- names


def unknown_setting(name: str) -> ConfigError:
    """The error for an unknown dotted name; it names the nearest setting."""
    section, _, key = name.rpartition(".")
    # The right key in a wrong or forgotten section is a likelier slip than a key that merely looks alike.
    same_key = [other for other in SETTINGS if other.rpartition(".")[2] == key]
    same_section = [other for other in SETTINGS if section and other.startswith(f"{section}.")]
    close = nearest(name, same_key or same_section or list(SETTINGS))
    return ConfigError(f"there is no setting {name}; the nearest one is {close}")


def _values(table: Mapping[str, Any]) -> Values:
    """The values of a table by their dotted names, each of its setting's type."""
    sections, values = section_summaries(), {}
    for name, value in table.items():
        if name in SETTINGS:
            values[name] = SETTINGS[name].matched(value)
        elif name not in sections:
            if isinstance(value, Mapping):
                raise ConfigError(f"there is no section [{name}]; the nearest one is [{nearest(name, sections)}]")
            raise unknown_setting(name)
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{name} is a section; write its settings below [{name}]")
        else:
            for key, inner in value.items():
                full = f"{name}.{key}"
                if full not in SETTINGS:
                    raise unknown_setting(full)
                values[full] = SETTINGS[full].matched(inner)
    return values
