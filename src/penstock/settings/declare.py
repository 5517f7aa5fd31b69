"""Declarations of settings: each is one field of a frozen dataclass, with default, bounds and a sentence of help.

    @dataclass(frozen=True)
    class TrainConfig(Settings, section="train"):
        steps: int = setting(100, "Optimizer steps.", AT_LEAST_1)

The file, the command line, its help, the checks and the engine all take these very objects.
"""

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from penstock.settings.types import TableValue, match, mismatch, nearest, parts_of

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
_KEY = "setting"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and the possible values.

    >>> Layout(pp=0)
    Traceback (most recent call last):
    penstock.settings.declare.ConfigError: parallel.pp = 0 is not possible; it must be at least 1
    """


@dataclass(frozen=True)
class Bounds:
    """The allowed numbers of a setting, or of each item of a list.

    `otherwise` is the message for numbers that are too large. `limit` is the machine's own upper bound, which only the
    refusal of a larger number mentions.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    otherwise: str = "is not possible"
    limit: int | None = None

    def contain(self, value: float) -> bool:
        """Return whether the number lies within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (self.limit is None or value <= self.limit)
        )

    def refusal(self, value: float, subject: str = "it") -> str:
        """The end of a message, after the offending value: the fault, and the values possible for `subject`."""
        if self.least == 0 and value < 0:
            return "is negative; 0 or more is possible"
        if self.below is not None and value >= self.below:
            return f"{self.otherwise}; give less than {self.below}"
        if self.limit is not None and value > self.limit:
            return f"is too large; at most {self.limit} is possible"
        return f"is not possible; {subject} must be {self}"

    def __str__(self) -> str:
        words = (
            ("at least", self.least),
            ("more than", self.above),
            ("at most", self.most),
            ("less than", self.below),
        )
        return " and ".join(f"{word} {limit}" for word, limit in words if limit is not None)


AT_LEAST_0 = Bounds(least=0)
AT_LEAST_1 = Bounds(least=1)
ABOVE_0 = Bounds(above=0)
# With these limits, the bytes of a weight of all heads, or of all experts of a layer, still fit in 64 bits.
WIDTH = Bounds(least=1, limit=2**20)
HEADS = Bounds(least=1, limit=2**16)
# Of a whole number whose declaration names no upper bound: a product of two still fits in 64 bits.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Setting:
    """A setting of a run; in its field's metadata, what the field itself says is left out.

    `key`: its name in files. `is_newer`: the first runs did not have it, and go on where it has its default. `path`:
    the attributes that lead to it from the run's settings. `default`: its value in a default run.
    """

    help: str = ""
    bounds: Bounds | None = None
    key: str = ""
    is_newer: bool = False
    section: str = ""
    path: tuple[str, ...] = ()
    type: Any = None
    default: Any = None

    @property
    def name(self) -> str:
        """The dotted name, as on the command line."""
        return f"{self.section}.{self.key}" if self.section else self.key

    def matched(self, value: Any) -> Any:
        """Convert a value to the setting's type: 1 to 1.0, a list to a tuple, a name to an enum's member.

        Raises:
            ConfigError: it is of another type.
        """
        matches, taken = match(self.type, value)
        if not matches:
            raise ConfigError(mismatch(self.name, value, self.type))
        return taken

    def take(self, value: Any) -> Any:
        """Convert a value as `matched` does, and check its bounds.

        Raises:
            ConfigError: it is of another type, or out of bounds.
        """
        taken = value if type(value) is self.type else self.matched(value)
        if isinstance(taken, float) and not math.isfinite(taken):
            raise ConfigError(f"{self.name} = {taken} is not a finite number")
        if isinstance(taken, str) and "\0" in taken:
            raise ConfigError(f"{self.name} holds a null character, which no path or name can")
        if self.bounds is None:
            return taken
        for number in taken if isinstance(taken, tuple) else (taken,):
            if isinstance(number, int | float) and not self.bounds.contain(number):
                left_out = ", or None" if types.NoneType in get_args(self.type) else ""
                several = isinstance(taken, tuple)
                refusal = self.bounds.refusal(number, "each" if several else "it")
                raise ConfigError(f"{self.name} = {list(taken) if several else taken} {refusal}{left_out}")
        return taken


def declared(help: str, bounds: Bounds | None = None, *, key: str = "", is_newer: bool = False) -> dict[str, Setting]:
    """The metadata of a field that is a setting; for one given by name alone, which type checkers must see."""
    return {_KEY: Setting(help, bounds, key, is_newer)}


def setting(default: T, help: str, bounds: Bounds | None = None, *, key: str = "", is_newer: bool = False) -> T:
    """Declare a setting, as the value of a dataclass's field; see `Setting`."""
    return dataclasses.field(default=default, metadata=declared(help, bounds, key=key, is_newer=is_newer))


def argument(default: T, bounds: Bounds) -> T:
    """Declare a field that is bounded like a setting, but is none: neither file nor command line has it."""
    return setting(default, "", bounds)


def same_as(kind: type["Settings"], attribute: str) -> Any:
    """Declare that a field is the setting of another dataclass's attribute."""
    own = next(field for field in dataclasses.fields(typing.cast(Any, kind)) if field.name == attribute)
    found = own.metadata[_KEY]
    same = replace(found, key=found.key or attribute, section=kind.section, type=get_type_hints(kind)[attribute])
    return dataclasses.field(default=own.default, metadata={_KEY: same})


class Settings:
    """A frozen dataclass of settings, all of one section; every field is checked whenever an object is made.

    A field of another such type holds settings of its own section. A field without help is no setting of a run.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __new__(cls, *_: Any, **given: Any) -> typing.Self:
        known = [field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.init]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(
                f"{cls.__name__} has no {unknown[0]!r}; the nearest one is {nearest(unknown[0], known)!r}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for own in _fields(type(self)):
            value = getattr(self, own.path[0])
            taken = own.take(value)
            if taken is not value:
                object.__setattr__(self, own.path[0], taken)
        self._check()

    def _check(self) -> None:
        """Refuse values that exclude each other."""


@functools.cache
def _fields(kind: type[Settings]) -> tuple[Setting, ...]:
    """Every field of the dataclass, with its type and bounds."""
    hints = get_type_hints(kind)
    found = []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        own: Setting = field.metadata.get(_KEY) or Setting()
        type_, bounds = own.type or hints[field.name], own.bounds or Bounds()
        whole = any(part is int or (get_origin(part) is tuple and int in get_args(part)) for part in parts_of(type_))
        if whole and (bounds.most, bounds.below, bounds.limit) == (None, None, None):
            bounds = replace(bounds, limit=_LARGEST)
        of_field = replace(
            own,
            section=own.section or kind.section,
            key=own.key or field.name,
            path=(field.name,),
            type=type_,
            default=field.default,
            bounds=None if bounds == Bounds() else bounds,
        )
        found.append(of_field)
    return tuple(found)


def walk_settings(settings: Settings) -> Iterator[Setting]:
    """All settings of an object and of its fields, in order; the object's values are the defaults."""
    own_settings = {own.path[0]: own for own in _fields(type(settings)) if own.help}
    for field in dataclasses.fields(typing.cast(Any, settings)):
        value = getattr(settings, field.name)
        if field.name in own_settings:
            yield replace(own_settings[field.name], default=value)
        elif isinstance(value, Settings):
            yield from (replace(inner, path=(field.name, *inner.path)) for inner in walk_settings(value))


def value_of(settings: Settings, path: tuple[str, ...]) -> Any:
    """The value at the end of a path of attributes."""
    return functools.reduce(getattr, path, settings)


def with_values(settings: S, values: Mapping[tuple[str, ...], Any]) -> S:
    """Replace values by their paths; each object is made once, with all its values.

    Raises:
        ConfigError: a value of a wrong type or out of bounds, or values that exclude each other.
    """
    changed: dict[str, Any] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in {path[0]: None for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        changed[name] = with_values(getattr(settings, name), inner)
    return replace(typing.cast(Any, settings), **changed) if changed else settings


def plain(value: Any) -> Any:
    """The value in JSON and messages: an enum's member as its name, a table as one."""
    if isinstance(value, TableValue):
        return value.table()
    if isinstance(value, tuple) and any(isinstance(item, TableValue) for item in value):
        return [plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def refuse_divisor(name: str, value: int, whole_name: str, whole: int, otherwise: str = "") -> None:
    """Refuse a number that does not divide another one.

    Raises:
        ConfigError: the message lists the divisors, and what would be possible otherwise.
    """
    if whole % value:
        possible = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0) + otherwise
        raise ConfigError(f"{name} = {value} does not divide {whole_name} = {whole}; possible are {possible}")
