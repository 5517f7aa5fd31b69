"""The arguments that the schedule commands share: which schedule, of what size, at what costs."""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from penstock import schedule
from penstock.cli.commands import WIDTH, Parser, number
from penstock.schedule import files
from penstock.settings import SETTINGS
from penstock.settings.declare import parts_of
from penstock.settings.objects import is_reference

# Name, default, meaning. A builder's own option of the same name is not added a second time.
_TIMES = (
    ("forward", 1.0, "F"),
    ("backward_input", 1.0, "I, the part of B that the previous rank waits for"),
    ("backward_weight", 1.0, "W, the other part of B"),
    ("pair", None, "a fused pair of F and B (default: as long as both)"),
)
_OTHERS = (
    ("action", 0.0, "time that every compute action takes besides"),
    ("transfer", 0.0, "time of a message, which blocks no rank; or one for each rank's link to the next: 1,1,5,1"),
    ("message_bytes", 0.0, "bytes of a message, which take time by --bandwidth"),
    ("bandwidth", None, "bytes that a channel carries in a unit of time (default: unlimited)"),
    ("reduce", 0.0, "time of the gradient reduction of a stage"),
    ("step", 0.0, "time of the optimizer step"),
    ("microbatch_bytes", 0.0, "bytes that a rank keeps of a microbatch; or a number for each stage of the model"),
    ("weight_memory_share", 1.0, "share of them that is kept from a microbatch's I until its W"),
)
_LISTS = ("transfer", "microbatch_bytes", "weight_memory_share")
COST_NAMES = (*(name for name, _, _ in (*_TIMES, *_OTHERS)), "lengths")


def add_size(parser: Parser, *, ranks: int = 4, microbatches: int = 8, of_file: bool = False) -> None:
    """Add the counts, without defaults for a file, which has its own."""
    for option, default, what in (
        ("--ranks", ranks, "processes of the pipeline"),
        ("--microbatches", microbatches, "parts of a batch"),
    ):
        said = f"{what} (default {default})"
        parser.add_argument(option, type=int, default=None if of_file else default, metavar="N", help=said)


def add_schedule(parser: Parser, arguments: Sequence[str], *, costs: bool = True) -> None:
    """Add NAME, the counts, the costs if asked for, and the named schedule's own options."""
    parser.add_argument(
        "name", metavar="NAME", help="a name that `schedule list` prints, a .csv or .txt file, or file.py:function"
    )
    add_size(parser, of_file=_names_file(arguments))
    parser.add_argument(
        "--stages-per-rank", type=int, default=None, metavar="N", help="local stages (default: as the schedule has it)"
    )
    said = "send each gradient to the previous rank as soon as it is computed, before W, as the engine does"
    parser.add_argument("--early-gradients", action="store_true", help=said)
    if costs:
        add_costs(parser)
    name = next((word for word in arguments if _is_named(word)), None)
    if name is not None:
        add_own_options(parser, [name], without=COST_NAMES if costs else ())


def _is_named(word: str) -> bool:
    """Return whether a word is the name of a schedule to build; those of installed packages are not looked for."""
    return word in schedule.names(with_aliases=True) or is_reference(word)


def _names_file(arguments: Sequence[str]) -> bool:
    """Return whether the schedule is read from a file; the --output file does not count."""
    before = ["", *arguments]
    return any(files.is_file(word) and last != "--output" for last, word in zip(before, arguments))


def add_own_options(parser: Parser, names: Sequence[str], *, without: Sequence[str]) -> None:
    """Add the options of these schedules' own, except those in `without`."""
    own = parser.add_argument_group(textwrap.fill(f"options of {', '.join(names)}", WIDTH - 1))
    known: dict[str, object] = {}
    for name in names:
        known |= {option: default for option, default in schedule.options(name).items() if option not in without}
    for option, default in known.items():
        said = "(default: as it takes)" if default is None else f"(default {default})"
        if isinstance(default, bool):
            own.add_argument(flag(option), action=argparse.BooleanOptionalAction, default=default, help=said)
        else:
            kind = _numbers if option in COST_NAMES else _kind_of(option) if default is None else type(default)
            own.add_argument(flag(option), type=kind, default=default, help=said)


def _kind_of(option: str) -> type:
    """The type of an option without a default: that of the setting of this name, or a number."""
    own = SETTINGS.get(f"schedule.{option}")
    kind = float if own is None else parts_of(own.type)[0]
    # The setting itself refuses an unknown name.
    return str if issubclass(kind, str) else kind


def add_costs(parser: Parser) -> None:
    """Add the times and sizes that `schedule.Costs` has."""
    times = parser.add_argument_group(
        "times", "Of one microbatch through all stages of one rank; or one for each stage of\nthe model: 1,1.5,1"
    )
    for name, default, what in _TIMES:
        said = what if default is None else f"{what} (default {default:g})"
        times.add_argument(flag(name), type=_numbers, default=default, metavar="TIME", help=said)
    others = parser.add_argument_group("other costs")
    for name, default, what in _OTHERS:
        said = what if default is None else f"{what} (default {default:g})"
        kind = _numbers if name in _LISTS else float
        others.add_argument(flag(name), type=kind, default=default, metavar="NUMBER", help=said)
    said = "a factor for each microbatch on its times and bytes: 1,0.5,1.5 (default: all equal)"
    others.add_argument("--lengths", type=_list, default=(), metavar="FACTORS", help=said)


def add_units(parser: Parser) -> None:
    """Add the work of a model's units, which each schedule cuts into stages of its own."""
    said = (
        "work of each unit of the model, in any unit: 1,4,4,4,9. Each schedule cuts them into its own stages, among "
        "which the times of all ranks are then divided by work (default: stages are equal)"
    )
    parser.add_argument("--units", type=_list, default=None, metavar="WORK", help=said)


def of_units(options: argparse.Namespace, placement: schedule.Placement) -> argparse.Namespace:
    """The options with the times and sizes of each stage, cut from the units that they give.

    Raises: ValueError for more stages than units, or a time that is given stage by stage.
    """
    cut = schedule.balanced_cut(options.units, placement)
    work = [sum(options.units[unit] for unit in units) for units in cut]
    found = argparse.Namespace(**vars(options))
    for name in ("forward", "backward_input", "backward_weight", "microbatch_bytes"):
        value = getattr(options, name)
        if isinstance(value, tuple):
            raise ValueError(f"{flag(name)} gives each stage its own, and --units cuts stages; give one number")
        setattr(found, name, tuple(value * placement.num_ranks * own / sum(work) for own in work))
    return found


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _list(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 1,0.5,1.5") from None


def _numbers(text: str) -> float | tuple[float, ...]:
    return _list(text) if "," in text else number(text)


def costs_of(options: argparse.Namespace) -> schedule.Costs:
    """The given costs."""
    return schedule.Costs(**{name: getattr(options, name) for name in COST_NAMES})


def own_options(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The given values of a schedule's own options."""
    known = schedule.options(name) if _is_named(name) else {}
    return {option: getattr(options, option) for option in known if hasattr(options, option)}


def proved(options: argparse.Namespace, name: str | None = None, *, shared_channels: bool = False) -> schedule.Program:
    """The proved program of the schedule that the options name, or of the schedule `name` at the same size.

    A file has its own counts, which are copied into the options.

    Raises: ScheduleError for a file that is wrong or has other counts than asked for; ValueError as `build`.
    """
    name = options.name if name is None else name
    assert name is not None
    early = getattr(options, "early_gradients", False)
    if files.is_file(name):
        if early:
            raise schedule.ScheduleError(f"{name} is taken as it is; --early-gradients goes with a schedule's name")
        return _proved_file(options, name, shared_channels)
    built = schedule.build(
        name,
        ranks=options.ranks,
        microbatches=options.microbatches,
        stages_per_rank=getattr(options, "stages_per_rank", None),
        **own_options(name, options),
    )
    if early:
        built = schedule.early_gradients(built)
    program = schedule.lower(built, shared_channels=shared_channels)
    schedule.verify(program)
    return program


def _proved_file(options: argparse.Namespace, name: str, shared_channels: bool) -> schedule.Program:
    program = files.read_program(name, shared_channels=shared_channels)
    placement = program.placement
    counts = {
        "ranks": placement.num_ranks,
        "microbatches": program.schedule.num_microbatches,
        "stages_per_rank": placement.stages_per_rank,
    }
    for count, found in counts.items():
        if getattr(options, count) not in (None, found):
            raise schedule.ScheduleError(f"{name} has {found} {count.replace('_', ' ')}, not {getattr(options, count)}")
        setattr(options, count, found)
    return program
