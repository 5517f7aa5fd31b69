"""The schedules that can be built by name, each described by the first line of its builder's docstring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from types import MappingProxyType
from typing import Any

from penstock.schedule.actions import Schedule, check_count
from penstock.schedule.builders.afab import afab
from penstock.schedule.builders.inference import inference
from penstock.schedule.builders.one_f_one_b import one_f_one_b

# A builder takes ranks, microbatches and stages_per_rank; what else it takes, each with a default, are its options.
_BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "afab": afab,
        "1f1b": one_f_one_b,
        "inference": inference,
    }
)
_COMMON = ("ranks", "microbatches", "stages_per_rank")


def names() -> tuple[str, ...]:
    """The schedules that `build` knows."""
    return tuple(_BUILDERS)


def describe(name: str) -> str:
    """One line on a schedule.

    Raises: ValueError for a name that is not known.
    """
    return (_builder(name).__doc__ or "").partition("\n")[0].rstrip(".")


def options(name: str) -> dict[str, Any]:
    """The options of a schedule with their defaults, beside `ranks`, `microbatches` and `stages_per_rank`.

    Raises: ValueError for a name that is not known.
    """
    parameters = signature(_builder(name)).parameters
    return {key: parameter.default for key, parameter in parameters.items() if key not in _COMMON}


def build(name: str, *, ranks: int, microbatches: int, stages_per_rank: int = 1, **options_given: Any) -> Schedule:
    """The schedule of that name; `names()` lists them and `options(name)` what else each takes.

    Raises: ValueError for an unknown name or option, naming the nearest one, and for numbers that are not possible.
    """
    builder = _builder(name)
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    check_count("stages_per_rank", stages_per_rank)
    known = options(name)
    for option in options_given:
        if option not in known:
            raise ValueError(f"schedule {name} has no option {option!r}; {_nearest(option, known)}")
    return builder(ranks, microbatches, stages_per_rank, **options_given)


def _builder(name: str) -> Callable[..., Schedule]:
    if name not in _BUILDERS:
        raise ValueError(f"there is no schedule {name!r}; {_nearest(name, _BUILDERS)}")
    return _BUILDERS[name]


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    """What to write instead of a word that is not known."""
    if not known:
        return "it has none"
    nearest = get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    suggestion = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{suggestion}possible: {', '.join(known)}"
