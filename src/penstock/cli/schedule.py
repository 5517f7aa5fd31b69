"""`penstock schedule`: list, show, verify, simulate, compare and export schedules; none of it needs torch or a GPU."""

import argparse
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from penstock import draw, schedule
from penstock.cli.options import WIDTH, Command, Parser, add_json, add_output, dispatch
from penstock.cli.output import check_drawing, print_json, print_table, write_text
from penstock.schedule import files
from penstock.schedule.search import bound
from penstock.settings.objects import is_reference

# ---- The arguments that the schedule commands share: which schedule, of what size, at what costs


# What each of `schedule.Costs` means. A builder's own option of the same name is not added a second time.
_COSTS = {
    "forward": "time of F",
    "backward_input": "time of I, the part of B that the previous rank waits for",
    "backward_weight": "time of W, the other part of B",
    "recompute": "part of I that recomputes activations, which a forward marked to keep them spares",
    "pair": "time of a fused pair of F and B (default: as long as both)",
    "lengths": "a factor for each microbatch on its times and bytes: 1,0.5,1.5 (default: all equal)",
    "action": "time that every compute action takes besides",
    "transfer": "time of a message, which blocks no rank; or one for each rank's link to the next: 1,1,5,1",
    "message_bytes": "bytes of a message, which take time by --bandwidth",
    "bandwidth": "bytes that a channel carries in a unit of time (default: unlimited)",
    "reduce": "time of the gradient reduction of a stage",
    "step": "time of the optimizer step",
    "microbatch_bytes": "bytes that a rank keeps of a microbatch; or a number for each stage of the model",
    "kept_bytes": "bytes of a microbatch whose forward is marked to keep all (default: as many)",
    "weight_memory_share": "share of microbatch-bytes that is kept from a microbatch's I until its W",
}
_SINGLE = ("action", "message_bytes", "bandwidth", "reduce", "step")


def add_size(parser: Parser, ranks: int, microbatches: int, *, of_file: bool = False) -> None:
    """Add the counts, without defaults for a file, which has its own."""
    for option, default, what in (("ranks", ranks, "processes"), ("microbatches", microbatches, "parts of a batch")):
        said = f"{what} (default {default})"
        parser.add_argument(f"--{option}", type=int, default=None if of_file else default, metavar="N", help=said)


def add_schedule(parser: Parser, arguments: Sequence[str], *, costs: bool = True) -> None:
    """Add NAME, the counts, the costs if asked for, the named schedule's own options, and --json."""
    parser.add_argument(
        "name", metavar="NAME", help="a name that `schedule list` prints, a .csv or .txt file, or file.py:function"
    )
    # The --output file does not count.
    before = ["", *arguments]
    add_size(
        parser, 4, 8, of_file=any(files.is_file(word) and last != "--output" for last, word in zip(before, arguments))
    )
    parser.add_argument(
        "--stages-per-rank", type=int, metavar="N", help="local stages (default: as the schedule has it)"
    )
    said = "send each gradient to the previous rank as soon as it is computed, before W, as the engine does"
    parser.add_argument("--early-gradients", action="store_true", help=said)
    said = "microbatches of a stage that keep all activations at once, the first ones (default 0)"
    parser.add_argument("--num-kept-microbatches", type=int, default=0, metavar="N", help=said)
    add_json(parser)
    if costs:
        add_costs(parser)
    name = next((word for word in arguments if _is_named(word)), None)
    if name is not None:
        add_own_options(parser, [name], without=_COSTS if costs else ())


def _is_named(word: str) -> bool:
    """Return whether a word is the name of a schedule to build; those of installed packages are not looked for."""
    return word in schedule.names(with_aliases=True) or is_reference(word)


def add_own_options(parser: Parser, names: Sequence[str], *, without: Container[str]) -> None:
    """Add the options of these schedules' own, except those in `without`."""
    group = parser.add_argument_group(textwrap.fill(f"options of {', '.join(names)}", WIDTH - 1))
    defaults = {option: default for name in names for option, default in schedule.options(name).items()}
    for option, default in defaults.items():
        if option in without:
            continue
        said = "(default: as it takes)" if default is None else f"(default {default})"
        form: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if not isinstance(default, bool):
            form = {"type": _numbers if option in _COSTS else _value if default is None else type(default)}
        group.add_argument(flag(option), default=default, help=said, **form)


def _value(text: str) -> Any:
    """A number or a list, as a settings file has it, or else the text itself: the schedule says what is possible."""
    for words in (text, f"[{text}]"):
        with suppress(tomllib.TOMLDecodeError):
            value = tomllib.loads(f"value = {words}")["value"]
            return tuple(value) if isinstance(value, list) else value
    return text


def add_costs(parser: Parser) -> None:
    costs = parser.add_argument_group(
        "costs", "Times of one microbatch through all stages of one rank; or one for each\nstage of the model: 1,1.5,1"
    )
    for name, what in _COSTS.items():
        kind = float if name in _SINGLE else _list if name == "lengths" else _numbers
        default = getattr(schedule.Costs(), name)
        costs.add_argument(flag(name), type=kind, default=default, metavar="NUMBER", help=what)


def flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _list(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 1,0.5,1.5") from None


def _numbers(text: str) -> float | tuple[float, ...]:
    first, *others = _list(text)
    return (first, *others) if others else first


def costs_of(options: argparse.Namespace) -> schedule.Costs:
    return schedule.Costs(**{name: getattr(options, name) for name in _COSTS})


def own_options(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The given values of a schedule's own options."""
    names = schedule.options(name) if _is_named(name) else ()
    return {option: getattr(options, option) for option in names if hasattr(options, option)}


def proved(options: argparse.Namespace, name: str, *, shared_channels: bool = False) -> schedule.Program:
    """The proved program of the schedule of that name, with the counts and options of the command.

    A file has its own counts, which are copied into the options.

    Raises: ScheduleError for a file that is wrong or has other counts than asked for; ValueError as `build`.
    """
    if not files.is_file(name):
        built = schedule.build(
            name,
            ranks=options.ranks,
            microbatches=options.microbatches,
            stages_per_rank=options.stages_per_rank,
            **own_options(name, options),
        )
        program = schedule.lower(
            schedule.early_gradients(built) if options.early_gradients else built, shared_channels=shared_channels
        )
        schedule.verify(program)
        return schedule.keep_first(program, options.num_kept_microbatches)
    if options.early_gradients:
        raise schedule.ScheduleError(f"{name} is taken as it is; --early-gradients goes with a schedule's name")
    program = files.read_program(name, shared_channels=shared_channels)
    counts = {
        "ranks": program.placement.num_ranks,
        "microbatches": program.schedule.num_microbatches,
        "stages_per_rank": program.placement.stages_per_rank,
    }
    for count, number in counts.items():
        if (asked := getattr(options, count)) not in (None, number):
            raise schedule.ScheduleError(f"{name} has {number} {count.replace('_', ' ')}, not {asked}")
        setattr(options, count, number)
    return schedule.keep_first(program, options.num_kept_microbatches)


HEAD = """A schedule is each rank's order of actions: F forward, B backward (or I for
inputs, then W for weights). Lowered to a program it also has its transfers,
gradient reductions and the optimizer step. A program is proved before it may
run, and the same object is simulated and drawn."""

FOOT = """Every command takes --json. With --help each explains itself.

examples:
  penstock schedule show 1f1b --ranks 4 --microbatches 8
  penstock schedule compare --ranks 8 --microbatches 32"""

_COLUMNS = (
    ("schedule", "schedule", "s"),
    ("stages_per_rank", "stages", "d"),
    ("bubble_rate", "bubble", ".4f"),
    ("makespan", "makespan", ".6g"),
    ("span_cost", "span", ".6g"),
    ("above_bound", "above", ".2%"),
    ("peak_live_microbatches", "live", ".4g"),
    ("peak_live_bytes", "peak bytes", ".4g"),
    ("num_messages", "messages", "d"),
    ("message_bytes", "bytes sent", ".4g"),
)


def main(arguments: list[str]) -> int:
    return dispatch("penstock schedule", COMMANDS, arguments, head=HEAD, foot=FOOT)


def list_schedules_parser() -> Parser:
    what = "List the schedules that can be built, each with its options."
    parser = Parser("penstock schedule list", what, examples=["penstock schedule list --json"])
    add_json(parser)
    return parser


def list_schedules(arguments: list[str]) -> int:
    """Print the schedules that can be built, each with its summary and options."""
    summaries = {name: schedule.describe(name) for name in schedule.names()}
    if list_schedules_parser().parse_args(arguments).json:
        print_json(
            [{"name": name, "summary": summaries[name], "options": schedule.options(name)} for name in summaries]
        )
        return 0
    margin = max(map(len, summaries)) + 2
    columns = shutil.get_terminal_size((120, 24)).columns
    for name, summary in summaries.items():
        print(textwrap.fill(summary, columns, initial_indent=f"{name:{margin}}", subsequent_indent=" " * margin))
        for option, default in schedule.options(name).items():
            print(f"{'':{margin}}  {flag(option)} (default {default})")
    return 0


def show_command_parser(arguments: Sequence[str] = ()) -> Parser:
    parser = Parser(
        "penstock schedule show",
        "Draw a schedule over time: one row a rank, time to the right.\n"
        "The times are those of one microbatch through all stages of one rank; by default 1 each, so B takes 2.\n"
        "A schedule that would hang is refused, and drawn up to there, with what each rank waits for.",
        examples=(
            "penstock schedule show 1f1b --ranks 4 --microbatches 8",
            "penstock schedule show afab --backward-weight 0.8 --output afab.svg",
            "penstock schedule show 1f1b --ranks 8 --microbatches 32 --output 1f1b.html",
        ),
    )
    add_schedule(parser, arguments)
    add_output(parser, "draw into this file: .svg, .png, .pdf, .html or .json")
    return parser


def show_command(arguments: list[str]) -> int:
    """Draw a schedule in the terminal, or into a file: a picture, a page or a trace."""
    options = show_command_parser(arguments).parse_args(arguments)
    check_drawing(options.output, options.force)
    costs = costs_of(options)
    try:
        timeline = schedule.simulate(proved(options, options.name), costs)
    except schedule.ScheduleError as error:
        if error.hang is not None:
            _show(options, arguments, schedule.simulate(error.hang, costs), str(error))
        raise
    _show(options, arguments, timeline)
    return 0


def _show(options: argparse.Namespace, arguments: list[str], timeline: schedule.Timeline, fault: str = "") -> None:
    """Draw a timeline into a file or the terminal, or print it as JSON; that of a hang has the `fault` of its proof."""
    if options.output is not None:
        command = shlex.join(["penstock", "schedule", "show", *arguments])
        draw.write_drawing(options.output, [draw.Layer.simulated(timeline)], command=command)
    if options.json:
        events = [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in of_rank]
            for of_rank in timeline.events
        ]
        if (hang := timeline.hang) is None:
            summary = _summary_of(options, timeline)
        else:
            waits = [
                {"rank": rank, "action": str(action), "waits_for": str(transfer), "of_rank": hang.awaited(rank)}
                for rank, (action, transfer) in hang.waits.items()
            ]
            summary = {**_asked(options), "proved": False, "reason": fault, "waits": waits, "arrows": hang.arrows}
        print_json(summary | {"events": events} | _written(options))
    elif options.output is not None:
        print(f"drew {timeline.title} into {options.output}")
    else:
        draw.in_terminal(timeline)


def verify_command_parser(arguments: Sequence[str] = ()) -> Parser:
    parser = Parser(
        "penstock schedule verify",
        "Prove a schedule: each action exactly once and behind what it needs, each send met by one receive, first in\n"
        "first out, no deadlock even if every send blocks until its receive is posted. NAME may be a file that you or\n"
        "`export` wrote, or torch's CSV: with compute actions alone it gets its transfers first; with transfers it is\n"
        "proved as it is, in its own size.",
        examples=(
            ("penstock schedule verify my-schedule.csv", "a fault is named with its row and cell"),
            ("penstock schedule verify zb-v --ranks 8 --microbatches 32", "what a run of this size would carry out"),
            "penstock schedule verify examples/own_schedule.py:eager_1f1b --ranks 4",
        ),
    )
    add_schedule(parser, arguments, costs=False)
    return parser


def verify_command(arguments: list[str]) -> int:
    """Prove a schedule, by its name or from a file, or report its fault."""
    options = verify_command_parser(arguments).parse_args(arguments)
    try:
        program = proved(options, options.name)
    except schedule.ScheduleError as error:
        if options.json:
            print_json({**_asked(options), "proved": False, "reason": str(error)})
        raise
    proof = schedule.verify(program)
    if options.json:
        print_json({**_asked(options), "proved": True} | asdict(proof))
    else:
        print(f"{options.name}: proved", *proof.sentences, sep="\n  ")
    return 0


def simulate_command_parser(arguments: Sequence[str] = ()) -> Parser:
    parser = Parser(
        "penstock schedule simulate",
        "Time a schedule without running it. The times given are those of ONE microbatch through ALL local stages\n"
        "of one rank, in any one unit; they are divided evenly among the stages, so that schedules compare at equal\n"
        "work. The span is the longest time from a rank's first start to its own end; the bubble is the share of it\n"
        "that the busiest rank does not compute (in JSON span_cost and bubble_rate); idle is the time of the makespan\n"
        "in which a rank computes nothing.",
        examples=(
            "penstock schedule simulate 1f1b --ranks 8 --microbatches 24 --transfer 0.1",
            "penstock schedule simulate zb-h1 --ranks 4 --forward 1,1,1.2,1.5 --json",
        ),
    )
    add_schedule(parser, arguments)
    return parser


def simulate_command(arguments: list[str]) -> int:
    options = simulate_command_parser(arguments).parse_args(arguments)
    program, costs = proved(options, options.name), costs_of(options)
    timeline = schedule.simulate(program, costs)
    if options.json:
        print_json(
            _summary_of(options, timeline)
            | {"live_microbatches": [timeline.live_microbatches(rank) for rank in range(options.ranks)]}
            | {"live_bytes": [timeline.live_bytes(rank) for rank in range(options.ranks)]}
        )
        return 0
    print(
        f"{timeline.title}\n  makespan     {timeline.makespan:.6g}\n  span         {timeline.span_cost:.6g}\n"
        f"  bubble       {timeline.bubble_rate:.4f}\n  rank         idle   peak live microbatches"
    )
    for rank, (idle, live) in enumerate(zip(timeline.idle, timeline.peak_live_microbatches, strict=True)):
        print(f"  {rank:4d} {idle:12.6g} {live:8.4g}")
    return 0


def export_parser(arguments: Sequence[str] = ()) -> Parser:
    parser = Parser(
        "penstock schedule export",
        "Write a schedule to a file: .csv in the format of torch.distributed.pipelining, .txt as text that keeps\n"
        "all of it. It is proved before it is written.",
        examples=(
            "penstock schedule export 1f1b --ranks 4 --microbatches 8 --output 1f1b.csv",
            "penstock schedule export 1f1b --ranks 2 --transfers --output program.txt",
        ),
    )
    add_schedule(parser, arguments, costs=False)
    add_output(parser, "the file: .csv or .txt", required=True)
    parser.add_argument("--transfers", action="store_true", help="write the program: with transfers and reductions")
    return parser


def export(arguments: list[str]) -> int:
    """Write a schedule, or the program lowered from it, to a file."""
    options = export_parser(arguments).parse_args(arguments)
    writers = {".csv": schedule.to_csv, ".txt": schedule.to_text}
    ending = options.output.suffix.lower()
    writer = writers.get(ending)
    if writer is None:
        raise ValueError(f"cannot export to {options.output.name!r}: the file must end in {' or '.join(writers)}")
    # torch sends activations and gradients between two ranks through one channel.
    program = proved(options, options.name, shared_channels=ending == ".csv")
    write_text(options.output, writer(program if options.transfers else program.schedule), force=options.force)
    num_actions = sum(map(len, program.ranks if options.transfers else program.schedule.orders))
    if options.json:
        print_json({**_names(options), "num_actions": num_actions} | _written(options))
    else:
        print(f"wrote {num_actions} actions of {options.ranks} rank{'s' * (options.ranks != 1)} to {options.output}")
    return 0


def compare_command_parser() -> Parser:
    parser = Parser(
        "penstock schedule compare",
        "Prove and time every schedule that trains, each with the local stages that it is meant for, at equal work:\n"
        "the times are those of ONE microbatch through ALL local stages of one rank. Least bubble first.\n"
        "live is the largest over ranks of live microbatches, counted as full ranks of activations. above\n"
        "says by how much the span exceeds a proven lower bound: that of every order, with backwards split or not,\n"
        "in which the stages lie on the same ranks and no more is live. 0% is an optimum; above it the bound may be\n"
        "loose. Fused pairs with a time of their own (--pair) have no bound.",
        examples=(
            "penstock schedule compare --ranks 8 --microbatches 32",
            "penstock schedule compare --ranks 2 --schedules 1f1b zb-v",
        ),
    )
    parser.set_defaults(stages_per_rank=None, early_gradients=False, num_kept_microbatches=0)
    add_size(parser, 8, 32)
    parser.add_argument("--schedules", nargs="+", metavar="NAME", help="only these (default: all)")
    add_costs(parser)
    add_own_options(parser, [name for name in schedule.names() if schedule.options(name)], without=_COSTS)
    add_json(parser)
    return parser


def compare_command(arguments: list[str]) -> int:
    """Print a table of all schedules that train, side by side at equal work."""
    options = compare_command_parser().parse_args(arguments)
    rows = [row for name in options.schedules or schedule.names() if (row := _row_of(name, options)) is not None]
    rows.sort(key=lambda row: (row["bubble_rate"], row["peak_live_microbatches"]))
    if options.json:
        print_json(rows)
        return 0
    shown = [column for column in _COLUMNS if not column[0].endswith("_bytes") or any(row[column[0]] for row in rows)]
    cells = [[head for _, head, _ in shown]]
    cells += [["-" if row[name] is None else format(row[name], form) for name, _, form in shown] for row in rows]
    print_table(cells)
    return 0


COMMANDS = {
    "list": Command("the schedules that can be built", __name__, "list_schedules"),
    "show": Command("draw a schedule in the terminal or into a picture, page or trace", __name__, "show_command"),
    "verify": Command("prove a schedule, also one written by hand or by torch", __name__, "verify_command"),
    "simulate": Command("time a schedule: makespan, bubble, live microbatches", __name__, "simulate_command"),
    "compare": Command("all schedules side by side: bubble, memory, messages", __name__, "compare_command"),
    "export": Command("write a schedule as text or as torch's CSV", __name__, "export"),
}


def _asked(options: argparse.Namespace) -> dict[str, object]:
    """The file that is proved, or the schedule with its size and options."""
    return {"file": options.name} if files.is_file(options.name) else _names(options)


def _names(options: argparse.Namespace) -> dict[str, object]:
    return {
        "schedule": options.name,
        "ranks": options.ranks,
        "microbatches": options.microbatches,
        "stages_per_rank": options.stages_per_rank or schedule.default_stages(options.name),
        **own_options(options.name, options),
    }


def _written(options: argparse.Namespace) -> dict[str, object]:
    return {} if options.output is None else {"written": str(options.output)}


def _summary_of(options: argparse.Namespace, timeline: schedule.Timeline) -> dict[str, object]:
    return {
        **_names(options),
        "costs": asdict(costs_of(options)),
        "makespan": timeline.makespan,
        "span_cost": timeline.span_cost,
        "bubble_rate": timeline.bubble_rate,
        "peak_live_microbatches": list(timeline.peak_live_microbatches),
        "peak_live_bytes": list(timeline.peak_live_bytes),
        "idle": list(timeline.idle),
    }


def _row_of(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one schedule; None for one that does not train."""
    program, costs = proved(options, name), costs_of(options)
    if not program.schedule.training:
        return None
    lists = [
        times for times in (costs.forward, costs.backward_input, costs.backward_weight) if isinstance(times, tuple)
    ]
    if any(len(times) != program.placement.stages_per_route for times in lists):
        raise ValueError(
            f"{name} has {program.placement.stages_per_route} stages, and {len(lists[0])} times are given; to compare "
            "different numbers of stages on one model is penstock plan's"
        )
    timeline = schedule.simulate(program, costs)
    least = None
    if costs.pair is None:  # fused pairs are not covered
        limit = max(1.0, *timeline.peak_live_microbatches)
        least = bound(program.placement, program.schedule.num_microbatches, costs, limit)
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
