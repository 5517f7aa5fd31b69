"""The playground's questions to the package: its builders, a schedule as text, and all there is to say about a text.

The page's worker imports it in the browser and asks `answer`; nothing here knows of pages.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock import schedule
from penstock.draw import Layer, write_drawing
from penstock.schedule import files


def answer(question: str) -> str:
    """Answer a question; both are JSON: the name of a function below and its arguments, its value or its fault.

    What is refused because it hangs has both: its fault, and the timeline up to there.
    """
    name, given = json.loads(question)
    try:
        return json.dumps({"value": {"builders": builders, "build": build, "look_at": look_at}[name](**given)})
    except schedule.ScheduleError as error:
        hang = {} if error.hang is None else {"value": _drawn(error.hang, given["costs"])}
        return json.dumps({"fault": str(error)} | hang)
    except ValueError as error:
        return json.dumps({"fault": str(error)})


def builders() -> list[dict[str, Any]]:
    """Every schedule that can be built: its name, its description, its number of stages and its own options.

    Options that are times or sizes, as a searched schedule has them, are not among these; they follow the costs.
    """
    costs = asdict(schedule.Costs())
    return [
        {
            "name": name,
            "about": schedule.describe(name),
            "stages_per_rank": schedule.default_stages(name),
            "options": {key: value for key, value in schedule.options(name).items() if key not in costs},
        }
        for name in schedule.names()
    ]


def build(
    name: str, counts: dict[str, int], options: dict[str, Any], costs: dict[str, str], early_gradients: bool = False
) -> str:
    """The text of a schedule built by name; `counts` are ranks, microbatches and stages_per_rank.

    Raises: ValueError as `schedule.build`.
    """
    searched_for = {key: value for key, value in _numbers(costs).items() if key in schedule.options(name)}
    built = schedule.build(name, **counts, **{key: _value(value) for key, value in options.items()}, **searched_for)
    return schedule.to_text(schedule.early_gradients(built) if early_gradients else built)


def look_at(text: str, costs: dict[str, str]) -> dict[str, Any]:
    """The proof, the figures and the timeline of a schedule in Penstock's text or torch's CSV.

    The timeline is a page of its own.

    Raises: ValueError for costs that do not fit; ScheduleError for what cannot be proved, with its place in the text.
    """
    path = Path("schedule.txt" if text.startswith("penstock ") else "schedule.csv")
    path.write_text(text, encoding="utf-8")
    program = files.read_program(path)
    return _drawn(program, costs) | {"proof": schedule.verify(program).sentences}


def _drawn(program: schedule.Program | schedule.Hang, costs: dict[str, str]) -> dict[str, Any]:
    """The figures and the timeline of a proved program, or of what one carries out before it hangs."""
    timeline = schedule.simulate(program, schedule.Costs(**_numbers(costs)))
    drawing = Path("timeline.html")
    write_drawing(drawing, [Layer.simulated(timeline)])
    figures = {
        "bubble": f"{timeline.bubble_rate:.4f}",
        "makespan": f"{timeline.makespan:.6g}",
        "span": f"{timeline.span_cost:.6g}",
        "peak live microbatches": " ".join(f"{live:.4g}" for live in timeline.peak_live_microbatches),
    }
    return {
        "figures": figures if timeline.hang is None else {},
        "timeline": drawing.read_text(encoding="utf-8"),
        "num_ranks": len(timeline.events),
    }


def _numbers(costs: dict[str, str]) -> dict[str, Any]:
    """Costs from what was typed: a number, or several with commas; what was left empty keeps its default."""
    found = {}
    for name, text in costs.items():
        if text.strip():
            try:
                found[name] = tuple(map(float, text.split(","))) if "," in text else float(text)
            except ValueError:
                raise ValueError(
                    f"{name.replace('_', ' ')} is a number, or several with commas, not {text!r}"
                ) from None
    return found


def _value(typed: Any) -> Any:
    """An option's value: the number that was typed, or else the word."""
    try:
        return json.loads(typed) if isinstance(typed, str) else typed
    except ValueError:
        return typed
