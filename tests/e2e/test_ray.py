"""The example for Ray, on a local Ray: a worker is killed, and the run ends as one that lost none (make test-ray)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Ray of this process's own, which listens on the loopback alone and reports to nobody.
LOCAL_RAY = """
import runpy, sys, ray
ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(folder: Path, *words: str) -> dict[int, str]:
    """The losses that the example prints, by step."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", LOCAL_RAY, str(ROOT / "examples/ray_trainer.py"), "--folder", str(folder), *words]
    done = subprocess.run(command, env=environ, cwd=folder.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return {int(step): loss for step, loss in re.findall(r"step (\d+): (\d\.\d+) nats a byte", done.stdout)}


def test_without_ray_the_example_says_in_one_sentence_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")\n")
    command = [sys.executable, str(ROOT / "examples/ray_trainer.py"), "--help"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    said = "ray_trainer.py needs Ray (No module named 'ray'); install it by: pip install ray"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


@pytest.mark.shows(150)
def test_a_worker_that_ray_loses_costs_a_few_steps_and_changes_no_digit(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="make test-ray installs Ray")
    expected = losses(tmp_path / "whole", "--steps", "40")
    assert [*expected] == [10, 20, 30, 40]
    assert losses(tmp_path / "lost", "--steps", "40", "--lose-worker-after", "25") == expected
    assert (tmp_path / "lost" / "lost-a-worker").exists()
