"""The registry of schedules that can be built by name; each builder registers itself.

A user's own builder is handed over itself, or found by its name: the one under which `register` has entered it, or
``package.module:function`` or ``file.py:function``.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeAlias, TypeVar

from penstock.schedule.actions import Schedule, ScheduleError
from penstock.schedule.placement import check_count
from penstock.settings import ConfigError
from penstock.settings.declare import suggestion, type_in_words, words_of
from penstock.settings.objects import is_reference, load_object

Builder: TypeAlias = Callable[..., Schedule]
"""A function from the numbers of ranks and microbatches, and options that have defaults, to a schedule."""

_Builder = TypeVar("_Builder", bound=Builder)


class _Registered(NamedTuple):
    """A builder, and the dataclass of its options if they are not parameters of the builder itself."""

    build: Callable[..., Any]
    options: type | None
    trains: bool

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The builder's parameters but for the numbers of ranks and microbatches, which come first."""
        named = {name: own for name, own in signature(self.build).parameters.items() if own.kind in _NAMED}
        return {name: own for number, (name, own) in enumerate(named.items()) if number >= 2}


_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_ENTRIES: dict[str, _Registered] = {}
_STAGES = "stages_per_rank"
# Actions of a schedule, at most: one of them takes some hundred bytes, and is proved in microseconds.
_MAX_ACTIONS = 10_000_000
# With one stage on each rank both forms are the same.
_ALIASES = {"combined": "combined-1f1b"}
# The order of lists; any other schedules follow by name.
_LISTED = (
    *("afab", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min"),
    *("combined-1f1b", "combined-interleaved", "dualpipe-v", "dualpipe", "auto", "inference"),
)


def builder(name: str, *, options: type | None = None, trains: bool = True) -> Callable[[_Builder], _Builder]:
    """Register a builder under a name; the first line of its docstring describes the schedule.

    A builder takes `ranks`, `microbatches` and `stages_per_rank`, whose default is the number that the schedule is
    meant for. The schedule's options are the builder's other parameters, each with a default, or the fields of the
    dataclass `options`, which it then takes under that name. Nothing else declares an option. Without backwards, a
    schedule does not train.
    """

    def enter(build: _Builder) -> _Builder:
        _ENTRIES[name] = _Registered(build, options, trains)
        return build

    return enter


def register(name: str, build: Builder) -> None:
    """Enter a builder of a user's own, so that this process finds it by name; `build` says how it is called.

    >>> register("1f1b", lambda ranks, microbatches: None)
    Traceback (most recent call last):
    ValueError: there is a schedule '1f1b' already; choose another name

    Raises: ValueError for a name that another builder has.
    """
    if name in _ENTRIES and _ENTRIES[name].build is not build:
        raise ValueError(f"there is a schedule {name!r} already; choose another name")
    builder(name)(build)


def names(*, with_aliases: bool = False) -> tuple[str, ...]:
    """The schedules that `build` knows and, if asked for, their second names.

    >>> names()[:3]
    ('afab', '1f1b', 'interleaved')
    """
    known = (*(name for name in _LISTED if name in _ENTRIES), *sorted(_ENTRIES.keys() - set(_LISTED)))
    return (*known, *_ALIASES) if with_aliases else known


def trains(name: str | Builder) -> bool:
    """Return whether a schedule has backwards, which is taken for granted of a user's own.

    >>> trains("1f1b"), trains("inference")
    (True, False)

    Raises: ValueError for a name that is not known.
    """
    return _entry(name).trains


def is_published(name: str) -> bool:
    """Return whether a schedule's builder is one of this package's, which place stages alike on any number of ranks."""
    entry = _ENTRIES.get(_ALIASES.get(name, name))
    return entry is not None and getattr(entry.build, "__module__", "").startswith(f"{__package__}.")


def describe(name: str | Builder) -> str:
    """Describe a schedule in one line.

    >>> describe("afab")
    'All forwards, then all backwards: the simplest order, and the most memory'

    Raises: ValueError for a name that is not known.
    """
    return (_entry(name).build.__doc__ or "").partition("\n")[0].rstrip(".")


def source(name: str | Builder) -> str:
    """Return the publication that a schedule comes from, as its builder names it; nothing if it names none.

    Raises: ValueError as `describe`.
    """
    _, _, rest = (_entry(name).build.__doc__ or "").partition("Source:")
    return " ".join(rest.partition("\n\n")[0].split())


def options(name: str | Builder) -> dict[str, Any]:
    """The options of a schedule with their defaults, beside `ranks`, `microbatches` and `stages_per_rank`.

    >>> options("interleaved")
    {'group_size': None}

    Raises: ValueError for a name that is not known.
    """
    entry = _entry(name)
    if entry.options is not None:
        return {field.name: field.default for field in fields(entry.options)}
    return {key: parameter.default for key, parameter in entry.parameters.items() if key != _STAGES}


def default_stages(name: str | Builder) -> int:
    """The number of stages on each rank that a schedule is meant for; 1 where its builder has no such parameter.

    >>> default_stages("zb-v")
    2

    Raises: ValueError for a name that is not known.
    """
    parameter = _entry(name).parameters.get(_STAGES)
    return 1 if parameter is None else parameter.default


def build(
    name: str | Builder, *, ranks: int, microbatches: int, stages_per_rank: int | None = None, **options_given: Any
) -> Schedule:
    """Build the schedule of that name; `names()` lists them and `options(name)` what else each takes.

    By default, each rank has `default_stages(name)` stages. A builder of a user's own is given, or named; it is called
    with the numbers of ranks and microbatches, in this order, and the rest by name.

    >>> print(*build("1f1b", ranks=2, microbatches=2).orders[0])
    0F0 0F1 0B0 0B1

    Raises: ValueError for an unknown name or option, naming the nearest one, and for impossible numbers; ScheduleError
    if a user's builder gives something else than was asked for, or raises anything but a ValueError.
    """
    entry, spelt, known = _entry(name), _spelt(name), options(name)
    takes_stages = _STAGES in entry.parameters
    for option in (*([_STAGES] if stages_per_rank is not None and not takes_stages else []), *options_given):
        if option not in known:
            raise ValueError(f"schedule {spelt} has no option {option!r}; {_nearest(option, known)}")
    if takes_stages:
        stages_per_rank = default_stages(name) if stages_per_rank is None else stages_per_rank
        check_count(_STAGES, stages_per_rank)
    check_count("ranks", ranks)
    check_count("microbatches", microbatches)
    num_stages = stages_per_rank or 1
    if (num_forwards := ranks * microbatches * num_stages) > _MAX_ACTIONS // 2:
        raise ValueError(
            f"{ranks} ranks of {num_stages} stages and {microbatches} microbatches make {num_forwards} forwards; "
            f"at most {_MAX_ACTIONS // 2} are possible"
        )
    if entry.options is not None:
        options_given = {"options": entry.options(**options_given)}
    if takes_stages:
        options_given[_STAGES] = stages_per_rank
    try:
        built = entry.build(ranks, microbatches, **options_given)
    except ValueError:
        raise
    except Exception as error:  # a user's own
        what = f"{type(error).__name__}: {words_of(error)}"
        raise ScheduleError(
            f"{spelt}, asked for {ranks} ranks and {microbatches} microbatches, raised {what}"
        ) from error
    return _checked(built, spelt, (ranks, microbatches))


def _checked(built: Any, name: str, wanted: tuple[int, int]) -> Schedule:
    """Refuse what is no schedule, or one of other numbers."""
    if not isinstance(built, Schedule):
        raise ScheduleError(f"{name} gave {type_in_words(built)}, which is no penstock.schedule.Schedule")
    found = built.placement.num_ranks, built.num_microbatches
    if found != wanted:
        raise ScheduleError(
            f"{name} gave a schedule for {found[0]} ranks and {found[1]} microbatches, where {wanted[0]} and "
            f"{wanted[1]} were asked for"
        )
    return built


def _entry(name: str | Builder) -> _Registered:
    if isinstance(name, str):
        if (entry := _ENTRIES.get(_ALIASES.get(name, name))) is not None:
            return entry
        if not is_reference(name):
            raise ConfigError(
                f"there is no schedule {name!r}; {_nearest(name, dict.fromkeys(names()))}, a file ending in .csv or "
                ".txt, or package.module:function"
            )
    build = load_object(name) if isinstance(name, str) else name
    if not callable(build):
        raise ValueError(f"schedule {name!r} is {type_in_words(build)}; a function that gives a Schedule is possible")
    return _Registered(build, None, trains=True)


def _spelt(name: str | Builder) -> str:
    return name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)


def _nearest(word: str, known: Mapping[str, Any]) -> str:
    """Suggest what to write instead of an unknown word."""
    if not known:
        return "it has none"
    near = suggestion(word, known, otherwise="")
    return f"{near} possible: {', '.join(known)}".lstrip()
