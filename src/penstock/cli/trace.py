"""`penstock trace`: draw a recorded step of a run, and show where each rank's time went."""

import shlex
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from penstock import draw
from penstock.cli.options import Parser, add_json, add_output
from penstock.cli.output import check_drawing, print_json
from penstock.draw.layers import RECORDED_STEP_FILE, RecordedStep, read_recorded_step, short_number
from penstock.schedule.recording import CollectiveTotal, Recording

_HEADINGS = ("compute", "waiting", "transfers", "reduction", "step", "between", "outside")


def parser() -> Parser:
    parser = Parser(
        "penstock trace",
        "Draw a step as it was measured, and show where each rank's time went: compute, waiting and for whom,\n"
        "gradient reductions, the optimizer step, between actions; and for each kind of collective, how much of its\n"
        "time was hidden behind other work. RUN is the folder of a run, whose last step is\n"
        f"recorded in its {RECORDED_STEP_FILE}, or such a file.",
        examples=(
            "penstock trace runs/tiny",
            ("penstock trace runs/tiny --output step.html", "a page: the measured step over the simulated one"),
            ("penstock trace runs/tiny --output step.json", "for ui.perfetto.dev"),
        ),
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, or a recorded step")
    forms = ", ".join(f"{ending} ({what})" for ending, what in draw.ENDINGS.items())
    add_output(parser, f"draw into this file; by its ending: {forms}")
    parser.add_argument("--simulated", action="store_true", help="in the terminal, draw the simulated step too")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    """Draw the step that a run recorded, and print where its time went."""
    options = parser().parse_args(arguments)
    check_drawing(options.output, options.force)
    recorded = read_recorded_step(_file_of(options.run))
    if options.output is not None:
        draw.write_drawing(
            options.output, recorded.layers, unit="ms", command=shlex.join(["penstock", "trace", *arguments])
        )
    if options.json:
        written = {} if options.output is None else {"written": str(options.output)}
        print_json(_to_json(recorded) | written)
        return 0
    if options.output is None:
        if options.simulated and recorded.simulated is not None:
            draw.in_terminal(recorded.simulated)
            print()
        draw.in_terminal(recorded.recording.timeline)
    else:
        print(f"drew {recorded.recording.title} into {options.output}")
    _print_spent(recorded.recording)
    return 0


def _file_of(run: Path) -> Path:
    """Find the recorded step of a run. Raises: ValueError for a run without one, saying how to record it."""
    if not run.exists():
        raise ValueError(f"there is no run {run}")
    file = run / RECORDED_STEP_FILE if run.is_dir() else run
    if not file.exists():
        raise ValueError(
            f"{run} has no {RECORDED_STEP_FILE}: a run writes it after its last step, unless [log] timeline is false"
        )
    return file


def _to_json(recorded: RecordedStep) -> dict[str, object]:
    recording, simulated = recorded.recording, recorded.simulated
    ranks = [
        asdict(spent) | {"waiting": {str(peer): waited for peer, waited in spent.waiting.items()}}
        for spent in recording.spent()
    ]
    return {
        "title": recording.title,
        "step": recording.step,
        "unit": "ms",
        "makespan": recording.makespan,
        "bubble_rate": recording.timeline.bubble_rate,
        "idle_share": recording.timeline.idle_share,
        "simulated_makespan": None if simulated is None else simulated.makespan,
        "ranks": ranks,
        "collectives": [
            {str(kind): _sums_to_json(sums) for kind, sums in rank.items()} for rank in recording.collective_totals()
        ],
    }


def _sums_to_json(sums: CollectiveTotal) -> dict[str, object]:
    values: dict[str, object] = {"number": sums.number, "num_bytes": sums.num_bytes}
    for name in ("exposed", "hidden", "hidden_share"):
        values[name] = getattr(sums, name) if sums.is_timed else None
    return values


def _print_spent(recording: Recording) -> None:
    """Print where each rank's time went and whom it waited for, in lines of at most 80 characters."""
    makespan, by_rank = recording.makespan, recording.spent()
    print(f"\nwhere the time went, of {short_number(makespan)} ms")
    print("rank" + "".join(f"{heading:>11}" for heading in _HEADINGS)[1:])
    for rank, spent in enumerate(by_rank):
        waited = sum(spent.waiting.values()) + spent.collectives
        times = (spent.compute, waited, spent.transfers, spent.reduction, spent.step, spent.between, spent.outside)
        print(f"{rank:3}" + "".join(f"{_short(time):>6}{_share(time, makespan):>5}" for time in times))
    print("transfers: starting sends and posting receives")
    print("outside: before the rank's first action and after its last\n\nwhom the ranks waited for")
    for rank, spent in enumerate(by_rank):
        waits = {f"rank {peer}": time for peer, time in spent.waiting.items()}
        if spent.collectives:
            waits["collectives"] = spent.collectives
        longest_first = sorted(waits.items(), key=lambda item: item[1], reverse=True)
        texts = (f"{whom} {short_number(time)} ms ({_share(time, makespan)})" for whom, time in longest_first)
        print(f"{rank:3}  {', '.join(texts) or 'nobody'}")
    awaited = sum((Counter(spent.waiting) for spent in by_rank), Counter[int]())
    if awaited:
        peer, time = awaited.most_common(1)[0]
        print(f"most for rank {peer}: {short_number(time)} ms, all ranks together")
    if any(recording.collectives):
        _print_collectives(recording)


def _print_collectives(recording: Recording) -> None:
    """Print, for each kind of collective, the time that ranks waited for it and the time that it was hidden."""
    print("\ncollectives: exposed while their rank waited for them, hidden while it did not")
    print("rank  kind                number       MiB     exposed          hidden")
    for rank, kinds in enumerate(recording.collective_totals()):
        for kind, sums in kinds.items():
            exposed = hidden = share = "-"
            if sums.is_timed:
                exposed, hidden = f"{_short(sums.exposed)} ms", f"{_short(sums.hidden)} ms"
                share = f"{sums.hidden_share:.0%}"
            sizes = f"{sums.number:>8}{_short(sums.num_bytes / 2**20):>10}"
            print(f"{rank:3}   {kind:<18}{sizes}{exposed:>12}{hidden:>12}{share:>5}")


def _short(time: float) -> str:
    """Format a time in at most five characters, if possible."""
    return f"{time:.2f}" if time < 9.995 else f"{time:.1f}" if time < 999.95 else f"{time:.0f}"


def _share(time: float, makespan: float) -> str:
    return f"{time / makespan if makespan else 0.0:.0%}"
