"""Types fit, as pyright sees them: the whole tree at once, and only when a file of it or a package has changed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.subjects import ROOT


@pytest.mark.subject(
    *(f"{folder}/**/*.py" for folder in ("src", "tests", "tools", "benchmarks", "examples", "docs/playground")),
    "constraints.txt",
    "pyproject.toml",
)
def test_types_fit() -> None:
    command = [sys.executable, "-m", "pyright"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr
