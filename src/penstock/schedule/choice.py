"""The schedule that a run's settings choose: built by name, read from a file, or a user's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from inspect import getsource
from pathlib import Path
from typing import Any, TypeAlias

from penstock.schedule import builders, files
from penstock.schedule.actions import Op, Pair, Program, Schedule, ScheduleError, flatten, keepers
from penstock.schedule.builders import Builder
from penstock.schedule.builders.one_f_one_b import forwards_alone
from penstock.schedule.costs import Costs
from penstock.schedule.lower import early_gradients, keep_first, lower
from penstock.schedule.partition import check_cut, read_layout
from penstock.schedule.placement import Placement, PlacementKind
from penstock.schedule.verify import verify
from penstock.settings import ConfigError, ScheduleConfig
from penstock.settings.declare import type_in_words

OwnSchedule: TypeAlias = ScheduleConfig | str | Builder | Schedule
"""All that names a schedule: settings, a name, a function that gives one, or the schedule itself."""

_MANY_RANKS = 8
_TIMES = ("forward", "backward_input", "backward_weight", "transfer")


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule's settings, which name a builder or a file (.csv in torch's format, or .txt), and the stages' times.

    `costs`: the times that `auto` searches with, one for each stage of the model; None if all are equal. `own`: a
    user's builder or schedule, which is then taken whatever the name. A schedule's order is taken as it is. `num_kept`:
    the microbatches of a stage that keep all activations where others recompute them, see `keep_first`. `recomputes`:
    False where no stage recomputes any.
    """

    settings: ScheduleConfig = ScheduleConfig()
    costs: Costs | None = None
    own: Builder | Schedule | None = None
    num_kept: int = 0
    recomputes: bool = True

    @classmethod
    def of(cls, given: OwnSchedule) -> ScheduleChoice:
        """Make the choice from settings, from a schedule's name alone, or from a user's own builder or schedule.

        Raises: ValueError for anything else.
        """
        if isinstance(given, ScheduleConfig):
            return cls(given)
        if isinstance(given, str):
            return cls(ScheduleConfig(given))
        if isinstance(given, Schedule):
            return cls(ScheduleConfig(given.name), own=given)
        if callable(given):
            return cls(ScheduleConfig(getattr(given, "__name__", type(given).__name__)), own=given)
        raise ValueError(
            f"a schedule is a name, a ScheduleConfig, a function that gives a Schedule, or a Schedule, not "
            f"{type_in_words(given)}"
        )

    @property
    def name(self) -> str:
        """The schedule's name, or the file's path."""
        return self.settings.name

    @property
    def is_file(self) -> bool:
        """True if the order comes from a file."""
        return self.own is None and self.name.lower().endswith(files.ENDINGS)

    @property
    def text(self) -> str:
        """The text of a file or of a user's function, where the order comes from one; else nothing."""
        try:
            if self.is_file:
                return files.text_of(Path(self.name))
            return "" if self.own is None or isinstance(self.own, Schedule) else getsource(self.own)
        except (OSError, TypeError, ValueError):
            # Who builds the order says what is wrong with the file; a function may be typed in, or compiled.
            return ""

    @property
    def is_fixed(self) -> bool:
        """True if the order is taken as it is, from a file or a user's schedule."""
        return self.is_file or isinstance(self.own, Schedule)

    @property
    def _builder(self) -> str | Builder:
        """The builder, or the name of one."""
        assert not isinstance(self.own, Schedule)
        return self.name if self.own is None else self.own

    @property
    def is_searched(self) -> bool:
        """True if the order depends on the stages' times."""
        return not self.is_fixed and "forward" in builders.options(self._builder)

    def timed(self, costs: Costs) -> ScheduleChoice:
        """The choice for stages that take these times."""
        return replace(self, costs=costs)

    def program(self, ranks: int, microbatches: int, *, whole_backwards: bool = False) -> Program:
        """The program of a step.

        `whole_backwards` leaves every `B` whole. Stages that launch collectives need this: they send early by
        themselves and fill their waits with weight gradients.

        Raises:
            ValueError: an unknown name or option, impossible numbers, a file that cannot be read or that is for
                other numbers, an order with marks of its own where `num_kept` sets them, or one with an R where
                nothing is recomputed.
        """
        ahead = self.settings.receives_ahead
        if self.is_fixed:
            own = self.own if isinstance(self.own, Schedule) else None
            program = (
                files.read_program(self.name, receives_ahead=ahead) if own is None else lower(own, receives_ahead=ahead)
            )
            _check_numbers(self.name, program.schedule, ranks, microbatches)
        else:
            built = self.build(ranks, microbatches)
            early = self.settings.early_gradients and not whole_backwards
            program = lower(early_gradients(built) if early else built, receives_ahead=ahead)
        if not self.recomputes and any(action.op is Op.R for steps in program.ranks for action in flatten(steps)):
            raise ConfigError(
                f"{self.name} computes activations again ahead of their backward, but all are kept; set train.recompute"
            )
        if not self.num_kept:
            return program
        if any(map(keepers, program.ranks)):
            raise ConfigError(
                f"{self.name} marks itself which microbatches keep all activations, and so does "
                f"train.num_kept_microbatches = {self.num_kept}; leave it out"
            )
        return keep_first(program, self.num_kept)

    def forwards(self, placement: Placement, microbatches: int) -> Program:
        """Build the program that scores microbatches in order on the stages of a placement.

        If the placement holds two copies of the model, it uses the first, so that one rank gets all outputs.
        """
        if placement.kind is PlacementKind.BIDIRECTIONAL:
            placement = Placement(PlacementKind.LOOP, placement.num_ranks, placement.stages_per_microbatch)
        return lower(forwards_alone(placement, microbatches), receives_ahead=self.settings.receives_ahead)

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """Build the schedule by its name."""
        options: dict[str, Any] = self._options
        if self.costs is not None and self.is_searched:
            options |= {name: getattr(self.costs, name) for name in _TIMES}
        stages_per_rank = self.settings.stages_per_rank
        if stages_per_rank is None and self.settings.placement == PlacementKind.V.value:
            stages_per_rank = 2
        return builders.build(
            self._builder, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **options
        )

    def placement(self, ranks: int) -> Placement:
        """The placement of the stages, which depends on neither microbatches nor times."""
        if isinstance(self.own, Schedule):
            _check_numbers(self.name, self.own, ranks, self.own.num_microbatches)
            return self.own.placement
        if self.is_file:
            return files.read(self.name).placement
        # One microbatch is enough for a search, and its order is quickly found.
        quick = replace(self, costs=None)
        few = ranks
        if self.own is None and builders.is_published(self.name) and ranks > _MANY_RANKS:
            # Nor does it depend on the number of ranks, whose parity matters to some schedules.
            few = _MANY_RANKS + ranks % 2
        placement = quick.build(few, microbatches=1 if self.is_searched else 4 * few).placement
        return replace(placement, num_ranks=ranks)

    def cut(self, num_units: int, num_stages: int, units_per_layer: int) -> tuple[range, ...] | None:
        """The units of each stage where the settings give them by hand; else None.

        Raises:
            ConfigError: they leave out a unit or a stage of the model, or the first or the last stage has none.
        """
        sizes = self.settings.cut
        if sizes is None:
            return None
        try:
            by_hand = read_layout(sizes, num_units, units_per_layer) if isinstance(sizes, str) else sizes
            return check_cut(by_hand, num_units, num_stages)
        except ValueError as error:
            raise ConfigError(f"schedule.cut = {sizes!r}: {error}") from None

    def check_settings(self) -> None:
        """Refuse settings that name nothing or would change nothing; nothing is built.

        Raises:
            ConfigError: an unknown name or option, or options that exclude each other.
        """
        for option, value in self._options.items():
            text = f"schedule.{option} = {str(value).lower()}"
            if self.is_fixed:
                raise ConfigError(f"{text} cannot change {self.name}, whose order is taken as it is; leave it out")
            if option not in builders.options(self._builder):
                possible = ", ".join(name for name in builders.names() if option in builders.options(name))
                raise ConfigError(f"{text} is no option of schedule.name = {self.name!r}; possible are {possible}")

    def checked_program(self, ranks: int, microbatches: int, *, whole_backwards: bool = False) -> Program:
        """The program of a step, proved; see `program`. Settings that would change nothing are refused.

        Raises:
            ConfigError: an unknown name or option, or a schedule that cannot train.
            ValueError: impossible numbers.
        """
        self.check_settings()
        program = self.program(ranks, microbatches, whole_backwards=whole_backwards)
        if not program.schedule.training:
            raise ConfigError(f"schedule.name = {self.name!r} has no backward and cannot train; 1f1b can")
        if self.settings.early_release and not any(
            isinstance(s, Pair) for order in program.schedule.orders for s in order
        ):
            raise ConfigError(
                f"schedule.early_release = true changes the turns of fused pairs, but {self.name} has none; "
                "combined-1f1b, combined-interleaved, dualpipe-v and dualpipe do"
            )
        verify(program)
        return program

    @property
    def _options(self) -> dict[str, Any]:
        """The settings that are options of any builder, by their names in its signature."""
        every = {option for name in builders.names() for option in builders.options(name)}
        if not self.is_fixed:
            every |= builders.options(self._builder).keys()
        # Those that are neither None nor false choose something.
        values = {
            field.name: getattr(self.settings, field.name) for field in fields(self.settings) if field.name in every
        }
        return {name: value for name, value in values.items() if value is not None and value is not False}


def _check_numbers(name: str, order: Schedule, ranks: int, microbatches: int) -> None:
    given = (order.placement.num_ranks, order.num_microbatches)
    if given != (ranks, microbatches):
        raise ScheduleError(
            f"{name} is for {given[0]} ranks and {given[1]} microbatches, not for {ranks} and {microbatches}"
        )
