"""Declarations of settings: each is one field of a frozen dataclass, with default, bounds and a sentence of help.

    @dataclass(frozen=True)
    class TrainConfig(Settings, section="train"):
        steps: int = setting(100, "Optimizer steps.", AT_LEAST_1)

The file, the command line, its help, the checks and the engine all take these very objects. Files, the command line,
requests and public functions all ask `match`; what it refuses, `mismatch` puts in a sentence.
"""

import dataclasses
import enum
import functools
import inspect
import json
import math
import numbers
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from penstock.io.files import parse_toml

# ---- Values and their declared types: the one matcher, and its words, which are Python's


C = TypeVar("C", bound=Callable[..., Any])
T = TypeVar("T")
S = TypeVar("S", bound="Settings")
N = TypeVar("N", bound=str)
_SEQUENCES = (Sequence, Collection, list)
# Anything else may have a representation of any length.
_QUOTED = (str, bytes, int, float, list, tuple, dict, set, types.NoneType)


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
    def read(cls, table: Mapping[str, Any]) -> Self:
        """Make the object of a file's table. Raises: ConfigError for a value that cannot be used."""
        raise NotImplementedError

    def table(self) -> dict[str, Any]:
        """The table from which `read` makes an equal object, as JSON values."""
        raise NotImplementedError


def parts_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of another type, itself."""
    return get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def is_table(kind: Any) -> bool:
    """Return whether a type is that of a table."""
    return isinstance(kind, type) and issubclass(kind, TableValue)


def possible(kind: Any) -> tuple[Any, ...]:
    """The values of an enum or of literals, as spelt in files; empty for another type."""
    if len(parts := parts_of(kind)) > 1:
        return tuple(value for part in parts for value in possible(part))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def match(kind: Any, value: Any) -> tuple[bool, Any]:
    """Match a value to a type.

    Returns whether it is of that type, and the converted value: 1 as 1.0, a list as a tuple, a name as an enum's
    member, a table as the object that it describes. A truth value is a number to Python alone, and no number here.

    >>> match(float, 1), match(tuple[int, ...] | None, [1, 2]), match(int, True)
    ((True, 1.0), (True, (1, 2)), (False, True))
    """
    origin = get_origin(kind) or kind
    if len(parts := parts_of(kind)) > 1:
        found = (match(part, value) for part in parts)
        return next((one for one in found if one[0]), (False, value))
    if origin is types.NoneType:
        return value is None, value
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        try:
            return (True, origin(value)) if isinstance(value, str) else (isinstance(value, origin), value)
        except ValueError:
            return False, value
    if origin is Literal:
        exact = any(type(value) is type(one) and value == one for one in get_args(kind))
        name = spelt(value, (one for one in get_args(kind) if isinstance(one, str))) if isinstance(value, str) else None
        return exact or name is not None, value if name is None else name
    if is_table(origin) and isinstance(value, Mapping):
        return True, origin.read(value)
    if origin is tuple or origin in _SEQUENCES:
        return _match_items(origin, kind, value)
    if origin in (int, float):
        return _match_number(origin, value)
    if origin is Callable:
        return callable(value), value
    if origin in (Iterable, Set, Mapping):
        return isinstance(value, origin) and not isinstance(value, str | bytes), value
    if origin is Any or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True, value
    return isinstance(value, PathLike if origin is Path else origin), value


def _match_items(origin: Any, kind: Any, value: Any) -> tuple[bool, Any]:
    """Match a list: items are matched where it is one of Python's, and converted for a tuple."""
    if not isinstance(value, list | tuple | range):
        # Arrays and tensors have items too.
        is_list = origin is not tuple and hasattr(value, "__len__") and hasattr(value, "__getitem__")
        return is_list and not isinstance(value, str | bytes | Mapping | type), value
    items = [match(item_of(kind), item) for item in value]
    found = all(fits for fits, _ in items)
    return found, tuple(item for _, item in items) if found and origin is tuple else value


def _match_number(origin: Any, value: Any) -> tuple[bool, Any]:
    """Match a number, of numpy too."""
    kind: Any = numbers.Integral if origin is int else numbers.Real
    fits = isinstance(value, kind) and not isinstance(value, bool)
    try:
        return fits, origin(value) if fits and not isinstance(value, origin) else value
    except OverflowError:  # a whole number beyond all floats
        return True, math.inf if value > 0 else -math.inf


def item_of(kind: Any) -> Any:
    """The type of a list's items; Any where a look into each of them would cost much."""
    item = next(iter(get_args(kind)), Any)
    if get_origin(kind) is tuple:
        return item
    return Any if any(get_origin(part) not in (None, functools.partial) for part in parts_of(item)) else item


def in_words(kind: Any) -> str:
    """The values of a type, in the words of Python.

    >>> describe(int | None), describe(tuple[float, ...]), describe(Literal["a", "b"])
    ('int or None', 'list[float]', '"a" or "b"')
    """
    if len(parts := parts_of(kind)) > 1:
        return " or ".join(dict.fromkeys(map(in_words, parts)))
    if choices := [json.dumps(choice) for choice in possible(kind)]:
        return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
    origin = get_origin(kind) or kind
    if is_table(origin) or origin is Mapping:
        return "dict"
    if origin is tuple or origin in _SEQUENCES:
        item = item_of(kind)
        return "list" if item is Any else f"list[{in_words(item)}]"
    names = {types.NoneType: "None", Callable: "function", Path: "path"}
    return names.get(origin) or getattr(origin, "__name__", str(origin))


def mismatch(name: str, value: Any, kind: Any) -> str:
    """One sentence about a value that is not of a type; it names the nearest of several names.

    >>> mismatch("steps", "3", int), mismatch("axis", "q", Literal["p", "d"])
    ("steps = '3': expected int, got str", 'axis = \\'q\\': expected "p" or "d"; the nearest one is "p"')
    """
    for part in parts_of(kind):
        origin = get_origin(part) or part
        if (origin is tuple or origin in _SEQUENCES) and isinstance(value, list | tuple):
            wrong = next((at for at, one in enumerate(value) if not match(item_of(part), one)[0]), None)
            if wrong is not None:
                return mismatch(f"{name}[{wrong}]", value[wrong], item_of(part))
    shown = f"{name} = {' '.join(reprlib.repr(value).split())}" if isinstance(value, _QUOTED) else name
    known = [one for one in possible(kind) if isinstance(one, str)]
    if known and isinstance(value, str):
        return f"{shown}: expected {in_words(kind)}; the nearest one is {json.dumps(nearest(value, known))}"
    return f"{shown}: expected {in_words(kind)}" + ("" if value is None else f", got {type(value).__name__}")


def type_in_words(value: object) -> str:
    """The name of a value's type as a sentence has it.

    >>> type_in_words(3), type_in_words("3")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def words_of(error: BaseException) -> str:
    """The text of an error, also of one that cannot say what it is: a user's class may fail in its `__str__`."""
    try:
        return str(error)
    except Exception as failed:
        return f"{type(error).__name__} whose __str__ raises {type(failed).__name__}"


# Words of other programs, and what is meant by them here.
_ELSEWHERE = {
    "batch_size": "num_sequences",
    "per_device_train_batch_size": "num_sequences",
    "gradient_accumulation_steps": "num_microbatches",
    "gradient_checkpointing": "recompute",
    "num_microbatches_with_partial_activation_checkpoints": "num_kept_microbatches",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_seq_length": "sequence_length",
    "seq_length": "sequence_length",
    "lr": "learning_rate",
    "warmup_steps": "num_warmup_steps",
    "warmup_ratio": "num_warmup_steps",
    "host": "address",
    "hostname": "host",
    "gpu": "cuda",
    "dtype": "precision",
    "pipeline_parallel_size": "pp",
    "pipeline_model_parallel_size": "pp",
    "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "data_parallel_size": "dp",
    "context_parallel_size": "cp",
    "zbv": "zb-v",
    "gpipe": "afab",
}


def nearest(name: str, known: Iterable[str], least: float = 0.0) -> str:
    """The known name that is meant by a word of other programs or by its beginning, or the one most similar to `name`.

    Capitals do not count. None if all are below `least`.
    """
    # Only mistakes need it.
    import difflib

    ends = {other: other.lstrip("-").rpartition(".")[2] for other in known}
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
    meant = (other for other, end in ends.items() if end == _ELSEWHERE.get(last))
    # What was cut short means the shortest name that goes on from it.
    longer = [other for other, end in ends.items() if len(last) > 2 and end.startswith(last)]
    if sure := next(meant, None) or min(longer, key=len, default=None):
        return sure
    by_lower = {other.lower(): other for other in ends}
    similar = difflib.get_close_matches(name.lower(), by_lower, 1, least)
    return by_lower[similar[0]] if similar else ""


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """The question for the known name that is meant, if one is near; else `otherwise`, or all of them."""
    known = list(known)
    if near := nearest(name, known, 0.5):
        return f"did you mean {near!r}?"
    return f"there are {', '.join(known)}" if otherwise is None else otherwise


# ---- arguments of public functions


def checked(target: C) -> C:
    """Let a function, or the constructor of a class, refuse arguments of other types than its annotations name.

    >>> @checked
    ... def repeated(text: str, times: int = 2) -> str:
    ...     return text * times
    >>> repeated("ab", times="3")
    Traceback (most recent call last):
    ValueError: times = '3': expected int, got str

    Of lists, the items are checked too where they are numbers, texts or objects of one class.

    Raises: ValueError naming the argument, what was given and what is possible; TypeError for an argument that the
    function does not have, naming the nearest one.
    """
    if isinstance(target, type):
        kind: Any = target
        kind.__init__ = checked(kind.__init__)
        return kind
    form, hints = inspect.signature(target), functools.cache(functools.partial(get_type_hints, target))

    @functools.wraps(target)
    def call(*args: Any, **named: Any) -> Any:
        try:
            bound = form.bind(*args, **named)
        except TypeError:
            refuse_unknown(target.__qualname__.removesuffix(".__init__"), form.parameters, named)
            # Python says what is missing, or too much.
            return target(*args, **named)
        for name, value in bound.arguments.items():
            if name in hints() and form.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
                check_argument(name, value, hints()[name])
        return target(*args, **named)

    return typing.cast(C, call)


def refuse_unknown(owner: str, known: Iterable[str], named: Iterable[str], error: type[Exception] = TypeError) -> None:
    """Refuse names that a function or class does not know. Raises: an `error` naming the nearest known one."""
    known = [name for name in known if name != "self"]
    if known and (unknown := next((name for name in named if name not in known), None)):
        raise error(f"{owner} has no {unknown!r}; the nearest one is {nearest(unknown, known)!r}")


def check_argument(name: str, value: Any, kind: Any) -> None:
    """Refuse a value of another type, names in place of an enum's members included. Raises: ValueError."""
    if Path in parts_of(kind) and isinstance(value, str) and not value:
        raise ValueError(f"{name} = '' is empty; give a path")
    for part in parts_of(kind):
        matches, taken = match(part, value)
        respelt = isinstance(taken, str) and taken is not value and not (type(taken) is type(value) and taken == value)
        if matches and not respelt:
            return
    raise ValueError(mismatch(name, value, kind))


# ---- Settings and their sections


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

    `limit` is the machine's own upper bound, which only the refusal of a larger number mentions.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
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
FRACTION = Bounds(least=0, below=1)
# With these limits, the bytes of a weight of all heads, or of all experts of a layer, still fit in 64 bits.
WIDTH = Bounds(least=1, limit=2**20)
HEADS = Bounds(least=1, limit=2**16)
# Of a whole number whose declaration names no upper bound: a product of two still fits in 64 bits.
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Setting:
    """A setting. As a field's metadata it omits what the dataclass field already states: type and default.

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
        for item in taken if isinstance(taken, tuple) else (taken,):
            if isinstance(item, str) and re.search("[\0\ud800-\udfff]", item):
                raise ConfigError(f"{self.name} = {item!r} is not UTF-8 without null characters; rename it")
            if self.bounds is not None and isinstance(item, int | float) and not self.bounds.contain(item):
                shown, subject = (list(taken), "each") if isinstance(taken, tuple) else (taken, "it")
                left_out = ", or None" if types.NoneType in get_args(self.type) else ""
                raise ConfigError(f"{self.name} = {shown} {self.bounds.refusal(item, subject)}{left_out}")
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
    """Declare that a field is the setting of another dataclass's attribute, with its name, such as train.recompute."""
    same = next(one for one in _fields(kind) if one.path == (attribute,))
    return dataclasses.field(default=same.default, metadata={_KEY: same})


class Settings:
    """A frozen dataclass of settings, all of one section; every field is checked whenever an object is made.

    A field of another such type holds settings of its own section. A field without help is no setting of a run.
    """

    section: ClassVar[str] = ""

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section or cls.section

    def __new__(cls, *_: Any, **given: Any) -> typing.Self:
        known = (field.name for field in dataclasses.fields(typing.cast(Any, cls)) if field.init)
        refuse_unknown(cls.__name__, known, given, ConfigError)
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
    settings = []
    for field in dataclasses.fields(typing.cast(Any, kind)):
        own: Setting = field.metadata.get(_KEY) or Setting()
        type_, bounds = own.type or hints[field.name], own.bounds or Bounds()
        whole = any(part is int or (get_origin(part) is tuple and int in get_args(part)) for part in parts_of(type_))
        if whole and (bounds.most, bounds.below, bounds.limit) == (None, None, None):
            bounds = replace(bounds, limit=_LARGEST)
        settings.append(
            replace(
                own,
                section=own.section or kind.section,
                key=own.key or field.name,
                path=(field.name,),
                type=type_,
                default=field.default,
                bounds=None if bounds == Bounds() else bounds,
            )
        )
    return tuple(settings)


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


# ---- Words of the command line


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
            # Lists of numbers may also be written as in files.
            is_numbers = items and items[0] in (int, float)
            each = " ".join(words).strip("[] ").replace(",", " ").split() if is_numbers else words
            read = [_read_word(items[0] if items else kind, word) for word in each]
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
