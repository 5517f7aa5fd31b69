"""Which schedule a run follows: one that is built by name, or one from a file; nothing heavy is imported here."""

from dataclasses import dataclass

from penstock import schedule
from penstock.schedule import Placement, PlacementKind, Program, Schedule, ScheduleError, files


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
    """

    name: str = "1f1b"
    stages_per_rank: int | None = None
    receives_ahead: int = 2
    group_size: int | None = None
    max_live_microbatches: float | None = None
    split_backward: bool = False
    early_gradients: bool = True

    @property
    def is_file(self) -> bool:
        return files.is_file(self.name)

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
        options = {
            "group_size": self.group_size,
            "max_live_microbatches": self.max_live_microbatches,
            "split_backward": self.split_backward or None,
        }
        return schedule.build(
            self.name,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=self.stages_per_rank,
            **{name: value for name, value in options.items() if value is not None},
        )

    def placement(self, ranks: int) -> Placement:
        """Where the stages live, whatever the number of microbatches."""
        if self.is_file:
            return files.read(self.name).placement
        return self.build(ranks, microbatches=4 * ranks).placement


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
