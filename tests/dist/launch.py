"""Runs one function on several ranks: real processes, gloo on the loopback interface, a hard time limit.

The function must be importable (defined at the head of a test module) and is called as ``function(rank, *args)``
with torch.distributed initialised; arguments and results travel pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.ranks import Outcome, Team

from tests.fork_server import fork_server

# Limits are given for a quiet machine; only what hangs is meant to reach them.
_PATIENCE = 3.0
# After one rank has failed the others usually wait for it: long enough for them to tell what they saw.
_GRACE_S = 3.0


class RankFailure(AssertionError):
    """A rank raised, died or ran past the time limit; the text holds every rank's traceback."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``function(rank, *args)`` on `world` ranks and return their results in rank order.

    Raises: `RankFailure` when any rank raises, dies, or hangs, which it does after `timeout_s` on a quiet machine. All
    processes have ended when this returns or raises.
    """
    outcomes = run_outcomes(world, function, *args, timeout_s=timeout_s, stop_at_failure=True)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise RankFailure("\n".join(f"rank {outcome.rank} of {world}: {outcome.error}" for outcome in failed))
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, stop_at_failure: bool = False
) -> list[Outcome]:
    """Like `run_ranks`, for ranks that are meant to die: never raises for a rank's failure, but reports it.

    With `stop_at_failure`, ranks that still run shortly after the first failure are killed.
    """
    team = Team(world, limit_s=timeout_s * _PATIENCE, context=fork_server())
    return team.outcomes(function, *args, grace_s=_GRACE_S if stop_at_failure else None)
