"""Schedules of a pipeline as plain data: built, lowered to programs, proved, simulated and written, without PyTorch.

>>> s = build("1f1b", ranks=4, microbatches=8)
>>> p = lower(s)
>>> verify(p).num_messages
48
>>> round(simulate(p, Costs(forward=1.0, backward_input=1.0, backward_weight=1.0)).bubble_rate, 3)
0.273
"""

from types import FunctionType as _Function

from penstock.schedule.actions import (
    Action,
    Direction,
    Hang,
    Op,
    Pair,
    Program,
    Schedule,
    ScheduleError,
    Step,
    flatten,
    parts,
)
from penstock.schedule.builders import build, default_stages, describe, names, options, register
from penstock.schedule.costs import Costs, costs_of_cut
from penstock.schedule.generation.scheduler import Batch, BatchItem, RingShape, Scheduler
from penstock.schedule.generation.sequence import NO_ROW, Ending, Sequence, Token
from penstock.schedule.lower import early_gradients, keep_first, lower
from penstock.schedule.partition import balanced_cut, check_cut, partition, read_layout
from penstock.schedule.placement import Placement, PlacementKind
from penstock.schedule.rules import Channel, Rule, Rules, partner
from penstock.schedule.simulate import Event, Timeline, simulate
from penstock.schedule.text import from_csv, from_text, to_csv, to_text
from penstock.schedule.verify import Proof, verify
from penstock.settings.declare import checked as _checked

__all__ = [
    "NO_ROW",
    "Action",
    "Batch",
    "BatchItem",
    "Channel",
    "Costs",
    "Direction",
    "Ending",
    "Event",
    "Hang",
    "Op",
    "Pair",
    "Placement",
    "PlacementKind",
    "Program",
    "Proof",
    "RingShape",
    "Rule",
    "Rules",
    "Schedule",
    "ScheduleError",
    "Scheduler",
    "Sequence",
    "Step",
    "Timeline",
    "Token",
    "balanced_cut",
    "build",
    "check_cut",
    "costs_of_cut",
    "default_stages",
    "describe",
    "early_gradients",
    "flatten",
    "from_csv",
    "from_text",
    "keep_first",
    "lower",
    "names",
    "options",
    "partition",
    "partner",
    "parts",
    "read_layout",
    "register",
    "simulate",
    "to_csv",
    "to_text",
    "verify",
]

# Arguments of wrong types are refused here, at the front; inside the package functions come from their own files.
globals().update({name: _checked(own) for name in __all__ if isinstance(own := globals()[name], _Function)})
