"""Options of a schedule that would change nothing are refused rather than ignored; nothing heavy is imported here."""

from penstock import schedule
from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError
from penstock.schedule import Pair, Program

_OF_BUILDERS = ("group_size", "max_live_microbatches", "split_backward")


def check_options(config: RunConfig) -> None:
    """Refuse an option that the schedule does not have.

    Raises:
        ConfigError: the message names the schedules that have it.
    """
    ours = config.schedule
    for option in _OF_BUILDERS:
        value = getattr(ours, option)
        if not value:
            continue
        if ours.choice.is_file:
            raise ConfigError(
                f"schedule.{option} = {_text(value)} can not change {ours.name}, whose order is taken as it is; "
                "leave it out"
            )
        if option not in schedule.options(ours.name):
            possible = ", ".join(name for name in schedule.names() if option in schedule.options(name))
            raise ConfigError(
                f"schedule.{option} = {_text(value)} is no option of schedule.name = {ours.name!r}; possible are "
                f"{possible}"
            )


def check_search(config: RunConfig) -> None:
    """Refuse a search for the cut where none can take place.

    Raises:
        ConfigError: the message says what would be possible.
    """
    ours = config.schedule
    if not ours.search_cut:
        return
    if not ours.choice.is_searched:
        raise ConfigError(
            f"schedule.search_cut = true searches for a cut together with the order, but {ours.name} has an order of "
            "its own; possible is schedule.name = auto"
        )
    if not ours.measure:
        raise ConfigError("schedule.search_cut = true needs the units' times; add schedule.measure = true")
    if ours.cut is not None:
        raise ConfigError("schedule.search_cut = true searches for what schedule.cut gives by hand; leave out one")


def check_pairs(config: RunConfig, program: Program) -> None:
    """Refuse what changes the turns of fused pairs where nothing takes turns.

    Raises:
        ConfigError: the message says what would be possible.
    """
    ours = config.schedule
    if not ours.early_release:
        return
    if not ours.overlap:
        raise ConfigError(
            "schedule.early_release = true changes the turns of overlapped pairs, but schedule.overlap = false; "
            "leave out one of them"
        )
    if not any(isinstance(step, Pair) for order in program.schedule.orders for step in order):
        raise ConfigError(
            f"schedule.early_release = true changes the turns of fused pairs, but {ours.name} has none; "
            "combined-1f1b, combined-interleaved, dualpipe-v and dualpipe do"
        )


def _text(value: object) -> str:
    """As it stands in the file."""
    return str(value).lower()
