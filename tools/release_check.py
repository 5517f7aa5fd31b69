"""`make release-check`: installs wheel and sdist of dist/ into new environments, and uses them as somebody would.

Without arguments it does so with the interpreter that runs it; ARGS="python3.12 python3.13" names others.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPUS = "def add(first, second):\n    return first + second\n\n\n" * 400
TRAIN = {
    "model.hidden_size": 32,
    "model.intermediate_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "data.corpus": "corpus.txt",
    "data.sequence_length": 32,
    "parallel.pp": 2,
    "train.steps": 3,
    "model.max_length": 128,
    "output": "run",
}
# A command of every room, and what it prints; each needs files that are no modules, or processes of its own.
COMMANDS = (
    (["--version"], "penstock "),
    (["schedule", "show", "1f1b"], "bubble 27.27%"),
    (["schedule", "show", "zb-v", "--output", "zb-v.html"], "drew zb-v"),
    (["schedule", "show", "zb-v", "--output", "zb-v.png"], "drew zb-v"),
    (["plan", "--model", "llama3-8b", "--cluster", "h100", "--sequences", "64", "--effort", "0.1"], "pp"),
    (["train", *(word for name, value in TRAIN.items() for word in (f"--{name}", str(value)))], "done after step 3"),
    (["generate", "run", "def add(", "--max-new-tokens", "8", "--pp", "2"], ""),
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    wheel, sdist = (_newest(pattern) for pattern in ("*.whl", "*.tar.gz"))
    for python in parser.parse_args(arguments).pythons:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.monotonic()
            environment = Path(folder, "environment")
            _run([python, "-m", "venv", environment], Path(folder))
            _install(environment, wheel)
            version = _run([environment / "bin/python", "--version"], Path(folder)).strip()
            print(f"{version}: {wheel.name} installed in {time.monotonic() - begin:.0f} s", flush=True)
            _use(environment, Path(folder, "with-wheel"))
            _install(environment, sdist, "--no-deps", "--force-reinstall")
            _use(environment, Path(folder, "with-sdist"))
            print(f"{version}: {len(COMMANDS)} commands with {wheel.name} and with {sdist.name} as they should be")
    return 0


def _newest(pattern: str) -> Path:
    return max((ROOT / "dist").glob(pattern), key=lambda path: path.stat().st_mtime)


def _install(environment: Path, archive: Path, *options: str) -> None:
    install = [environment / "bin/python", "-m", "pip", "install", "--quiet"]
    _run([*install, *options, "--constraint", ROOT / "constraints.txt", archive], environment)


def _use(environment: Path, folder: Path) -> None:
    """Run every command in a new folder. Raises: SystemExit if one fails, or prints something else."""
    folder.mkdir()
    (folder / "corpus.txt").write_text(CORPUS)
    for words, wanted in COMMANDS:
        printed = _run([environment / "bin/penstock", *words], folder)
        if wanted not in printed:
            sys.exit(f"penstock {' '.join(words)} printed no {wanted!r} but:\n{printed}")


def _run(command: list[str | Path], folder: Path) -> str:
    """Run a command without what this checkout would lend it. Raises: SystemExit with its output if it fails."""
    lent = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    environ = {name: value for name, value in os.environ.items() if name not in lent}
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
