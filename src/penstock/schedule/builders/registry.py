"""The registry of schedules that can be built by name; each builder registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from penstock.schedule.actions import Schedule, check_count

_Builder = TypeVar("_Builder", bound=Callable[..., Schedule])


class _Entry(NamedTuple):
    """A builder, and the dataclass of its options if they are not parameters of the builder itself."""

    build: Callable[..., Schedule]
    options: type | None


_ENTRIES: dict[str, _Entry] = {}
_COMMON = ("ranks", "microbatches", "stages_per_rank")
# With one stage on each rank both forms are the same.
_ALIASES = {"combined": "combined-1f1b"}
# The order of lists; any other schedules follow by name.
_LISTED = (
    *("afab", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min"),
    *("combined-1f1b", "combined-interleaved", "dualpipe-v", "dualpipe", "auto", "inference"),
)


def builder(name: str, *, options: type | None = None) -> Callable[[_Builder], _Builder]:
    """Register a builder under a name; the first line of its docstring describes the schedule.

    A builder takes `ranks`, `microbatches` and `stages_per_rank`, whose default is the number that the schedule is
    meant for. The schedule's options are the builder's other parameters, each with a default, or the fields of the
    dataclass `options`, which it then takes under that name. Nothing else declares an option.
    """

    def enter(build: _Builder) -> _Builder:
        _ENTRIES[name] = _Entry(build, options)
        return build

    return enter


def names(*, with_aliases: bool = False) -> tuple[str, ...]:
    """The schedules that `build` knows and, if asked for, their second names.

    >>> names()[:3]
    ('afab', '1f1b', 'interleaved')
    """
    known = (*(name for name in _LISTED if name in _ENTRIES), *sorted(_ENTRIES.keys() - set(_LISTED)))
    return (*known, *_ALIASES) if with_aliases else known


def describe(name: str) -> str:
    """Describe a schedule in one line.

    >>> describe("afab")
    'All forwards, then all backwards: the simplest order, and the most memory'

    Raises: ValueError for a name that is not known.
    """
    return (_entry(name).build.__doc__ or "").partition("\n")[0].rstrip(".")


def options(name: str) -> dict[str, Any]:
    """The options of a schedule with their defaults, beside `ranks`, `microbatches` and `stages_per_rank`.

    >>> options("interleaved")
    {'group_size': 0}

    Raises: ValueError for a name that is not known.
    """
    entry = _entry(name)
    if entry.options is not None:
        return {field.name: field.default for field in fields(entry.options)}
    parameters = signature(entry.build).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _COMMON}


def default_stages(name: str) -> int:
    """The number of stages on each rank that a schedule is meant for.

    >>> default_stages("zb-v")
    2

    Raises: ValueError for a name that is not known.
    """
    return signature(_entry(name).build).parameters["stages_per_rank"].default


def build(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options_given: Any
) -> Schedule:
    """Build the schedule of that name; `names()` lists them and `options(name)` what else each takes.

    By default, each rank has `default_stages(name)` stages.

    >>> print(*build("1f1b", ranks=2, microbatches=2).orders[0])
    0F0 0F1 0B0 0B1

    Raises: ValueError for an unknown name or option, naming the nearest one, and for impossible numbers.
    """
    entry = _entry(name)
    if stages_per_rank is None:
        stages_per_rank = default_stages(name)
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    check_count("stages_per_rank", stages_per_rank)
    known = options(name)
    for option in options_given:
        if option not in known:
            raise ValueError(f"schedule {name} has no option {option!r}; {_nearest(option, known)}")
    if entry.options is not None:
        return entry.build(ranks, microbatches, stages_per_rank, options=entry.options(**options_given))
    return entry.build(ranks, microbatches, stages_per_rank, **options_given)


def _entry(name: str) -> _Entry:
    name = _ALIASES.get(name, name)
    if name not in _ENTRIES:
        raise ValueError(f"there is no schedule {name!r}; {_nearest(name, dict.fromkeys(names()))}")
    return _ENTRIES[name]


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    """Suggest what to write instead of an unknown word."""
    if not known:
        return "it has none"
    nearest = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{suggestion}possible: {', '.join(known)}"
