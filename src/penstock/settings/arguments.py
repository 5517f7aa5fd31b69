"""Arguments of public functions, checked against their annotations: one place says what is wrong and what is possible.

    @checked
    def lower(schedule: Schedule, *, receives_ahead: int = 2) -> Program:

>>> @checked
... def repeated(text: str, times: int = 2) -> str:
...     return text * times
>>> repeated("ab", times="3")
Traceback (most recent call last):
ValueError: times = '3' is a str; give a whole number
"""

import functools
import inspect
import numbers
import re
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from penstock.settings.declare import is_union, nearest, parts_of, possible

T = TypeVar("T", bound=Callable[..., Any])

_LISTS = (Sequence, Collection, list, tuple)
_WORDS = {
    bool: ("True or False", "truth values"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    types.NoneType: ("None", "None"),
}
# Anything else may have a representation of any length.
_QUOTED = (str, bytes, int, float, list, tuple, dict, set, types.NoneType)


def checked(target: T) -> T:
    """Let a function, or the constructor of a class, refuse arguments of other types than its annotations name.

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
    """Refuse a value of another type. Raises: ValueError."""
    parts = parts_of(kind)
    if Path in parts and isinstance(value, str) and not value:
        raise ValueError(f"{name} = '' is empty; give a path")
    if any(_fits(part, value) for part in parts):
        return
    item = next((_item_of(part) for part in parts if get_origin(part) in _LISTS), Any)
    for number, one in enumerate(value if isinstance(value, list | tuple) else ()):
        if not _fits(item, one):
            raise ValueError(f"{_spelt(f'{name}[{number}]', one)}; give {_words(item)}")
    raise ValueError(f"{_spelt(name, value)}; give {_words(kind)}")


def _fits(kind: Any, value: Any) -> bool:
    origin = get_origin(kind) or kind
    if is_union(kind):
        return any(_fits(part, value) for part in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin is Callable:
        return callable(value)
    if origin in _LISTS:
        # Arrays and tensors have items too.
        is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        if not is_list or isinstance(value, str | bytes | Mapping | type):
            return False
        return not isinstance(value, list | tuple) or all(_fits(_item_of(kind), item) for item in value)
    if origin in (Iterable, Set, Mapping):
        return isinstance(value, origin) and not isinstance(value, str | bytes)
    if origin is Any or not isinstance(origin, type) or getattr(origin, "_is_protocol", False):
        return True
    if origin in (int, float):
        # Those of numpy, too; a truth value is a number to Python alone.
        return isinstance(value, numbers.Integral if origin is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, PathLike if origin is Path else origin)


def _item_of(kind: Any) -> Any:
    """The type of a list's items, where a look at all of them costs little."""
    item = next(iter(get_args(kind)), Any)
    return Any if any(get_origin(part) not in (None, functools.partial) for part in parts_of(item)) else item


def _spelt(name: str, value: Any) -> str:
    kind = "" if value is None else f" is {type_in_words(value)}"
    return f"{name} = {' '.join(reprlib.repr(value).split())}{kind}" if isinstance(value, _QUOTED) else f"{name}{kind}"


def _words(kind: Any, several: bool = False) -> str:
    """The values of a type, in words."""
    if is_union(kind):
        return " or ".join(dict.fromkeys(_words(part, several) for part in get_args(kind)))
    if kind in _WORDS:
        return _WORDS[kind][several]
    origin = get_origin(kind) or kind
    if possible(kind):
        return ", ".join(repr(getattr(value, "value", value)) for value in possible(kind))
    if origin is Callable:
        return "functions" if several else "a function"
    if origin in _LISTS:
        item = _item_of(kind)
        return ("lists" if several else "a list") + ("" if item is Any else f" of {_words(item, several=True)}")
    name = getattr(origin, "__name__", str(origin))
    return f"{name}s" if several else _with_article(name)


def type_in_words(value: object) -> str:
    """The name of a value's type as a sentence has it.

    >>> type_in_words(3), type_in_words("3")
    ('an int', 'a str')
    """
    return _with_article(type(value).__name__)


# Names that begin with the sound of a vowel: an int, an MLP, an RMSNorm, but a UnitSpec and a URL.
_VOWEL = re.compile("[AEIOaeio]|[Uu](?!ni|se|[A-Z])|[FHLMNRSX][A-Z]")


def _with_article(name: str) -> str:
    return f"{'an' if _VOWEL.match(name) else 'a'} {name}"
