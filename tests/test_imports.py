"""Holds every import of the package to the table of rooms, and the torch-free rooms to the standard library."""

import ast
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.cli.main import LIBRARIES
from tests import package_source
from tests.package_source import FILES, PACKAGE, imports_of, names_of, room_of

# A room may import itself and what stands beside it here; all else is an error. One way only: no cycles.
MAY_IMPORT = {
    "io": set(),
    "settings": {"io"},
    "schedule": {"settings", "io"},
    "planner": {"schedule", "settings", "io"},
    "draw": {"schedule", "settings", "io"},
    "model": {"parallel", "schedule", "settings", "io"},
    "parallel": {"schedule", "settings", "io"},
    "data": {"schedule", "settings", "io"},
    "runtime": {"model", "parallel", "data", "schedule", "settings", "io"},
    "engine": {"runtime", "model", "parallel", "data", "schedule", "settings", "io"},
    "serve": {"engine", "runtime", "model", "parallel", "data", "schedule", "settings", "io"},
    "cli": {
        "serve",
        "engine",
        "runtime",
        "model",
        "parallel",
        "data",
        "draw",
        "planner",
        "schedule",
        "settings",
        "io",
    },
}
# What exists for one kind of device, and who may import it: the places that choose, never the layers.
DEVICE_ROOMS = {
    "model/cpu": {
        "model/decoder.py",
        "model/devices.py",
        "runtime/decode/decoders.py",
        "runtime/offload.py",
        "engine/build.py",
        "engine/pipeline.py",
        "engine/quantization.py",
        "engine/folders/export.py",
        "cli/models/session.py",
    },
    "model/cuda": {"model/devices.py"},
}
STANDARD_LIBRARY_ONLY = ("io", "settings", "schedule", "planner")


def test_every_room_stands_in_the_table():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert "schedule" in rooms
    assert rooms <= set(MAY_IMPORT), f"rooms without a line in the import table: {sorted(rooms - set(MAY_IMPORT))}"


def test_the_table_goes_one_way():
    for room, others in MAY_IMPORT.items():
        for other in others:
            assert room not in MAY_IMPORT[other], f"{room} and {other} may import each other"
            assert MAY_IMPORT[other] <= others, f"{room} may import {other} but not all that {other} stands on"


def test_imports_follow_the_table():
    assert FILES
    wrong = []
    for path in FILES:
        room = room_of(path)
        allowed = MAY_IMPORT[room] | {room}
        for line, name in imports_of(path):
            top, _, rest = name.partition(".")
            if top == "penstock" and rest.partition(".")[0] not in allowed | {"__version__"}:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {name}; {room} may import {sorted(allowed)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", DEVICE_ROOMS)
def test_a_device_has_its_own_room(room: str):
    imported = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for _, name in imports_of(path)
        if name.startswith(f"penstock.{room.replace('/', '.')}.") and not path.is_relative_to(PACKAGE / room)
    }
    assert imported == DEVICE_ROOMS[room]


@pytest.mark.parametrize(
    "source",
    [
        "import penstock.engine.engine",
        "from penstock.engine import engine",
        "def late():\n    from ..engine import engine",
        "import importlib\nimportlib.import_module('penstock.engine.engine')",
        "from importlib import import_module\nimport_module(name='penstock.engine.engine')",
        "__import__('penstock.engine.engine')",
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(package_source, "tree_of", lambda path: ast.parse(source))
    assert "penstock.engine.engine" in {name for _, name in package_source._imports(PACKAGE / "model" / "planted.py")}


def test_torch_free_rooms_import_the_standard_library_alone():
    files = [path for path in FILES if room_of(path) in STANDARD_LIBRARY_ONLY]
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name}"
        for path in files
        for line, name in imports_of(path)
        if name.partition(".")[0] not in sys.stdlib_module_names | {"penstock"}
    ]
    assert not wrong, "\n".join(wrong)


IMPORT_ALL_OF = """
import importlib, pkgutil, sys

class NothingInstalled:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "penstock" and top not in sys.stdlib_module_names:
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, NothingInstalled())
for banned in ("torch", "numpy", "rich"):
    try:
        importlib.import_module(banned)
    except ImportError:
        continue
    sys.exit(f"{banned} could be imported: this shows nothing")

room = importlib.import_module(sys.argv[1])
modules = [module.name for module in pkgutil.walk_packages(room.__path__, room.__name__ + ".")]
for name in modules:
    importlib.import_module(name)
print(len(modules))
"""


@pytest.mark.shows(1)
@pytest.mark.parametrize("room", [room for room in STANDARD_LIBRARY_ONLY if (PACKAGE / room).is_dir()])
def test_torch_free_rooms_import_where_nothing_is_installed(room: str):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_OF, f"penstock.{room}"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


def test_every_library_is_named_in_a_sentence_where_it_is_missing():
    found = {name.partition(".")[0] for path in FILES for _, name in imports_of(path)}
    assert found - sys.stdlib_module_names - {"penstock"} <= LIBRARIES


WITHOUT = """
import importlib, sys

import torch, torch.utils.flop_counter

for name in sys.argv[1].split():
    assert name not in sys.modules
    sys.modules[name] = None
for name in sys.argv[2].split():
    importlib.import_module(name)
"""


def test_modules_import_without_what_few_of_their_functions_need():
    kept = {"torch", "numpy", "safetensors"}
    # These two rooms exist for their libraries; they are imported by the commands that draw and serve.
    own = [path for path in FILES if room_of(path) not in ("draw", "serve")]
    places = [path.parent if path.name == "__init__.py" else path.with_suffix("") for path in own]
    modules = [".".join(place.relative_to(PACKAGE.parent).parts) for place in places]
    arguments = [" ".join(LIBRARIES - kept), " ".join(modules)]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


TORCH_NAMES = Path(__file__).with_name("torch_names.txt")
_PLAIN = {"torch", "torch.cuda", "torch.distributed", "torch.nn", "torch.nn.functional"}


def new_or_private(name: str) -> str | None:
    """What of a name another release may lack, up to its class; None for one of the places that stay as they are."""
    parts = name.split(".")
    of_class = [place for place, part in enumerate(parts) if part[0].isupper() and part != "_C"]
    place = ".".join(parts[: of_class[0]] if of_class else parts[:-1])
    private = [n for n, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
    if place in _PLAIN and not private:
        return None
    return ".".join(parts[: max([of_class[0] if of_class else len(parts), *private]) + 1])


def test_names_of_torch_are_those_of_the_lowest_release():
    used = {name for path in FILES for name in map(new_or_private, names_of(path, "torch")) if name is not None}
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    recorded = set(TORCH_NAMES.read_text().split())
    assert used - recorded == set(), (
        f"not in {TORCH_NAMES.name}: if the lowest release of torch that pyproject.toml allows has it, as `make "
        "test-oldest ARGS=tests/test_imports.py` shows, write it down there; else look for it before you use it"
    )


def test_the_lowest_release_of_torch_has_the_names():
    lowest = re.search(r'"torch>=([\d.]+)', Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    assert lowest is not None
    if not version("torch").startswith(lowest[1]):
        pytest.skip(f"this is torch {version('torch')}; make test-oldest installs {lowest[1]}")
    for name in TORCH_NAMES.read_text().split():
        parts = name.split(".")
        modules = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        for module in modules:
            try:
                found = import_module(module)
            except ModuleNotFoundError:
                continue
            reduce(getattr, parts[module.count(".") + 1 :], found)
            break


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["schedule", "list"]])
def test_quick_commands_load_nothing_heavy(arguments: list[str]):
    probe = (
        "import sys; from penstock.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sorted({'torch', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr.strip()


def test_public_names_come_from_their_rooms():
    import penstock

    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = penstock.nonsense  # pyright: ignore[reportAttributeAccessIssue]
