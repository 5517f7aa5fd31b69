"""tools/gpu_first.py runs all sections at toy sizes; one that fails, dies or hangs leaves its results and the rest."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import gpu_first  # pyright: ignore[reportMissingImports]
from gpu_sections import SECTIONS, Results, Section  # pyright: ignore[reportMissingImports]
from tests.fork_server import Forked, run_script

SCRIPT = str(Path(__file__).parents[1] / "tools" / "gpu_first.py")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / gpu_first.RESULTS_FILE).read_text().splitlines()]


def test_all_sections_run_at_toy_sizes_and_are_in_the_report(tmp_path: Path) -> None:
    # The last one starts interpreters of its own, which takes as long as all others.
    names = [name for name in SECTIONS if name != "two_ranks_on_one"]
    # The limits are for a quiet machine.
    words = ["--cpu", "--seconds", "1200", "--only", ",".join(names), "--report", str(tmp_path / "report.md")]
    process = Forked(run_script, SCRIPT, [*words, str(tmp_path)], environ=os.environ)
    console, errors = process.communicate(timeout=580)
    lines, log = lines_of(tmp_path), (tmp_path / gpu_first.LOG_FILE).read_text()
    assert {line["section"]: line["ended"] for line in lines if "ended" in line} == dict.fromkeys(names, "well"), log
    assert {line["section"] for line in lines if "what" in line} == set(names)
    # That experts are read within a step is known.
    assert {line["section"] for line in lines if not line.get("holds", True)} <= {"syncs"}, errors + console
    assert process.returncode == int(any(not line.get("holds", True) for line in lines))
    report = (tmp_path / "report.md").read_text()
    for line in lines:
        assert f"\n## {line['section']}\n" in report
    assert console.count("\n") == len(lines)


# ---- sections with faults


def raises(results: Results) -> None:
    """Fails when it has said something."""
    results.say("before it fails", number=1.0)
    raise ValueError("the reason why it fails")


def hangs(results: Results) -> None:
    """Never ends, and neither does what it starts."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    results.say("before it hangs", child=child.pid)
    where_it_hangs()


def where_it_hangs() -> None:
    time.sleep(600)


def dies(results: Results) -> None:
    """Is gone all at once."""
    results.say("before it dies")
    os.kill(os.getpid(), signal.SIGSEGV)


def goes_well(results: Results) -> None:
    """Says that something does not hold."""
    results.say("a check", holds=False, why="a planted | fault")


def run_planted(folder: str, seconds: float, names: list[str]) -> int:
    """The command with these sections, which share the time evenly."""
    planted: list[Callable[[Results], None]] = [raises, hangs, dies, goes_well]
    own = {run.__name__: Section(run.__name__, 2.0, run, str(run.__doc__)) for run in planted}
    for sections in (gpu_first.SECTIONS, SECTIONS):
        sections.clear()
        sections.update(own)
    report = str(Path(folder) / "report.md")
    return gpu_first.main(["--cpu", folder, "--seconds", str(seconds), "--only", ",".join(names), "--report", report])


def planted(folder: Path, seconds: float, *names: str) -> int | None:
    process = Forked(run_planted, str(folder), seconds, list(names), environ=os.environ)
    process.communicate(timeout=200)
    return process.returncode


def test_a_section_that_fails_hangs_or_dies_leaves_its_results_and_the_rest_run(tmp_path: Path) -> None:
    began = time.monotonic()
    assert planted(tmp_path, 36.0, "raises", "hangs", "dies", "goes_well") == 1
    assert time.monotonic() - began < 100
    lines = lines_of(tmp_path)
    ends = {line["section"]: line for line in lines if "ended" in line}
    assert [line["ended"] for line in ends.values()] == ["failed", "cut off", "died of SIGSEGV", "well"]
    assert [line["what"] for line in lines if "what" in line] == [
        *("before it fails", "before it hangs", "before it dies", "a check")
    ]
    assert "the reason why it fails" in ends["raises"]["log"] and "where_it_hangs" in ends["hangs"]["log"]
    [child] = [line["child"] for line in lines if "child" in line]
    assert not is_running(child)
    report = (tmp_path / "report.md").read_text()
    assert "| raises | failed |" in report and "| goes_well | well | 0." in report
    assert "* goes_well: a check: why a planted \\| fault" in report


def test_what_does_not_fit_into_the_time_is_left_out_and_what_was_found_before_stays(tmp_path: Path) -> None:
    assert planted(tmp_path, 60.0, "goes_well") == 1
    assert planted(tmp_path, 0.5, "goes_well", "raises") == 1
    ends = [(line["section"], line["ended"]) for line in lines_of(tmp_path) if "ended" in line]
    assert ends == [("goes_well", "well"), ("goes_well", "left out"), ("raises", "left out")]
    report = (tmp_path / "report.md").read_text()
    assert "| goes_well | well |" in report and "| raises | left out |" in report
    # A command that was cut off may leave half a line.
    with (tmp_path / gpu_first.RESULTS_FILE).open("a") as file:
        file.write('{"section": "goes_w')
    assert len(gpu_first.read(tmp_path / gpu_first.RESULTS_FILE)) == len(report and ends) + 1


def is_running(pid: int) -> bool:
    """Whether a process has not ended; who ended may wait for its parent to hear of it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def section(seconds: float) -> Section:
    return Section("any", seconds, goes_well, "")


def test_two_calls_of_all_sections_fit_into_a_quarter_of_an_hour() -> None:
    assert sum(section.seconds for section in SECTIONS.values()) <= gpu_first._SECONDS < 420
