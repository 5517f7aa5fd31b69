"""The settings of a schedule: its name and options."""

from dataclasses import dataclass

from penstock.settings.declare import (
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    ConfigError,
    NamedValue,
    Settings,
    setting,
)


class SearchedPlacement(NamedValue):
    """Placements for a searched order: in a loop, or there and back."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True)
class ScheduleConfig(Settings, section="schedule"):
    """The order of each rank's work.

    A setting with the name of a parameter of a schedule's builder is an option of that schedule; `options` finds it.

    >>> EngineOptions(schedule=ScheduleConfig("interleaved", stages_per_rank=2)).schedule.name
    'interleaved'
    """

    name: str = setting(
        "1f1b",
        "One of `penstock schedule list`; or a file: torch's .csv, or .txt as `penstock schedule export` writes; or a "
        "function of your own: package.module:function or file.py:function.",
    )
    stages_per_rank: int | None = setting(
        None, "Stages of each pipeline rank; left out, as many as the schedule is meant for.", AT_LEAST_1
    )
    receives_ahead: int = setting(2, "Receives posted ahead of need on each channel.", AT_LEAST_1)
    group_size: int | None = setting(
        None,
        "Microbatches that take turns at a rank's stages in interleaved schedules; left out, the number of ranks.",
        AT_LEAST_1,
    )
    max_live_microbatches: float | None = setting(
        None,
        "Microbatches that `auto` may keep live on a rank; left out, the number of ranks.",
        Bounds(least=1),
    )
    placement: SearchedPlacement | tuple[int, ...] | None = setting(
        None,
        'Placement of `auto`: in a loop, there and back ("v"), or the rank of each stage; left out, in a loop.',
        AT_LEAST_0,
    )
    overlap: bool = setting(
        True,
        "In fused pairs, one side computes while the other's collectives are in flight; false: one after the other.",
    )
    early_release: bool = setting(
        False,
        "In overlapped pairs, a layer's backward ends, and frees memory, before the forward's experts compute.",
    )
    split_backward: bool = setting(
        False, "In combined schedules, pairs hold the backward for inputs; the backward for weights follows."
    )
    early_gradients: bool = setting(True, "Send each input gradient upstream before the weight gradients are computed.")
    cut: tuple[int, ...] | str | None = setting(
        None,
        "Units of each stage, by hand, 0 for one between others that hands on what it gets; or a layout in Megatron's "
        'language, such as "Et|(tt|)*3,L". Left out, the cut with the fastest slowest rank.',
        AT_LEAST_0,
    )
    measure: bool = setting(
        False,
        "Measure the units' times before the cut instead of estimating them; `auto` searches an order for these times.",
    )

    def _check(self) -> None:
        if self.early_release and not self.overlap:
            raise ConfigError(
                "schedule.early_release = true changes the turns of overlapped pairs, but schedule.overlap = false; "
                "leave out one of them"
            )
