"""`make gallery`: draws every schedule at equal work, and writes the page that shows them, docs/gallery.md.

The picture of a training step in the README is drawn too, from the step that a run of the demo recorded, and that of an
order that hangs.
"""

import sys
from dataclasses import replace
from pathlib import Path

from penstock import schedule
from penstock.draw import picture
from penstock.draw.layers import read_recorded_step
from penstock.schedule.actions import parts
from penstock.schedule.builders import source, trains

ROOT = Path(__file__).parents[1]
RECORDED, STEP = "docs/timeline.json", "docs/timeline.svg"
HANG = "docs/guides/hang.svg"
# Of the pictures, whose numbers can be read on a narrow page, and of the table.
DRAWN = {"ranks": 4, "microbatches": 8}
COMPARED = {"ranks": 8, "microbatches": 32}
WHEN = {
    "afab": "To see what the others save; or where all activations fit, being few or recomputed.",
    "1f1b": "The usual choice, and the one to compare with: its memory does not grow with the number of microbatches.",
    "interleaved": "Where links are fast and 1F1B's bubble is too long. Each further stage takes more messages.",
    "looped-bfs": "Where links are slow that reduce each stage's gradients or gather its weights: once a step.",
    "zb-h1": "In place of 1F1B wherever backwards may be split: less bubble, and no more memory.",
    "zb-h2": "Where twice 1F1B's memory is to be had, and hardly any bubble is wanted.",
    "interleaved-zb": "In place of the interleaved order wherever backwards may be split.",
    "zb-v": "Where F, I and W take about equal times. The rank that embeds tokens also has the head and the loss.",
    "v-half": "Where 1F1B does not fit: with many ranks about half of its memory, at less than its bubble.",
    "v-min": "Where memory decides everything: with many ranks it tends to a third of 1F1B's.",
    "combined-1f1b": "Experts or tensor parallel over slow links: transfers hide behind the other half of a pair.",
    "combined-interleaved": "The same, where the bubble matters too.",
    "dualpipe-v": "Experts over slow links at a small bubble, with one copy of the weights.",
    "dualpipe": "The same, where two copies of the weights fit and a replica would be needed anyway.",
    "auto": "Where stages differ or times are known: it is searched for them (`measure = true` takes a run's own).",
}
HEAD = """# Gallery of schedules

<!-- Made by `make gallery`. -->

Every schedule that trains, at equal work: one microbatch takes the time 1 for F, for I and for W through all stages
of a rank, however many these are; B takes both I and W. Messages take no time. **Bubble** is the share of the span
that the busiest rank does not compute, the span being the longest time from a rank's first start to its own end.
**Memory** is the most microbatches whose activations any rank keeps, counted as full ranks of activations. In a
rank's order `4F2` is the forward of microbatch 2 through stage 4; B is a backward, or I for inputs and W for
weights.

"""


def trained() -> list[str]:
    """The names of all schedules that the gallery shows."""
    return [name for name in schedule.names() if trains(name)]


def timeline_of(name: str, ranks: int, microbatches: int) -> schedule.Timeline:
    """A schedule's proved program, simulated."""
    program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))
    schedule.verify(program)
    return schedule.simulate(program)


def page() -> str:
    """The page's text: a table of all schedules, the least bubble first, then each with its picture."""
    figures = {name: timeline_of(name, **COMPARED) for name in trained()}
    rows = sorted(figures, key=lambda name: (figures[name].bubble_rate, max(figures[name].peak_live_microbatches)))
    table = ["| schedule | stages a rank | bubble | memory |", "|---|---|---|---|"]
    table += [
        f"| [{name}](#{name}) | {schedule.default_stages(name)} | {figures[name].bubble_rate:.2%} "
        f"| {max(figures[name].peak_live_microbatches):g} |"
        for name in rows
    ]
    size = f"At {COMPARED['ranks']} ranks and {COMPARED['microbatches']} microbatches"
    words = f"{size} (`penstock schedule compare` has more figures, and takes other sizes and times):"
    parts = [HEAD + words, "\n".join(table), *(_section(name) for name in trained())]
    return "\n\n".join(parts) + "\n"


def _section(name: str) -> str:
    timeline = timeline_of(name, **DRAWN)
    peak = max(timeline.peak_live_microbatches)
    order = [str(event.action) for event in timeline.events[0] if parts(event.action)[0].microbatch >= 0]
    size = f"{DRAWN['ranks']} ranks, {DRAWN['microbatches']} microbatches"
    return f"""## {name}

{schedule.describe(name)}.

![{name}, {size}](gallery/{name}.svg)

* bubble {timeline.bubble_rate:.2%}, memory {peak:g} microbatches ({size})
* rank 0: `{" ".join(order)}`
* when to use it: {WHEN[name]}
* source: {source(name) or "Penstock's own."}"""


def write(folder: Path) -> list[Path]:
    """Write the page and its pictures below a folder of documentation; returns their paths."""
    pictures = folder / "gallery"
    pictures.mkdir(parents=True, exist_ok=True)
    written = [folder / "gallery.md"]
    written[0].write_text(page(), encoding="utf-8")
    for name in trained():
        written.append(pictures / f"{name}.svg")
        picture(written[-1], [timeline_of(name, **DRAWN)])
    return written


def draw_step(path: Path) -> None:
    """Draw the recorded step of the README."""
    picture(path, [layer.timeline for layer in read_recorded_step(ROOT / RECORDED).layers], unit="ms")


def draw_hang(path: Path) -> None:
    """Draw the order that hangs in the guide: two actions exchanged."""
    afab, last = schedule.build("afab", **DRAWN), DRAWN["microbatches"]
    first = list(afab.orders[0])
    first[last - 1 : last + 1] = first[last], first[last - 1]
    order = replace(afab, name="exchanged", orders=(tuple(first), *afab.orders[1:]))
    try:
        schedule.verify(schedule.lower(order))
    except schedule.ScheduleError as error:
        assert error.hang is not None
        picture(path, [schedule.simulate(error.hang)])


def main() -> int:
    written = write(ROOT / "docs")
    draw_step(ROOT / STEP)
    draw_hang(ROOT / HANG)
    print(f"wrote {len(written)} files below docs/, {STEP} and {HANG}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
