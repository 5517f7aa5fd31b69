"""Runs the tests on a loaded machine, with random delays in each thread of ours: no test may depend on speed.

    make test-loaded ARGS="--loops 4 --seed 1 tests/dist"

Busy loops run beside the tests. By `tools/delays/sitecustomize.py` threads wait at random where they hand something
over, and our own threads at every call of the package, in the processes that tests start, too. What fails here and
passes alone depends on speed, or shows a race.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# They end with this process, however that ends.
BUSY = [sys.executable, "-S", "-c", "import os; own = os.getppid()\nwhile os.getppid() == own: pass"]


def environ(seed: int, chance: float) -> dict[str, str]:
    """The variables under which threads wait at random."""
    paths = [str(ROOT / "tools" / "delays"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PENSTOCK_DELAYS": f"{seed}:{chance}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests beside busy loops, with random delays in our threads.")
    parser.add_argument("--loops", type=int, default=4, help="busy loops beside the tests")
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--chance", type=float, default=0.02, help="of a delay, wherever one is possible")
    options, words = parser.parse_known_args()
    loops = [subprocess.Popen(BUSY) for _ in range(options.loops)]
    try:
        command = [sys.executable, "-m", "pytest", "-n", "4", "--dist", "loadfile", "--timeout", "3600", *words]
        return subprocess.run(command, cwd=ROOT, env=environ(options.seed, options.chance), check=False).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
