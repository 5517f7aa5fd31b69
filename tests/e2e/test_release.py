"""What is released: archives that hold the package, work in an empty environment and state one version."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tools import release

import penstock

ROOT = Path(__file__).parents[2]
PACKAGE = {
    path.relative_to(ROOT / "src").as_posix()
    for path in (ROOT / "src/penstock").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    wheel, sdist = release.build(tmp_path_factory.mktemp("dist"))
    return wheel, sdist


@pytest.mark.shows(160)
def test_the_wheel_holds_the_package_and_nothing_else(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        names = {name for name in wheel.namelist() if not name.endswith("/")}
    assert {name for name in names if ".dist-info/" not in name} == PACKAGE
    assert len(PACKAGE) > 100 and any(name.endswith("LICENSE") for name in names)


@pytest.mark.shows(160)
def test_the_sdist_holds_all_that_the_wheel_was_built_from(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[1]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert {f"src/{name}" for name in PACKAGE} <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.shows(160)
def test_links_and_pictures_of_the_description_lead_from_anywhere_to_files_of_the_repository(
    archives: tuple[Path, Path],
) -> None:
    with zipfile.ZipFile(archives[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Version"] == penstock.__version__ and metadata["Requires-Python"] == ">=3.11"
    repository = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))["Repository"]
    text = metadata.get_payload(decode=True).decode()  # pyright: ignore
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    base = re.compile(rf"{re.escape(repository)}/(?:raw|blob)/v{re.escape(penstock.__version__)}/([^#]+)")
    paths = [match[1] for link in links if (match := base.match(link))]
    assert "docs/architecture.md" in paths and [path for path in paths if not (ROOT / path).exists()] == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures and all(f"{repository}/raw/" in picture for picture in pictures)


@pytest.mark.shows(160)
def test_the_wheel_answers_in_an_empty_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """What it depends on is lent by the present environment; `make release-check` installs that too."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, archives[0]], env=environ, timeout=300, check=True)
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    lent = sysconfig.get_path("purelib")

    def run(*words: object, code: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)  # pyright: ignore
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    command = environment / "bin/penstock"
    where = run(python, "-c", "import penstock.cli.main, sys; print(penstock.__file__, 'torch' in sys.modules)")
    assert where.split() == [str(packages / "penstock/__init__.py"), "False"]
    assert run(command, "--version").startswith(f"penstock {penstock.__version__}, no torch, Python 3.")
    assert "bubble       0.2727" in run(command, "schedule", "simulate", "1f1b")
    assert "drew zb-v" in run(command, "schedule", "show", "zb-v", "--output", "page.html")
    assert "llama3-8b" in run(command, "plan", "--model", "llama3", "--cluster", "h100", code=2)
    (packages / "lent.pth").write_text(lent)
    assert ", torch 2." in run(command, "--version")
    assert "bubble 27.27%" in run(command, "schedule", "show", "1f1b")


def test_one_version_stands_everywhere() -> None:
    assert release.version_of(ROOT) == penstock.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {penstock.__version__}\n" in citation
    (address,) = re.findall(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nrepository-code: {address}\n" in citation
    # Its date is the changelog's, and there is none before the release.
    version, changelog = re.escape(penstock.__version__), (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(rf"^## \[{version}\] - (.+)$", changelog, re.MULTILINE)
    assert re.findall(r"^date-released: (.+)$", citation, re.MULTILINE) == released


KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelog_keeps_its_form() -> None:
    headings = re.findall(r"^(##+) (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [words for level, words in headings if level == "##"]
    assert versions[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d)", words) for words in versions[1:]]
    dates = [match[1] for match in dated if match]
    assert len(dates) == len(versions) - 1 and dates == sorted(dates, reverse=True)
    assert {words for level, words in headings if level == "###"} <= KINDS


@pytest.mark.parametrize("target, wanted", [("demo", "'.[all]'"), ("test", "'.[dev]'"), ("bench", "'.[all]'")])
def test_make_installs_what_the_target_needs(target: str, wanted: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    made = subprocess.run(["make", "-n", target], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert set(re.findall(r"pip install .* --editable (\S+)", made.stdout)) == {wanted}
