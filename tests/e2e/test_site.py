"""The documentation site: it builds strictly, settings and public names are all in it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.settings import SETTINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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
