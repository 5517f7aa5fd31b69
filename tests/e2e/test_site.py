"""The documentation site: tutorials run as they stand, it builds strictly, settings and public names are all in it."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tools import site_pages

from penstock.cli.main import main
from penstock.settings import SETTINGS
from tests.e2e.scripts import run_ranks_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
RUN = re.compile(r"^```(python|console)$", re.MULTILINE)
# Guides also show settings and commands for big machines, which no test can run: in blocks of these kinds.
EXPLAINING = sorted(
    page for folder in ("guides", "how") for page in (DOCS / folder).glob("*.md") if RUN.search(page.read_text())
)
SHOWN_ALONE = ("sh", "toml")
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def commands_of(block: str) -> Iterator[tuple[list[str], str]]:
    """Each command that a console block shows, with what it shows it to print."""
    for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield shlex.split(command), output


def run_command(words: list[str], read: Callable[[], str]) -> str:
    """What a command of a tutorial prints, run in this process, or as the ranks that torchrun would start."""
    program, *arguments = words
    if program == "penstock":
        main(arguments)
        return read()
    assert program == "torchrun" and arguments[0] == "--nproc-per-node", words
    return run_ranks_of(Path(arguments[2]).absolute(), int(arguments[1]))


@pytest.mark.parametrize("page", [*TUTORIALS, *EXPLAINING], ids=lambda page: page.stem)
def test_every_block_of_a_page_runs_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, object] = {}
    (tmp_path / "docs").mkdir()
    shutil.copy(DOCS / "timeline.json", tmp_path / "docs")
    blocks = BLOCK.findall(site_pages.with_files(page.read_text()))
    if page in EXPLAINING:
        blocks = [block for block in blocks if block[0] not in SHOWN_ALONE]
    num_compared, printed = 0, ""

    def read() -> str:
        shown = capsys.readouterr()
        return shown.out + shown.err

    for language, title, text in blocks:
        if language != "text":
            assert printed == "", "what a block prints stands below it"
        if title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            exec(compile(text, page.name, "exec"), names)
            printed = read()
        elif language == "console":
            for words, shown in commands_of(text):
                assert run_command(words, read) == shown, words
                num_compared += 1
        else:
            assert language == "text" and printed == text
            num_compared, printed = num_compared + 1, ""
    assert printed == "" and num_compared >= 1


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make setup installs it")
    folder = tmp_path_factory.mktemp("site")
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.shows(158)
@pytest.mark.parametrize("package", ["penstock", "penstock.schedule"])
def test_every_public_name_has_its_place(site: Path, package: str) -> None:
    text = (site / "reference" / f"{package.rpartition('.')[2]}.html").read_text()
    names = [name for name in importlib.import_module(package).__all__ if not name.startswith("__")]
    assert len(names) > 30
    assert [name for name in names if f'id="{package}.{name}"' not in text] == []


@pytest.mark.shows(158)
def test_every_setting_is_in_the_table_of_its_declarations(site: Path) -> None:
    text = (site / "settings.html").read_text()
    assert [name for name in SETTINGS if f">{name.rpartition('.')[2]}</code>" not in text] == []
    assert "Width of the residual stream." in text


def test_signatures_have_types_and_plain_defaults_and_enums_their_values(site: Path) -> None:
    text = re.sub("<[^>]+>", "", (site / "reference" / "penstock.html").read_text())
    assert re.search(r"packing: PackingKind = WINDOW,", text) and "Values: RING, ALL_TO_ALL" in text
    assert re.findall(r"(?:setting|same_as)\(", text) == []


def test_promises_keep_their_numbers(site: Path) -> None:
    text, shown = (site / "promises.html").read_text(), []
    for start, items in re.findall(r'<ol(?: start="(\d+)")?>(.*?)</ol>', text, re.DOTALL):
        shown += range(first := int(start or 1), first + items.count("<li>"))
    given = re.findall(r"^(\d+)\. ", (DOCS / "promises.md").read_text(), re.MULTILINE)
    assert len(given) > 100 and shown == list(map(int, given))


@pytest.mark.shows(158)
def test_nothing_is_asked_of_another_host_and_links_out_lead_to_the_repository(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    (repository,) = re.findall(r"^repo_url: (.+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert f'Repository = "{repository}"' in (ROOT / "pyproject.toml").read_text()
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="([^"]+)"', text)
        assert loaded and [address for address in loaded if "//" in address] == []
        paths = re.findall(rf'href="{re.escape(repository)}/blob/main/([^"#]+)"', text)
        assert [path for path in paths if not (ROOT / path).exists()] == []
