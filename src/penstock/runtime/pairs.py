"""Fused pairs: how their two halves share a rank, and who is told when each half begins and ends."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.schedule import Action, Op


def _nobody(stage: int) -> None:
    return None


@dataclass(frozen=True)
class Hooks:
    """Called with the stage's number before and after each half of a pair.

    A half's "before" comes when it begins to compute, its input being there; its "after" when its result is there and
    on its way, though the other half, or weight gradients of its own, may go on. With `alone` they are called for
    forwards and backwards outside of pairs too.
    """

    before_forward: Callable[[int], None] = _nobody
    after_forward: Callable[[int], None] = _nobody
    before_backward: Callable[[int], None] = _nobody
    after_backward: Callable[[int], None] = _nobody
    alone: bool = False

    def before(self, action: Action) -> None:
        (self.before_forward if action.op is Op.F else self.before_backward)(action.stage)

    def after(self, action: Action) -> None:
        (self.after_forward if action.op is Op.F else self.after_backward)(action.stage)


@dataclass(frozen=True)
class Pairs:
    """How an executor runs fused pairs.

    overlap: one half computes while the other's collectives travel; otherwise the forward runs, then the backward,
    in the same program and to the same bits. early_release: a layer's backward waits for its tokens' gradients and ends
    before the forward's experts compute: what it kept is gone then, but that exchange is not hidden.

    Raises:
        ValueError: halves that run one after the other are to take turns otherwise.
    """

    overlap: bool = True
    hooks: Hooks = Hooks()
    early_release: bool = False

    def __post_init__(self) -> None:
        if self.early_release and not self.overlap:
            raise ValueError(
                "early_release changes the turns of overlapped pairs, but overlap is off; set overlap, or leave it out"
            )
