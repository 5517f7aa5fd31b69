"""Tests that need not run while what they are about stays as it is: the site, browsers, clusters, published runs.

`@pytest.mark.subject("docs/**", "src/penstock/draw/**", ...)` names the files that a test is about, as patterns from
the root of the repository; its own file and what it imports of the tests are among them unnamed. `subjects.json` has a
digest of all of them for each file of such tests that has passed. While the digest is the same the tests are skipped,
as unchanged; `make pytest-whole` and `make subjects` run them in any case, and renew the record.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "subjects.json"
UNCHANGED = "unchanged since it passed"


def digest(file: Path, patterns: Iterable[str]) -> str:
    """A digest of a test's file, of the tests' own files that it needs, and of all files that match the patterns."""
    files = {path for pattern in patterns for path in _matching(pattern)}
    whole = hashlib.sha256()
    for path in sorted({*files, *_needed(file)}):
        whole.update(f"{path.relative_to(ROOT).as_posix()}\0{_of_file(path)}\n".encode())
    return whole.hexdigest()


def recorded() -> dict[str, str]:
    """Test's file -> the digest with which all its tests have passed."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def record(passed: dict[str, str]) -> None:
    """Note digests of files whose tests have passed; those of files that are gone are dropped."""
    known = {name: own for name, own in (recorded() | passed).items() if (ROOT / name).exists()}
    RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


@cache
def _matching(pattern: str) -> tuple[Path, ...]:
    found = [path for path in ROOT.glob(pattern) if path.is_file() and "__pycache__" not in path.parts]
    if not found:
        raise ValueError(f"no file is a test's subject by {pattern!r}")
    return tuple(found)


@cache
def _of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def _needed(file: Path) -> set[Path]:
    """The file, and all of the tests' files that it imports, directly or not."""
    found, left = set[Path](), [file]
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += _imported(path)
    return found


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            own = ROOT / (name.replace(".", "/") + ".py")
            if name.startswith("tests.") and own.exists():
                yield own
