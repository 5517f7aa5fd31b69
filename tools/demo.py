"""`make demo`: train the example on two processes, stop it half-way, resume it, and let the model write some Python.

The run goes into a new folder under runs/, so that no earlier one is touched.
"""

import subprocess
import sys
import time
import tomllib
from itertools import count
from pathlib import Path

from penstock.engine.folders.runs import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = Path("examples/tiny.toml")
PROMPTS = ["class Reader(", "def read(self", "import os"]
PENSTOCK = Path(sys.executable).with_name("penstock")


def train(folder: Path) -> list[str]:
    return [str(PENSTOCK), "train", str(EXAMPLE), "--output", str(folder)]


def generate(folder: Path) -> list[str]:
    """Samples from the trained model, over the same two stages."""
    sampling = ["--max-new-tokens", "80", "--temperature", "0.6", "--top-p", "0.9", "--seed", "1"]
    return [str(PENSTOCK), "generate", str(folder), *PROMPTS, "--pp", "2", *sampling]


def next_steps(folder: Path) -> list[tuple[str, str]]:
    """Commands to go on with, each with what it does."""
    return [
        (f"penstock trace {folder} --output step.html", "one step as it was measured, over the same step simulated"),
        (f'penstock generate {folder} "import" --samples 3 --temperature 0.9', "more of what the model writes"),
        (f"penstock convert {folder} model", "a folder for Hugging Face's transformers"),
        ("penstock schedule compare --ranks 8 --microbatches 32", "all schedules side by side"),
        ("penstock train examples/experts.toml --dry-run", "a model with experts, and how it would be cut"),
    ]


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m\n" if sys.stdout.isatty() else f"\n{text}\n", flush=True)


def last_step(folder: Path) -> int:
    """The last step that the run has told of; 0 before the first."""
    return max((entry["step"] for entry in read_metrics(ROOT / folder / METRICS_FILE)), default=0)


def run_until(folder: Path, step: int) -> int | None:
    """Train until a step is told of, then ask the run to stop.

    Returns: None once it has stopped, or its exit code if it ended before that step.
    """
    process = subprocess.Popen(train(folder), cwd=ROOT)
    try:
        while process.poll() is None:
            if last_step(folder) >= step:
                process.terminate()
                process.wait()
                return None
            time.sleep(0.2)
        return process.returncode
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def main() -> int:
    half = tomllib.loads((ROOT / EXAMPLE).read_text())["train"]["steps"] // 2
    names = ("demo" if number == 1 else f"demo-{number}" for number in count(1))
    folder = next(Path("runs") / name for name in names if not (ROOT / "runs" / name).exists())
    say(f"1. Train {EXAMPLE} into {folder}, and stop it after step {half}")
    code = run_until(folder, half)
    if code is not None:
        print(f"the run ended with exit code {code} before it could be stopped", file=sys.stderr)
        return code or 1
    stopped_at = last_step(folder)
    say(f"2. Stopped after step {stopped_at}. The same command resumes it from its newest checkpoint")
    code = subprocess.run(train(folder), cwd=ROOT, check=False).returncode
    if code == 0:
        say("3. What the model writes by now")
        code = subprocess.run(generate(folder), cwd=ROOT, check=False).returncode
    if code == 0:
        say(f"{folder}/timeline.png shows one step as it was measured, under the same step simulated. To try next:")
        shown = PENSTOCK.parent.relative_to(ROOT) if PENSTOCK.is_relative_to(ROOT) else PENSTOCK.parent
        for command, what in next_steps(folder):
            print(f"  {shown}/{command}\n      {what}")
        print("\ndocs/start.md goes on from here.")
    return code


if __name__ == "__main__":
    sys.exit(main())
