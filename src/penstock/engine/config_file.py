"""Reading settings: from TOML into frozen sections, and back. A mistake is told in one sentence that names the cure."""

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.engine.config import RunConfig

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that can not be; the message says which, and what can."""


def read_config(path: str | Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        ConfigError: no such file, no TOML, an unknown key (the nearest known one is named) or a value of a wrong type.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} can not be read: {error.strerror}; give the path of a run's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        return from_dict(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_dict(table: Mapping[str, Any]) -> RunConfig:
    """Make a `RunConfig` of plain values, section by section; what is left out has its default.

    Raises:
        ConfigError: an unknown key or a value of a wrong type.
    """
    return _section(RunConfig, table, "")


def to_toml(config: RunConfig) -> str:
    """The settings as a TOML file that reads back as the same settings; what is None is left out."""
    scalars, sections = [], []
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            lines = [f"{key} = {_toml(inner)}" for key, inner in value.items() if inner is not None]
            sections.append("\n".join([f"[{name}]", *lines]))
        else:
            scalars.append(f"{name} = {_toml(value)}")
    return "\n\n".join(["\n".join(scalars), *sections]) + "\n"


def setting_types() -> dict[str, Any]:
    """The type of every setting under its dotted name, in the order of the file."""
    found: dict[str, Any] = {}
    for name, annotation in get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(annotation):
            found.update({f"{name}.{key}": inner for key, inner in get_type_hints(annotation).items()})
        else:
            found[name] = annotation
    return found


def describe(annotation: Any) -> str:
    """What a setting takes, in words."""
    if get_origin(annotation) is Literal:
        *first, last = [json.dumps(choice) for choice in get_args(annotation)]
        return f"{', '.join(first)} or {last}" if first else last
    if get_origin(annotation) is tuple:
        return "a list of integers"
    if _is_union(annotation):
        return " or ".join(describe(part) for part in get_args(annotation) if part is not types.NoneType)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[annotation]


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`; of equal ones the first."""
    return max(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio())


def unknown_setting(name: str) -> ConfigError:
    """The error for a dotted name that no setting has; names the nearest one."""
    return ConfigError(f"there is no setting {name}; the nearest one is {_nearest_setting(name)}")


def _nearest_setting(name: str) -> str:
    known = list(setting_types())
    section, _, key = name.rpartition(".")
    # The right key in a wrong or forgotten section is a likelier slip than a key that merely looks alike.
    same_key = [other for other in known if other.rpartition(".")[2] == key]
    same_section = [other for other in known if section and other.startswith(f"{section}.")]
    return nearest(name, same_key or same_section or known)


def _section(kind: type[T], table: Mapping[str, Any], prefix: str) -> T:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise _unknown_key(name, value)
        annotation = hints[key]
        if dataclasses.is_dataclass(annotation):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is a section; write its settings below [{name}]")
            values[key] = _section(typing.cast(type, annotation), value, f"{name}.")
        else:
            values[key] = _value(annotation, value, name)
    return kind(**values)


def _unknown_key(name: str, value: object) -> ConfigError:
    if isinstance(value, Mapping):
        sections = [key for key, kind in get_type_hints(RunConfig).items() if dataclasses.is_dataclass(kind)]
        return ConfigError(f"there is no section [{name}]; the nearest one is [{nearest(name, sections)}]")
    return unknown_setting(name)


def _value(annotation: Any, value: Any, name: str) -> Any:
    found, taken = _match(annotation, value)
    if not found:
        raise ConfigError(f"{name} takes {describe(annotation)}, not {json.dumps(value, default=str)}")
    return taken


def _match(annotation: Any, value: Any) -> tuple[bool, Any]:
    """Whether `value` is of the annotated type, and the value as that type keeps it (1 as 1.0, a list as a tuple)."""
    if get_origin(annotation) is Literal:
        return value in get_args(annotation) and not isinstance(value, bool), value
    if get_origin(annotation) is tuple:
        matches = isinstance(value, list | tuple) and all(_match(int, item)[0] for item in value)
        return matches, tuple(value) if matches else value
    if _is_union(annotation):
        matches = (_match(part, value) for part in get_args(annotation))
        return next((match for match in matches if match[0]), (False, value))
    if annotation is types.NoneType:
        return value is None, None
    if annotation is float:
        matches = isinstance(value, int | float) and not isinstance(value, bool)
        return matches, float(value) if matches else value
    # bool is an int to Python, but not to a reader of the file.
    return isinstance(value, annotation) and (annotation is bool or not isinstance(value, bool)), value


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (typing.Union, types.UnionType)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    # JSON's texts, integers, booleans and finite numbers are TOML as well.
    return json.dumps(value)
