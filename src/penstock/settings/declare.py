"""Declarations of settings: each is one field of a frozen dataclass, with default, bounds and a sentence of help.

    @dataclass(frozen=True)
    class TrainConfig(Settings, section="train"):
        steps: int = setting(100, "Optimizer steps.", AT_LEAST_1)

The file, the command line, its help, the checks and the engine all take these very objects.
"""

import dataclasses
import difflib
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
N = TypeVar("N", bound=str)
_KEY = "setting"


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and the possible values.

    >>> Layout(pp=0)
    Traceback (most recent call last):
    penstock.settings.declare.ConfigError: parallel.pp = 0 is not possible; it must be at least 1
    """


class NamedValue(enum.StrEnum):
    """One of several names, spelt as in files; underscores are accepted for hyphens, and capitals."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return spelt(value, cls)


def spelt(value: object, names: Iterable[N]) -> N | None:
    """The name that a value spells, capitals and underscores for hyphens aside; None if it spells none."""
    folded = str(value).replace("_", "-").lower()
    return next((name for name in names if name.replace("_", "-").lower() == folded), None)


class TableValue:
    """A setting that is a table in files: plain values by name."""

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> typing.Self:
        """Make the object of a file's table. Raises: ConfigError for a value that cannot be used."""
        raise NotImplementedError

    def table(self) -> dict[str, Any]:
        """The table from which `read` makes an equal object, as JSON values."""
        raise NotImplementedError


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
class Declaration:
    """A setting in its field's metadata; `key` is its name in files if that differs from the attribute's.

    `section` and `type` default to those of the field.
    """

    help: str
    bounds: Bounds | None
    key: str
    section: str = ""
    type: Any = None


def declared(help: str, bounds: Bounds | None = None, *, key: str = "") -> dict[str, Declaration]:
    """The metadata of a field that is a setting."""
    return {_KEY: Declaration(help, bounds, key)}


def setting(default: T, help: str, bounds: Bounds | None = None, *, key: str = "") -> T:
    """Declare a setting, as the value of a dataclass's field."""
    return dataclasses.field(default=default, metadata=declared(help, bounds, key=key))


def argument(default: T, bounds: Bounds) -> T:
    """Declare a field that is bounded like a setting, but is none: neither file nor command line has it."""
    return dataclasses.field(default=default, metadata=declared("", bounds))


def same_as(kind: type["Settings"], attribute: str) -> Any:
    """Declare that a field is the setting of another dataclass's attribute."""
    own = next(field for field in dataclasses.fields(typing.cast(Any, kind)) if field.name == attribute)
    found = own.metadata[_KEY]
    same = replace(found, key=found.key or attribute, section=kind.section, type=get_type_hints(kind)[attribute])
    return dataclasses.field(default=own.default, metadata={_KEY: same})


@dataclass(frozen=True)
class Setting:
    """A setting of a run.

    `path`: the attributes that lead to it from the run's settings. `default`: its value in a default run.
    """

    section: str
    key: str
    path: tuple[str, ...]
    type: Any
    default: Any
    bounds: Bounds | None
    help: str

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
            raise self.mismatch(value)
        return taken

    def mismatch(self, value: Any, given: str = "") -> ConfigError:
        """The error for a value of another type, as it was given; it names the nearest of several names."""
        names = [name for name in possible(self.type) if isinstance(name, str)]
        likely = f"; the nearest one is {json.dumps(nearest(value, names))}" if names and isinstance(value, str) else ""
        return ConfigError(
            f"{self.name} takes {describe(self.type)}, not {given or json.dumps(value, default=str)}{likely}"
        )

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
        own: Declaration = field.metadata.get(_KEY) or Declaration("", None, "")
        section, key, type_ = own.section or kind.section, own.key or field.name, own.type or hints[field.name]
        found.append(Setting(section, key, (field.name,), type_, field.default, _limited(own.bounds, type_), own.help))
    return tuple(found)


def _limited(bounds: Bounds | None, kind: Any) -> Bounds | None:
    """The bounds of a type's numbers, where whole ones have a limit."""
    bounds = bounds or Bounds()
    whole = any(part is int or (get_origin(part) is tuple and int in get_args(part)) for part in parts_of(kind))
    if whole and (bounds.most, bounds.below, bounds.limit) == (None, None, None):
        bounds = replace(bounds, limit=_LARGEST)
    return None if bounds == Bounds() else bounds


def walk(settings: Settings) -> Iterator[Setting]:
    """All settings of an object and of its fields, in order; the object's values are the defaults."""
    own_settings = {own.path[0]: own for own in _fields(type(settings)) if own.help}
    for field in dataclasses.fields(typing.cast(Any, settings)):
        value = getattr(settings, field.name)
        if field.name in own_settings:
            yield replace(own_settings[field.name], default=value)
        elif isinstance(value, Settings):
            yield from (replace(inner, path=(field.name, *inner.path)) for inner in walk(value))


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


def possible(kind: Any) -> tuple[Any, ...]:
    """The values of an enum or of literals, as spelt in files; empty for another type."""
    if is_union(kind):
        return tuple(value for part in get_args(kind) for value in possible(part))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def refuse_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    """Refuse a number that does not divide another one.

    Raises:
        ConfigError: the message lists the divisors.
    """
    if whole % value:
        divisors = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        raise ConfigError(f"{name} = {value} does not divide {whole_name} = {whole}; possible are {divisors}")


def nearest(name: str, known: Iterable[str], least: float = 0.0) -> str:
    """The known name most similar to `name`, capitals aside; the first one on a tie, none if all are below `least`."""
    matcher = difflib.SequenceMatcher(None, "", name.lower())

    def similarity(other: str) -> float:
        matcher.set_seq1(other.lower())
        # A name from elsewhere may be long: its length alone says that none is near.
        return matcher.ratio() if matcher.real_quick_ratio() >= least else 0.0

    best = max(known, key=similarity, default="")
    return best if similarity(best) >= least else ""


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The question for the known name that is meant, if one is near; else `otherwise`, or all of them."""
    known = list(known)
    if near := nearest(name, known, 0.5):
        return f"did you mean {near!r}?"
    return f"there are {', '.join(known)}" if otherwise is None else otherwise


def describe(kind: Any) -> str:
    """The values of a type, in words."""
    if is_union(kind):
        return " or ".join(dict.fromkeys(describe(part) for part in get_args(kind) if part is not types.NoneType))
    if possible(kind):
        *first, last = [json.dumps(choice) for choice in possible(kind)]
        return f"{', '.join(first)} or {last}" if first else last
    if is_table(kind) or get_origin(kind) is Mapping:
        return "a table"
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if get_origin(item) is tuple:
            return "a list of lists of integers"
        return "a list of tables" if is_table(item) else "a list of integers" if item is int else "a list of texts"
    if get_origin(kind) is Callable:
        return "a function"
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return _WORDS.get(kind, f"{article} {kind.__name__}")


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


def is_union(kind: Any) -> bool:
    """Return whether a type is a union."""
    return get_origin(kind) in (typing.Union, types.UnionType)


def parts_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    return get_args(kind) if is_union(kind) else (kind,)


def is_table(kind: Any) -> bool:
    """Return whether a type is that of a table."""
    return isinstance(kind, type) and issubclass(kind, TableValue)


def match(kind: Any, value: Any) -> tuple[bool, Any]:
    """Match a value to a type; returns whether it is of that type, and the converted value."""
    if is_union(kind):
        matches = (match(part, value) for part in get_args(kind))
        return next((match for match in matches if match[0]), (False, value))
    if kind is types.NoneType:
        return value is None, None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return (True, kind(value)) if isinstance(value, str) else (False, value)
        except ValueError:
            return False, value
    if get_origin(kind) is Literal:
        name = spelt(value, get_args(kind)) if isinstance(value, str) else None
        return name is not None, name
    if is_table(kind):
        if isinstance(value, Mapping):
            return True, kind.read(value)
        return isinstance(value, kind), value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple | range):
            return False, value
        items = [match(get_args(kind)[0], item) for item in value]
        matches = all(found for found, _ in items)
        return matches, tuple(item for _, item in items) if matches else value
    # bool is an int to Python, but not to a reader of a file.
    if kind in (int, float) and isinstance(value, bool):
        return False, value
    if kind is float and isinstance(value, int):
        return True, _as_float(value)
    expected = get_origin(kind) or kind
    return expected is Any or isinstance(value, expected), value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
