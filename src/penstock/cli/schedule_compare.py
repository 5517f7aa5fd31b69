"""`penstock schedule compare`: all schedules side by side, at the same work."""

import argparse
from typing import Any

from penstock import schedule
from penstock.cli.commands import Parser, print_json, print_table
from penstock.cli.schedule_arguments import COST_NAMES, add_costs, add_json, add_own_options, add_size, costs_of, proved
from penstock.schedule.search import bound

_UNKNOWN = "-"
_COLUMNS = (
    ("schedule", "schedule", "s"),
    ("stages_per_rank", "stages", "d"),
    ("bubble_rate", "bubble", ".4f"),
    ("makespan", "makespan", ".6g"),
    ("span_cost", "span", ".6g"),
    ("above_bound", "above bound", ".2%"),
    ("peak_live_microbatches", "peak live", ".4g"),
    ("peak_live_bytes", "peak bytes", ".4g"),
    ("num_messages", "messages", "d"),
    ("message_bytes", "bytes sent", ".4g"),
)


def main(arguments: list[str]) -> int:
    """Print a table of all schedules that train.

    Raises: ValueError for users' mistakes.
    """
    parser = Parser(
        "penstock schedule compare",
        "Prove and time every schedule that trains, each with the local stages that it is meant for, at equal work:\n"
        "the times are those of ONE microbatch through ALL local stages of one rank. Least bubble first.\n"
        "peak live is the largest over ranks of live microbatches, counted as full ranks of activations. above bound\n"
        "says by how much the span exceeds a proven lower bound: that of every order, with backwards split or not,\n"
        "in which the stages lie on the same ranks and no more is live. 0% is an optimum; above it the bound may be\n"
        "loose. There is none where fused pairs have a time of their own (--pair).",
        examples=(
            "penstock schedule compare --ranks 8 --microbatches 32",
            "penstock schedule compare --ranks 8 --microbatches 24 \\",
            "    --forward 29.718 --backward-input 29.444 --backward-weight 19.927 --transfer 0.527",
        ),
    )
    add_size(parser, ranks=8, microbatches=32)
    parser.add_argument("--schedules", nargs="+", metavar="NAME", help="only these (default: all)")
    add_costs(parser)
    add_own_options(parser, [name for name in schedule.names() if schedule.options(name)], without=COST_NAMES)
    add_json(parser)
    options = parser.parse_args(arguments)
    rows = [row for name in options.schedules or schedule.names() if (row := _row(name, options)) is not None]
    rows.sort(key=lambda row: (row["bubble_rate"], row["peak_live_microbatches"]))
    if options.json:
        print_json(rows)
    else:
        _print_table(rows)
    return 0


def _row(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What one schedule comes to; nothing for one that does not train."""
    program = proved(options, name)
    if not program.schedule.training:
        return None
    costs = costs_of(options)
    timeline = schedule.simulate(program, costs)
    least = _span_bound(program, costs, max(timeline.peak_live_microbatches))
    num_messages = schedule.verify(program).num_messages
    return {
        "schedule": name,
        "stages_per_rank": program.placement.stages_per_rank,
        "bubble_rate": timeline.bubble_rate,
        "makespan": timeline.makespan,
        "span_cost": timeline.span_cost,
        "span_bound": least,
        # Rounded, for both are sums of the same times in different orders; an optimum is 0 and not -0.
        "above_bound": round(timeline.span_cost / least - 1, 9) + 0.0 if least else None,
        "peak_live_microbatches": max(timeline.peak_live_microbatches),
        "peak_live_bytes": max(timeline.peak_live_bytes),
        "num_messages": num_messages,
        "message_bytes": num_messages * options.message_bytes,
    }


def _span_bound(program: schedule.Program, costs: schedule.Costs, limit: float) -> float | None:
    """The bound on the spans of all orders within a limit; None for times that it does not know."""
    if costs.pair is not None:
        return None
    return bound(program.placement, program.schedule.num_microbatches, costs, max(1.0, limit))


def _print_table(rows: list[dict[str, Any]]) -> None:
    shown = [column for column in _COLUMNS if not column[0].endswith("_bytes") or any(row[column[0]] for row in rows)]
    cells = [[head for _, head, _ in shown]]
    cells += [[_UNKNOWN if row[name] is None else format(row[name], form) for name, _, form in shown] for row in rows]
    print_table(cells)
