"""Runs what needs a GPU, and writes a report that a person can send: machine, versions, tests, and ratios of speed.

    make test-gpu ARGS="--out report.md"

Exits 2 where no GPU is found, 1 when a test or a benchmark failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.cuda import nccl

ROOT = Path(__file__).parents[1]
BENCHMARK = "benchmarks.generate_gpu"
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv")


@dataclass(frozen=True)
class TestResult:
    """A test's name, its outcome (passed, failed or skipped), the seconds that it took, and why it did not pass."""

    __test__ = False

    name: str
    outcome: str
    duration_s: float
    reason: str = ""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run what needs a GPU, and write a report.")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"), help="the report's file")
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        print(
            f"no GPU is used here: torch {torch.__version__} finds no CUDA device; run this on a machine with one",
            file=sys.stderr,
        )
        return 2
    results, benchmark = run_tests(), run_benchmark()
    options.out.write_text(report(environment(), results, benchmark), encoding="utf-8")
    num_failed = sum(result.outcome == "failed" for result in results)
    print(f"{options.out}: {len(results)} tests, {num_failed} of them failed")
    return 1 if num_failed or not results or "error" in benchmark else 0


def environment() -> dict[str, str]:
    """The machine and all versions that matter."""
    doctor = _output([sys.executable, "-m", "penstock", "doctor", "--no-links", "--json"])
    machine = json.loads(doctor)["machine"] if doctor.startswith("{") else {"doctor": doctor}
    return {
        **{name: str(value) for name, value in machine.items()},
        "commit": _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, nccl.version())),
        "nvidia-smi": _output(NVIDIA_SMI),
    }


def run_tests() -> list[TestResult]:
    """Run the tests that are marked gpu."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={path}", str(ROOT / "tests")]
        subprocess.run(pytest, cwd=ROOT, check=False)
        return read_results(path.read_text(encoding="utf-8")) if path.exists() else []


def read_results(xml: str) -> list[TestResult]:
    """The tests of a file that pytest has written by --junitxml."""
    found = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        ends = [part for part in case if part.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not ends else "skipped" if ends[0].tag == "skipped" else "failed"
        reason = ends[0].get("message", "").splitlines() if ends else []
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append(TestResult(name, outcome, float(case.get("time", 0)), reason[0] if reason else ""))
    return found


def run_benchmark() -> dict[str, Any]:
    """What the benchmark on a GPU found, sides in turns within one run; its error where it failed."""
    ran = subprocess.run([sys.executable, "-m", BENCHMARK, "--json"], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        return {"error": (ran.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(ran.stdout)


def report(machine: Mapping[str, str], results: Sequence[TestResult], benchmark: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    counts = {
        outcome: sum(result.outcome == outcome for result in results) for outcome in ("passed", "failed", "skipped")
    }
    lines = ["# Penstock on a GPU", "", "## Machine", "", "```"]
    lines += [f"{name}: {value}" for name, value in machine.items()]
    lines += ["```", "", "## Tests", "", ", ".join(f"{number} {outcome}" for outcome, number in counts.items()), ""]
    lines += ["| test | outcome | s | reason |", "|---|---|---|---|"]
    lines += [
        f"| {one.name} | {one.outcome} | {one.duration_s:.1f} | {one.reason.replace('|', ' ')} |" for one in results
    ]
    lines += ["", f"## python -m {BENCHMARK}", "", "```json", json.dumps(benchmark, indent=2), "```", ""]
    return "\n".join(lines)


def _output(command: Sequence[str]) -> str:
    """What a command prints; why there is nothing, where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


if __name__ == "__main__":
    sys.exit(main())
