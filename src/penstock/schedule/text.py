"""Schedules and programs as text: Penstock's own, which keeps everything, and torch's CSV."""

import csv
import io
import re
from collections.abc import Sequence
from typing import TypeAlias

from penstock.schedule.actions import (
    ALL,
    MOVES,
    PLACED,
    TRANSFERS,
    Action,
    Op,
    Pair,
    Program,
    Schedule,
    ScheduleError,
    Scope,
    Step,
    flatten,
    keepers,
    parts,
)
from penstock.schedule.lower import add_reductions, add_step
from penstock.schedule.placement import Placement, PlacementKind

Plan: TypeAlias = Schedule | Program

_SCHEDULE, _PROGRAM = "penstock schedule 1", "penstock program 1"
_FIELDS = ("name", "placement", "ranks", "stages_per_rank", "microbatches", "training", "live_bound")
_OF_STAGES = "|".join(op.name for op in Op if op.scope is not Scope.RANK)
_ACTION = re.compile(rf"([0-9]{{1,9}})({_OF_STAGES})([0-9]{{0,9}})(K?)")
_OF_SHARDS = re.compile("[0-9]{1,9}(UNSHARD|RESHARD)")
_PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_RULE = (
    "an action is <stage><op><microbatch>, as in 0F3 or 1SEND_F0, with a K behind an F that keeps all activations, or "
    "a pair as (0F7;7B3)OVERLAP_F_B"
)


def to_text(plan: Plan) -> str:
    """Write a schedule or program as text that `from_text` reads back as an equal one.

    >>> from penstock.schedule import build
    >>> print(to_text(build("1f1b", ranks=1, microbatches=2)).splitlines()[-1])
    rank 0: 0F0 0B0 0F1 0B1
    """
    schedule = plan.schedule if isinstance(plan, Program) else plan
    placement, bound = schedule.placement, schedule.live_bound
    fields = {
        "name": schedule.name,
        "placement": " ".join([placement.kind.value, *map(str, placement.homes)]),
        "ranks": placement.num_ranks,
        "stages_per_rank": placement.stages_per_rank,
        "microbatches": schedule.num_microbatches,
        "training": "yes" if schedule.training else "no",
        "live_bound": "none" if bound is None else " ".join(map(str, bound)),
    }
    lines = [_PROGRAM if isinstance(plan, Program) else _SCHEDULE]
    lines += [f"{key}: {value}" for key, value in fields.items()]
    lines += [f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(_rows(plan))]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Plan:
    """Read the schedule or program that `to_text` wrote, without proving it.

    >>> from penstock.schedule import build
    >>> schedule = build("1f1b", ranks=2, microbatches=2)
    >>> from_text(to_text(schedule)) == schedule
    True

    Raises: ScheduleError naming line, word and rule.
    """
    header, *lines = text.splitlines() or [""]
    if header not in (_SCHEDULE, _PROGRAM):
        raise ScheduleError(f"line 1: expected {_SCHEDULE!r} or {_PROGRAM!r}, got {header!r}")
    fields: dict[str, str] = {}
    rows: list[tuple[Step, ...]] = []
    for number, line in enumerate(lines, start=2):
        key, _, value = line.partition(":")
        if key == f"rank {len(rows)}":
            rows.append(tuple(steps_by_place(value.split(), f"line {number}, word {{place}}").values()))
        elif key in _FIELDS and key not in fields:
            fields[key] = value.strip()
        else:
            wanted = [*(field for field in _FIELDS if field not in fields), f"rank {len(rows)}"]
            raise ScheduleError(f"line {number}: expected one of {', '.join(wanted)} and a colon, got {line!r}")
    if missing := [field for field in _FIELDS if field not in fields]:
        raise ScheduleError(f"the line {missing[0]!r} is missing")
    return _plan(header == _PROGRAM, fields, rows)


def _plan(with_transfers: bool, fields: dict[str, str], rows: list[tuple[Step, ...]]) -> Plan:
    """Make a plan from the lines of a text."""
    try:
        kind, *homes = fields["placement"].split(" ")
        stages_per_rank = int(fields["stages_per_rank"])
        placement = Placement(PlacementKind(kind), int(fields["ranks"]), stages_per_rank, tuple(map(int, homes)))
        bound = None if fields["live_bound"] == "none" else tuple(map(int, fields["live_bound"].split()))
        training = {"yes": True, "no": False}.get(fields["training"])
        if training is None:
            raise ScheduleError(f"training is yes or no, not {fields['training']!r}")
        num_microbatches = int(fields["microbatches"])
        _check_size(placement.num_stages, num_microbatches, rows)
        orders = tuple(_compute_only(row) for row in rows) if with_transfers else tuple(rows)
        schedule = Schedule(fields["name"], placement, num_microbatches, orders, bound, training)
        return Program(schedule, tuple(rows)) if with_transfers else schedule
    except ScheduleError:
        raise
    except ValueError as error:
        raise ScheduleError(f"the head of the file is wrong: {error}") from None


def to_csv(plan: Plan) -> str:
    """Write a schedule (compute only) or program (with transfers) in the format of torch.distributed.pipelining.

    A row is a rank, a cell an action. The optimizer step is left out, since torch runs it outside its schedules. For
    torch's own runtime, lower the program with `shared_channels`.

    >>> from penstock.schedule import build
    >>> print(to_csv(build("1f1b", ranks=2, microbatches=1)), end="")
    0F0,0B0
    1F0,1B0

    Raises: ValueError for two copies of the model, or marks of forwards that keep, which torch's format does not have.
    """
    placement = plan.placement
    if placement.num_routes > 1:
        raise ValueError(f"torch's CSV has one copy of the model, a {placement.kind.value} placement has two")
    if any(keepers(row) for row in _rows(plan)):
        raise ValueError("torch's CSV has no mark for a forward that keeps all activations; a .txt file has")
    if moves := sorted({action.op.name for row in _rows(plan) for action in flatten(row) if action.op in MOVES}):
        raise ValueError(f"torch's CSV has no {' or '.join(moves)}; a .txt file has")
    rows = ([str(step) for step in row if not (isinstance(step, Action) and step.op is Op.STEP)] for row in _rows(plan))
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(text: str, *, name: str = "imported") -> Plan:
    """Read the schedule or program in a CSV of torch.distributed.pipelining, without proving it.

    A file with transfers is a program. One without is a schedule; its reductions are dropped, because lowering places
    them. Ranks, stages, microbatches and placement follow from the cells. Empty cells (idle in torch), UNSHARD and
    RESHARD (which do not affect the order) are skipped. A training program gets the optimizer step at each rank's end,
    and reductions if the file has none at all.

    >>> from_csv("0F0,0B0\\n1F0,1B0\\n").placement.num_ranks
    2

    Raises: ScheduleError naming row, cell and rule.
    """
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff")), strict=True)
    try:
        cells = list(reader)
    except csv.Error as error:
        raise ScheduleError(f"row {reader.line_num} is not CSV: {error}") from None
    if not cells:
        raise ScheduleError("the file is empty: it needs a row for each rank")
    found = [steps_by_place(words, f"row {row}, cell {{place}}") for row, words in enumerate(cells, start=1)]
    rows = [tuple(steps.values()) for steps in found]
    placement, num_microbatches = _infer(found)
    _check_size(placement.num_stages, num_microbatches, rows)
    ops = {action.op for row in rows for action in flatten(row)}
    training = bool(ops & {Op.B, Op.I, Op.W})
    schedule = Schedule(name, placement, num_microbatches, tuple(map(_compute_only, rows)), training=training)
    if not ops & TRANSFERS:
        return schedule
    if training and Op.REDUCE_GRAD not in ops:
        rows = [tuple(add_reductions(row, placement.stages_of(rank))) for rank, row in enumerate(rows)]
    if training:
        rows = [tuple(add_step(row)) for row in rows]
    return Program(schedule, tuple(rows))


def _rows(plan: Plan) -> tuple[tuple[Step, ...], ...]:
    return plan.ranks if isinstance(plan, Program) else plan.orders


def _compute_only(row: tuple[Step, ...]) -> tuple[Step, ...]:
    return tuple(step for step in row if isinstance(step, Pair) or step.op in PLACED)


def steps_by_place(words: list[str], where: str = "") -> dict[int, Step]:
    """Read the steps that words name, by place counted from 1; empty words and torch's UNSHARD and RESHARD are none."""
    steps: dict[int, Step] = {}
    for place, word in enumerate(map(str.strip, words), start=1):
        if not word or _OF_SHARDS.fullmatch(word):
            continue
        try:
            steps[place] = parse_step(word)
        except ScheduleError as error:
            raise ScheduleError(f"{where.format(place=place)}: {error}") from None
    return steps


def _infer(rows: list[dict[int, Step]]) -> tuple[Placement, int]:
    """Infer the placement and the number of microbatches from a CSV's cells.

    Raises: ScheduleError where stages are numbered with gaps, or are on several ranks.
    """
    homes: dict[int, int] = {}
    last_microbatch = ALL
    for rank, row in enumerate(rows):
        if not row:
            raise ScheduleError(f"row {rank + 1} is empty: each row is a rank, and each rank has actions")
        for place, action in ((place, action) for place, step in row.items() for action in parts(step)):
            here = f"row {rank + 1}, cell {place}: {action}"
            if action.op is Op.STEP:
                raise ScheduleError(f"{here} is not written in a CSV: each rank's end implies it")
            if homes.setdefault(action.stage, rank) != rank:
                raise ScheduleError(f"{here} is on stage {action.stage} of row {homes[action.stage] + 1}")
            last_microbatch = max(last_microbatch, action.microbatch)
    if last_microbatch == ALL:
        raise ScheduleError("no action of the file computes anything")
    if missing := set(range(len(homes))) - homes.keys():
        last = max(homes)
        raise ScheduleError(f"row {homes[last] + 1} has stage {last}, but no row has stage {min(missing)}")
    num_ranks, of_stages = len(rows), tuple(homes[stage] for stage in range(len(homes)))
    placement = Placement(PlacementKind.MAP, num_ranks, homes=of_stages)
    for kind in (PlacementKind.LOOP, PlacementKind.V):
        usual = Placement(kind, num_ranks, placement.stages_per_rank)
        if of_stages == tuple(map(usual.rank_of, range(usual.num_stages))):
            return usual, last_microbatch + 1
    return placement, last_microbatch + 1


def _check_size(num_stages: int, num_microbatches: int, rows: Sequence[Sequence[Step]]) -> None:
    """Refuse numbers too large for a file of this size, before memory is allocated for them."""
    num_actions = sum(len(parts(step)) for row in rows for step in row)
    if num_stages * num_microbatches > 2 * num_actions + 2:
        raise ScheduleError(
            f"{num_actions} actions are too few for {num_stages} stages and {num_microbatches} microbatches"
        )


def parse_step(word: str) -> Step:
    """Read the step that a word names.

    Raises: ScheduleError naming the rule that the word breaks.
    """
    if word == "STEP":
        return Action(Op.STEP)
    if match := _PAIR.fullmatch(word):
        forward, backward = (parse_step(half.strip()) for half in match.groups())
        if not isinstance(forward, Action) or not isinstance(backward, Action):
            raise ScheduleError(f"{word!r} pairs something that is no compute action")
        try:
            return Pair(forward, backward)
        except ValueError as error:
            raise ScheduleError(str(error)) from None
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ScheduleError(f"{word!r} is no action: {_RULE}")
    stage, op, microbatch, keeps = match.groups()
    if keeps and op != "F":
        raise ScheduleError(f"{word!r} marks no F: a K stands behind a forward that keeps all activations")
    if (Op[op].scope is Scope.MICROBATCH) != bool(microbatch):
        raise ScheduleError(f"{word!r} must {'not name' if microbatch else 'name'} a microbatch")
    return Action(Op[op], int(stage), int(microbatch) if microbatch else ALL, keeps=bool(keeps))
