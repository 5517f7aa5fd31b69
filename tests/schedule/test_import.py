"""The room stands on the standard library alone."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
before = set(sys.modules)
from penstock import schedule
schedule.verify(schedule.lower(schedule.build("1f1b", ranks=4, microbatches=8)))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
print(*sorted(name for name in sys.modules if name.startswith("penstock.settings.")))
"""


@pytest.mark.shows(1)
def test_schedule_imports_the_standard_library_alone_and_no_settings_of_models_and_runs():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=True)
    rooms, settings = done.stdout.splitlines()
    assert rooms.split() == ["penstock"]
    files = ("declare", "objects", "layout", "schedule")
    assert set(settings.split()) <= {f"penstock.settings.{file}" for file in files}
