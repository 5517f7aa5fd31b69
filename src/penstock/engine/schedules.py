"""Which schedule a run follows: one that is built by name, or one from a file; nothing heavy is imported here."""

from dataclasses import dataclass, replace
from typing import Any

from penstock import schedule
from penstock.schedule import Costs, Placement, PlacementKind, Program, Schedule, ScheduleError, files


@dataclass(frozen=True)
class ScheduleChoice:
    """A name of `schedule.names()` with its options, or a file ending in .csv (torch's format) or .txt.

    Args:
        name: the name, or the file's path.
        stages_per_rank: local stages on each rank; None for as many as the schedule is meant for.
        receives_ahead: receives posted ahead of need on each edge.
        group_size: microbatches that take turns at a rank's stages (interleaved schedules); None for the default.
        split_backward: whether pairs hold I and leave W behind them (combined schedules).
        max_live_microbatches: what `auto` may keep alive on a rank; None for the default.
        early_gradients: whether a gradient leaves for the rank before as soon as it is there, before those of the
            weights are computed (`schedule.early_gradients`); a file's order is always taken as it is.
        placement_kind: "loop" or "v", for schedules that leave it open (`auto`); None for the default.
        search_cut: whether the cut is searched for together with the order of `auto`, for the shortest whole step.
        costs: the times that `auto` searches for, one for each stage of the model; None for equal ones.
    """

    name: str = "1f1b"
    stages_per_rank: int | None = None
    receives_ahead: int = 2
    group_size: int | None = None
    max_live_microbatches: float | None = None
    split_backward: bool = False
    early_gradients: bool = True
    placement_kind: str | None = None
    search_cut: bool = False
    costs: Costs | None = None

    @property
    def is_file(self) -> bool:
        return files.is_file(self.name)

    @property
    def is_searched(self) -> bool:
        """Whether the order depends on the stages' times."""
        return not self.is_file and "forward" in schedule.options(self.name)

    def timed(self, costs: Costs) -> "ScheduleChoice":
        """The same for stages that take these times."""
        return replace(self, costs=costs)

    def program(self, ranks: int, microbatches: int, *, whole_backwards: bool = False) -> Program:
        """The program of a step.

        `whole_backwards` leaves every `B` whole: for stages that launch collectives, which send early by themselves and
        fill what waits there are with weight gradients.

        Raises:
            ValueError: an unknown name or option, numbers that are not possible, or a file that can not be read or is
                for other numbers.
        """
        if not self.is_file:
            built = self.build(ranks, microbatches)
            if self.early_gradients and not whole_backwards:
                built = schedule.early_gradients(built)
            return schedule.lower(built, receives_ahead=self.receives_ahead)
        program = files.read_program(self.name, receives_ahead=self.receives_ahead)
        given = (program.placement.num_ranks, program.schedule.num_microbatches)
        if given != (ranks, microbatches):
            raise ScheduleError(
                f"{self.name} is for {given[0]} ranks and {given[1]} microbatches, not for {ranks} and {microbatches}"
            )
        return program

    def build(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule of that name."""
        options: dict[str, Any] = {
            "group_size": self.group_size,
            "max_live_microbatches": self.max_live_microbatches,
            "split_backward": self.split_backward or None,
            "placement": self.placement_kind,
        }
        if self.costs is not None and self.is_searched and self.search_cut:
            options |= schedule.options_for_step(self.costs)
        elif self.costs is not None and self.is_searched:
            times = ("forward", "backward_input", "backward_weight", "transfer")
            options |= {name: getattr(self.costs, name) for name in times}
        return schedule.build(
            self.name,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=self._stages_per_rank,
            **{name: value for name, value in options.items() if value is not None},
        )

    def placement(self, ranks: int) -> Placement:
        """Where the stages live, whatever the number of microbatches and the stages' times."""
        if self.is_file:
            return files.read(self.name).placement
        # One microbatch is enough for a search, and has one order at most times.
        few = replace(self, costs=None)
        return few.build(ranks, microbatches=1 if self.is_searched else 4 * ranks).placement

    @property
    def _stages_per_rank(self) -> int | None:
        """As asked for; a V that is left open goes there and back once."""
        if self.stages_per_rank is None and self.placement_kind == PlacementKind.V.value:
            return 2
        return self.stages_per_rank


def forward_only(placement: Placement, microbatches: int) -> Program:
    """The program that scores on the stages of a placement, in the order in which microbatches come.

    Of a model that is held twice it uses the first copy, so that one rank gets all outputs.
    """
    kind, num_stages = placement.kind, placement.stages_per_microbatch
    if kind is PlacementKind.BIDIRECTIONAL:
        kind = PlacementKind.LOOP
    built = schedule.build(
        "inference",
        ranks=placement.num_ranks,
        microbatches=microbatches,
        stages_per_rank=num_stages,
        placement=kind.value,
    )
    return schedule.lower(built)
