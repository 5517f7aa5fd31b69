"""Fused pairs: the turns that their two sides take on a rank, and hooks that run when each side begins and ends."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.schedule import Action, Op
from penstock.settings import ScheduleConfig


def _ignore(stage: int) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """Functions that the executor calls with the stage's number before and after each half of a pair.

    "Before" comes when the half's input is there and it begins to compute. "After" comes when its result is on its way;
    the other half, or the half's own weight gradients, may still go on.
    """

    before_forward: Callable[[int], None] = _ignore
    after_forward: Callable[[int], None] = _ignore
    before_backward: Callable[[int], None] = _ignore
    after_backward: Callable[[int], None] = _ignore
    #: call them for forwards and backwards outside of pairs too
    alone: bool = False

    def before(self, action: Action) -> None:
        (self.before_forward if action.op is Op.F else self.before_backward)(action.stage)

    def after(self, action: Action) -> None:
        (self.after_forward if action.op is Op.F else self.after_backward)(action.stage)


@dataclass(frozen=True)
class Pairs:
    """The way in which an executor runs fused pairs.

    The program and the bits are the same either way.

    Raises:
        ValueError: `early_release` without `overlap`.
    """

    #: one half computes while the other's collectives are under way; otherwise the forward runs, then the backward
    overlap: bool = True
    hooks: Hooks = Hooks()
    #: a layer's backward ends before the forward's experts compute: its activations are freed by then, but the exchange
    #: of its tokens' gradients is not hidden
    early_release: bool = False

    def __post_init__(self) -> None:
        # These settings refuse what excludes each other.
        ScheduleConfig(overlap=self.overlap, early_release=self.early_release)

    def alone(self) -> "Pairs":
        """The way to run a forward or backward outside of pairs, where nothing else computes."""
        return Pairs(overlap=False, hooks=self.hooks if self.hooks.alone else Hooks())


ALONE = Pairs().alone()
