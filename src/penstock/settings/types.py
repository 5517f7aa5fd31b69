"""Values and their declared types: the one matcher, and its words, which are Python's.

Files, the command line, requests and public functions all ask `match`; what it refuses, `mismatch` puts in a sentence.
"""

import enum
import functools
import inspect
import json
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

T = TypeVar("T", bound=Callable[..., Any])
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


def check_kinds(content: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Refuse a value of a JSON object that is neither null nor missing nor of its key's type.

    Raises: ValueError naming the key and its value.
    """
    for key, kind in kinds.items():
        value = content.get(key)
        if value is not None and not match(kind, value)[0]:
            raise ValueError(mismatch(f"{where}: {key}", value, kind))


def type_in_words(value: object) -> str:
    """The name of a value's type as a sentence has it.

    >>> type_in_words(3), type_in_words("3")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def nearest(name: str, known: Iterable[str], least: float = 0.0) -> str:
    """The known name most similar to `name`, capitals aside; the first one on a tie, none if all are below `least`."""
    # Only mistakes need it.
    import difflib

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


# ---- arguments of public functions


def checked(target: T) -> T:
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
    form = inspect.signature(target)

    @functools.cache
    def hints() -> dict[str, Any]:
        return typing.get_type_hints(target)

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

    return typing.cast(T, call)


def refuse_unknown(function: str, known: Iterable[str], named: Iterable[str]) -> None:
    """Refuse names that a function does not know. Raises: TypeError naming the nearest known one."""
    known = [name for name in known if name != "self"]
    if known and (unknown := [name for name in named if name not in known]):
        raise TypeError(f"{function} has no {unknown[0]!r}; the nearest one is {nearest(unknown[0], known)!r}")


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
