"""`make dist`: wheel and sdist in dist/, with a README whose links and pictures also lead somewhere from elsewhere.

In the repository they are relative, so that each copy and branch has its own.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All that a wheel is built from.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
_BUILD = "import sys; from setuptools import build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose relative links lead to the version's files in the repository, pictures to their bytes."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        return f"{picture}[{words}]({repository}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return _LINK.sub(absolute, text)


def version_of(root: Path) -> str:
    """The version that the package states, without importing it."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (root / "src/penstock/__init__.py").read_text(), re.MULTILINE)
    return found


def build(destination: Path) -> list[Path]:
    """Build the sdist, and from what it holds the wheel; returns both.

    Raises: subprocess.CalledProcessError if the backend fails.
    """
    destination.mkdir(exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / name, tree)
        readme = tree / "README.md"
        readme.write_text(absolute_links(readme.read_text(), project["urls"]["Repository"], version_of(ROOT)))
        sdist = _backend("build_sdist", tree, destination)
        shutil.unpack_archive(sdist, folder, filter="data")
        wheel = _backend("build_wheel", Path(folder, sdist.name.removesuffix(".tar.gz")), destination)
    return [wheel, sdist]


def _backend(hook: str, tree: Path, destination: Path) -> Path:
    command = [sys.executable, "-c", _BUILD, hook, str(destination.absolute())]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return destination / done.stdout.splitlines()[-1]


def main() -> int:
    for path in build(ROOT / "dist"):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
