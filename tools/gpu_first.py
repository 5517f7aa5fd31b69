"""Learns within minutes what a GPU can tell: sections by value, each in a process of its own with its share of time.

    python3 tools/gpu_first.py build/gpu --report gpu-report.md

A result is a line of `gpu.jsonl` in that folder as soon as it is there, so what is cut off has lost nothing. A section
that fails, dies or hangs is one more line, and the next one runs; what sections print goes to `gpu.log` beside it.
Nothing needs to be installed but PyTorch and what the package imports. `--cpu` runs the same lines without a GPU, at
toy sizes. Exits with 0 where all went well, 1 where a section or a check did not, 2 for a mistake.
"""

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
# For what sections start.
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(min(8, os.cpu_count() or 1))
# Else an import that asks for a GPU would begin with CUDA, and no process forked from this one could use it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
import torch._dynamo  # the first optimizer of each section would import it, for seconds

from gpu_sections import SECTIONS, Results, Section  # pyright: ignore[reportMissingImports]

RESULTS_FILE, LOG_FILE = "gpu.jsonl", "gpu.log"
# Two calls, and what the machine takes to start, fit into a quarter of an hour.
_SECONDS = 360.0
_END_S = 1.0
# The quick way to start a process first.
_CONTEXTS = {"fork": multiprocessing.get_context("fork"), "spawn": multiprocessing.get_context("spawn")}
_LAST_CHARACTERS = 3000


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/gpu"), help="of the results; build/gpu")
    parser.add_argument("--only", default="", metavar="NAMES", help="these sections, with commas between them")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help=f"for all of them; {_SECONDS:g}")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all results of the folder as Markdown")
    parser.add_argument("--cpu", action="store_true", help="run at toy sizes on the CPU")
    parser.add_argument("--list", action="store_true", help="list the sections")
    given = parser.parse_args(words)
    if given.list:
        for section in SECTIONS.values():
            print(f"{section.name:18} {section.seconds:4g} s  {section.title}")
        return 0
    names = [name for name in given.only.split(",") if name] or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    start_method = "fork" if given.cpu else _start_method()
    if start_method is None:
        print(
            f"no GPU is used here: torch {torch.__version__} finds no CUDA device; run this on a machine with one, or "
            "with --cpu at toy sizes",
            file=sys.stderr,
        )
        return 2
    if given.cpu:
        # Toys gain nothing from threads, here and in what sections start.
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    given.folder.mkdir(parents=True, exist_ok=True)
    path, went_well, start = given.folder / RESULTS_FILE, True, time.monotonic()
    for number, name in enumerate(names):
        began = time.monotonic()
        left = start + given.seconds - began
        limit_s, num_lines = share([SECTIONS[later] for later in names[number:]], left), len(read(path))
        results = Results(path, name, "cpu" if given.cpu else "cuda", start, began + limit_s)
        if limit_s:
            ended = in_its_process(results, given.folder / LOG_FILE, limit_s, start_method)
        else:
            why = f"it takes {SECTIONS[name].seconds:g} s, and {max(0.0, left):.0f} s are left"
            ended = {"ended": "left out", "why": why}
        results.add(ended | {"took_s": time.monotonic() - began})
        lines = read(path)
        went_well &= ended["ended"] == "well" and all(line.get("holds", True) for line in lines[num_lines:])
        # Anew after each section, for the case that all of this is cut off.
        if given.report is not None:
            given.report.write_text(as_markdown(lines), encoding="utf-8")
    return 0 if went_well else 1


def share(sections: Sequence[Section], left: float) -> float:
    """The seconds, of those left, that the first of these sections may take; 0 where it does not fit.

    As many as fit share all that is left, so what one does not need goes to those behind it, and one that hangs takes
    nothing from them.
    """
    planned = 0.0
    for section in sections:
        if planned + section.seconds > left:
            break
        planned += section.seconds
    return left * sections[0].seconds / planned if planned else 0.0


# ---- a section's process


def _start_method() -> str | None:
    """The way to start processes in which a GPU can be used; None if there is no GPU."""
    for method in _CONTEXTS:
        asking = _CONTEXTS[method].Process(target=_use_a_gpu)
        asking.start()
        asking.join()
        if asking.exitcode == 0:
            return method
    return None


def _use_a_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit(1)
    torch.zeros(1, device="cuda")


def in_its_process(results: Results, log: Path, limit_s: float, start_method: str) -> dict[str, Any]:
    """Run a section in a process of its own, for so long at most; how it ended, and where it was if not well."""
    written = log.stat().st_size if log.exists() else 0
    process = _CONTEXTS[start_method].Process(target=_run_section, args=(results, log, limit_s))
    process.start()
    process.join(limit_s)
    is_late = process.is_alive()
    process.kill()
    assert process.pid is not None
    # What it has started goes too.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if process.exitcode == 0 and not is_late:
        return {"ended": "well"}
    tail = log.read_bytes()[written:].decode(errors="replace")[-_LAST_CHARACTERS:]
    if is_late:
        return {"ended": "cut off", "limit_s": limit_s, "log": tail}
    code = process.exitcode or 0
    return {"ended": f"died of {signal.Signals(-code).name}" if code < 0 else "failed", "log": tail}


def _run_section(results: Results, log: Path, limit_s: float) -> None:
    """Run in the new process: as the leader of all that it starts, with everything that is printed in the log."""
    os.setsid()
    console = os.fdopen(os.dup(1), "w", buffering=1)
    with log.open("a", buffering=1) as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
        print(f"== {results.section}", file=out)
        # Where it is when its time is up, or it crashes.
        faulthandler.enable(out)
        faulthandler.dump_traceback_later(max(0.1, limit_s - _END_S), file=out)
        try:
            SECTIONS[results.section].run(replace(results, console=console))
        except Exception:
            traceback.print_exc(file=out)
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.flush()


# ---- the report

Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """All lines of a file of results; what was cut off in its midst is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def as_markdown(lines: Sequence[Line]) -> str:
    """The report that a person reads: how sections ended, what does not hold, and all figures."""
    by_section = last_runs(lines)
    text = [
        "# Penstock on a GPU",
        "",
        "| section | ended | s | checks that hold | that do not |",
        "|---|---|---|---|---|",
    ]
    for name, own in by_section.items():
        ends, holds = [line for line in own if "ended" in line], [line["holds"] for line in own if "holds" in line]
        last = ends[-1] if ends else {"ended": "not at all", "took_s": 0.0}
        text.append(f"| {name} | {last['ended']} | {last['took_s']:.1f} | {sum(holds)} | {len(holds) - sum(holds)} |")
    text += ["", "## What does not hold", ""]
    wrong = [line for own in by_section.values() for line in own if not line.get("holds", True)]
    text += [f"* {line['section']}: {_in_words(line)}" for line in wrong] or ["Nothing."]
    for name, own in by_section.items():
        title = SECTIONS[name].title if name in SECTIONS else ""
        text += ["", f"## {name}", "", title]
        told = [line for line in own if line.get("ended") != "well"]
        for keys, group in groupby(told, key=lambda line: [key for key in line if key not in ("section", "at_s")]):
            text += ["", *_table(keys, list(group))]
    return "\n".join(text) + "\n"


def last_runs(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each section's last run; one that was left out counts where there is no other."""
    runs: dict[str, list[list[Line]]] = {}
    for line in lines:
        own = runs.setdefault(line["section"], [[]])
        if own[-1] and "ended" in own[-1][-1]:
            own.append([])
        own[-1].append(line)
    return {
        name: next((run for run in reversed(own) if run[-1].get("ended") != "left out"), own[-1])
        for name, own in runs.items()
    }


def _in_words(line: Line) -> str:
    left_out = ("section", "at_s", "holds", "what")
    figures = {key: value for key, value in line.items() if key not in left_out and not _is_long(value)}
    return f"{line['what']}: " + ", ".join(f"{key} {_cell(value)}" for key, value in figures.items())


def _table(keys: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """Lines of the same figures as one table; figures that are records, and texts of several lines, stand below it."""
    apart = [key for key in keys if any(_is_long(line[key]) for line in lines)]
    columns = [key for key in keys if key not in apart]
    text = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    text += [f"| {' | '.join(_cell(line[key]) for key in columns)} |" for line in lines]
    for line in lines:
        for key in apart:
            if isinstance(line[key], str):
                text += ["", f"{key}:", "", "```", line[key].strip(), "```"]
            elif line[key]:
                text += ["", f"{line.get('what', '')}, {key}:", "", *_table(list(line[key][0]), line[key])]
    return text


def _is_long(value: Any) -> bool:
    is_records = isinstance(value, list) and any(isinstance(part, dict) for part in value)
    return is_records or (isinstance(value, str) and "\n" in value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
