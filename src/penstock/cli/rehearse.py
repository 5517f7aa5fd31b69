"""`penstock rehearse RUN.toml`: a rank's training step by the engine's own code, without data or devices."""

from dataclasses import asdict
from functools import partial
from typing import Any

from penstock.cli.options import Parser, add_json, add_output
from penstock.cli.output import check_drawing, print_json, print_table, size_in_words
from penstock.draw import PICTURES
from penstock.schedule.rehearsal import ActionCost, MemoryKind, Rehearsal, UnitCost, check_order
from penstock.settings import Layout, read_config

_size = partial(size_in_words, digits=2)


def parser() -> Parser:
    parser = Parser(
        "penstock rehearse",
        "Run one rank's training step by the engine's own code on tensors without data: every action of the real\n"
        "program, in one process, with groups and a transport that only count. Prints memory by what it is made of,\n"
        "each unit's arithmetic, bytes read and written, and the bytes of messages and collectives. Fails where a\n"
        "GPU would and a CPU forgives: values read back by the host, tensors of two devices, shapes that do not\n"
        "meet; and, of several ranks, collectives in different orders. Every sequence has data.sequence_length\n"
        "tokens, and experts get even numbers of them.",
        examples=(
            "penstock rehearse examples/tiny.toml",
            ("penstock rehearse run.toml --rank 17 --picture memory.svg", "memory over the step, action by action"),
            ("penstock rehearse run.toml --rank 0,1,2,3", "several ranks, and whether they fit together"),
        ),
    )
    parser.add_argument("run", metavar="RUN.toml", help="the settings of a run")
    parser.add_argument("--rank", default="0", metavar="R", help='a rank, several (0,1,2), or "all" (default 0)')
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help='whose operations are run (default: parallel.device; "auto" is cuda)'
    )
    add_output(parser, "draw memory over the step (.svg, .png or .pdf)", option="--picture")
    add_json(parser)
    return parser


def main(arguments: list[str]) -> int:
    """Rehearse ranks of a run's layout, and print what they take."""
    options = parser().parse_args(arguments)
    config = read_config(options.run)
    ranks = _ranks(options.rank, config.parallel)
    if options.picture is not None and len(ranks) > 1:
        raise ValueError("--picture shows one rank's memory; name one with --rank")
    check_drawing(options.picture, options.force, PICTURES)
    # Only now, since it loads PyTorch.
    from penstock.engine.rehearsal.step import rehearse_run

    rehearsals = [rehearse_run(config, rank, options.device) for rank in ranks]
    check_order(rehearsals)
    if options.picture is not None:
        from penstock.draw.image import memory_picture

        memory_picture(options.picture, rehearsals[0])
    if options.json:
        print_json([_to_json(one) for one in rehearsals])
    else:
        for one in rehearsals:
            _print(one)
    return 0


def _ranks(text: str, layout: Layout) -> list[int]:
    """The ranks that the option names. Raises: ValueError if one is no rank of the layout."""
    if text == "all":
        return list(range(layout.world_size))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdigit() or int(word) >= layout.world_size:
            raise ValueError(
                f"--rank {text}: {word!r} is no rank of the layout {layout}; possible are 0 to "
                f'{layout.world_size - 1}, several of them with commas between, or "all"'
            )
    return list(dict.fromkeys(map(int, words)))


def _to_json(rehearsal: Rehearsal) -> dict[str, Any]:
    found = asdict(rehearsal)
    del found["launches"]
    for unit in found["units"]:
        for action in unit["actions"]:
            action["op"] = action["op"].name
    for message in found["messages"]:
        source, destination, direction = message.pop("channel")
        message |= {"source": source, "destination": destination, "direction": direction.name.lower()}
    most = {str(kind): _most(rehearsal, kind) for kind in MemoryKind}
    return {**found, "peak_bytes": rehearsal.peak_bytes, "peak_action": rehearsal.fullest.action, "most_bytes": most}


def _most(rehearsal: Rehearsal, kind: MemoryKind) -> int:
    """The most bytes of a kind, also of tapes of which one grows in the fullest action before another is freed."""
    return max(rehearsal.most(kind), rehearsal.fullest.at_peak.get(kind, 0))


def _print(rehearsal: Rehearsal) -> None:
    fullest = rehearsal.fullest
    print(
        f"rank {rehearsal.rank} ({rehearsal.place}): {rehearsal.schedule}, {rehearsal.num_microbatches} microbatches, "
        f"on {rehearsal.device}\n"
        f"peak {_size(rehearsal.peak_bytes)} in {fullest.action}, {rehearsal.flops / 1e12:,.3f} TFLOP a step\n"
    )
    rows = [["memory", "at the peak", "at most"]]
    for kind in MemoryKind:
        if most := _most(rehearsal, kind):
            rows.append([str(kind), _size(fullest.at_peak.get(kind, 0)), _size(most)])
    print_table(rows)
    print()
    rows = [["unit", "action", "GFLOP", "read", "written", "kept", "peak"]]
    equal: dict[tuple[ActionCost, ...], list[UnitCost]] = {}
    for unit in rehearsal.units:
        equal.setdefault(unit.actions, []).append(unit)
    for units in equal.values():
        name = units[0].name + (f" and {len(units) - 1} like it" if len(units) > 1 else "")
        for i, action in enumerate(units[0].actions):
            sizes = map(_size, (action.read_bytes, action.written_bytes, action.kept_bytes, action.peak_bytes))
            rows.append(["" if i else name, action.op.name, f"{action.flops / 1e9:,.3f}", *sizes])
    print_table(rows)
    rows = [["traffic", "ranks", "number", "of", "together"]]
    for one in rehearsal.messages:
        way = f"{one.channel.direction.name.lower()} to pp rank {one.channel.destination}"
        rows.append([way, "2", str(one.number), _size(one.num_bytes), _size(one.number * one.num_bytes)])
    for one in rehearsal.collectives:
        sums = [str(one.number), _size(one.num_bytes), _size(one.number * one.num_bytes)]
        rows.append([f"{one.kind} ({one.axis})", str(one.num_ranks), *sums])
    if len(rows) > 1:
        print()
        print_table(rows)
