"""The schedules that can be built by name, each described by the first line of its builder's docstring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from types import MappingProxyType
from typing import Any

from penstock.schedule.actions import Schedule, check_count
from penstock.schedule.builders.afab import afab
from penstock.schedule.builders.auto import auto
from penstock.schedule.builders.combined import combined_1f1b, combined_interleaved
from penstock.schedule.builders.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.builders.inference import inference
from penstock.schedule.builders.interleaved import interleaved
from penstock.schedule.builders.looped_bfs import looped_bfs
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.v_shape import v_half, v_min, zb_v
from penstock.schedule.builders.zero_bubble import interleaved_zb, zb_h1, zb_h2

# A builder takes ranks, microbatches and stages_per_rank; what else it takes, each with a default, are its options.
_BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "afab": afab,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "looped-bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "interleaved-zb": interleaved_zb,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "combined-1f1b": combined_1f1b,
        "combined-interleaved": combined_interleaved,
        "dualpipe-v": dualpipe_v,
        "dualpipe": dualpipe,
        "auto": auto,
        "inference": inference,
    }
)
# Other names of the same: on one rank there is nothing to be told apart.
_ALIASES: Mapping[str, str] = MappingProxyType({"combined": "combined-1f1b"})
_COMMON = ("ranks", "microbatches", "stages_per_rank")


def names(*, with_aliases: bool = False) -> tuple[str, ...]:
    """The schedules that `build` knows; also, if asked for, their second names."""
    return (*_BUILDERS, *_ALIASES) if with_aliases else tuple(_BUILDERS)


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


def default_stages(name: str) -> int:
    """How many stages a rank has in a schedule, where nothing else is asked for.

    Raises: ValueError for a name that is not known.
    """
    return signature(_builder(name)).parameters["stages_per_rank"].default


def build(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options_given: Any
) -> Schedule:
    """The schedule of that name; `names()` lists them and `options(name)` what else each takes.

    Without `stages_per_rank` a rank has as many as the schedule is meant for: `default_stages(name)`.

    Raises: ValueError for an unknown name or option, naming the nearest one, and for numbers that are not possible.
    """
    builder = _builder(name)
    if stages_per_rank is None:
        stages_per_rank = default_stages(name)
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    check_count("stages_per_rank", stages_per_rank)
    known = options(name)
    for option in options_given:
        if option not in known:
            raise ValueError(f"schedule {name} has no option {option!r}; {_nearest(option, known)}")
    return builder(ranks, microbatches, stages_per_rank, **options_given)


def _builder(name: str) -> Callable[..., Schedule]:
    name = _ALIASES.get(name, name)
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
