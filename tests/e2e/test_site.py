"""The documentation site: it builds strictly, settings and public names are all in it."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.image import imread

from penstock.settings import SETTINGS
from tests.e2e.chromium import Chromium, contrast, find_chromium, served

pytestmark = pytest.mark.subject("docs/**/*", "mkdocs.yml", "README.md", "tools/*.py", "src/penstock/**/*.py")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout into a folder, by the command that `make docs` runs."""
    pytest.importorskip("mkdocs", reason="make setup installs it")
    (command,) = re.findall(r"-m (mkdocs .+)", (ROOT / "Makefile").read_text())
    return subprocess.run(
        [sys.executable, "-m", *command.split(), "--site-dir", str(folder)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_dead_links_and_pages_outside_the_navigation_fail_the_build(tmp_path: Path) -> None:
    for name in ("README.md", "examples", "src", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs" / "stray.md").write_text("[a page](nowhere.md) and [a place](start.md#no-such-place)\n")

    done = build(tmp_path / "site", tmp_path)
    assert done.returncode == 1 and "Aborted with 3 warnings" in done.stdout + done.stderr, done.stderr
    assert all(fault in done.stderr for fault in ('included in the "nav"', "'nowhere.md'", "'#no-such-place'"))


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
        assert (loaded or page.name == "step.html") and [address for address in loaded if "//" in address] == []
        paths = re.findall(rf'href="{re.escape(repository)}/blob/main/([^"#]+)"', text)
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("NO CHROMIUM FOUND: the site's layout was not tested; `apt-get install chromium`")
    started = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """A new address of the site, for which a browser has kept nothing."""
    with served(site) as started:
        yield started


# The page in the home page's frame, and what of its drawing is as it was before.
FRAME = "document.getElementById('step')"
CANVAS = f"{FRAME}.contentDocument.getElementById('body')"
THEME = f"{FRAME}.contentDocument.documentElement.dataset.theme"


def open_home(browser: Chromium, address: str, size: tuple[int, int], **preferred: str) -> None:
    browser.resize(*size)
    browser.prefer(**preferred)
    browser.open(f"{address}/index.html")
    wait(browser, f"{FRAME}.contentDocument?.documentElement.dataset.ready", "true")


def wait(browser: Chromium, expression: str, wanted: object) -> None:
    """Wait until an expression in the page has a value."""
    deadline = time.monotonic() + 30
    while (found := browser.evaluate(expression)) != wanted:
        assert time.monotonic() < deadline, (expression, found, browser.complaints)
        time.sleep(0.05)


@pytest.mark.shows(191)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_the_home_page_opens_with_a_whole_step_that_moves(
    site: Path, address: str, browser: Chromium, size: tuple[int, int], scheme: str
) -> None:
    open_home(browser, address, size, color_scheme=scheme)
    assert browser.complaints == []
    left, top, right, bottom = browser.evaluate(
        f"(box => [box.left, box.top, box.right, box.bottom])({FRAME}.getBoundingClientRect())"
    )
    assert left >= 0 and right <= size[0] and top > 0 and bottom <= size[1] and right - left > 0.75 * size[0] - 200
    wait(browser, THEME, scheme)
    # All ranks and the whole step: nothing is scrolled, and beyond both ends the canvas is empty.
    scroller = f"{FRAME}.contentDocument.getElementById('scroller')"
    assert browser.evaluate(f"{scroller}.scrollHeight - {scroller}.clientHeight") <= 1
    column = f"(x => {CANVAS}.getContext('2d').getImageData(x, 0, 1, {CANVAS}.height).data.some(Boolean))"
    width = browser.evaluate(f"{CANVAS}.width")
    drawn = [browser.evaluate(f"{column}({x})") for x in (0, round(0.03 * width), round(0.97 * width), width - 1)]
    assert drawn == [False, True, True, False]
    # It moves, within a second and without Python or another host.
    before = browser.evaluate(f"{CANVAS}.toDataURL()")
    wait(browser, f"{CANVAS}.toDataURL() === {json.dumps(before)}", False)
    asked = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked and "asked for" not in str(browser.complaints)
    assert asked and [name for name in asked if not name.startswith(address) or "playground" in name] == []
    # Of its own it weighs little, the theme's style and script aside.
    assert sum((site / name).stat().st_size for name in ("index.html", "step.html", "site.css")) < 140_000
    # Its control stops it; it and the link to the playground can be reached.
    browser.evaluate(f"{FRAME}.contentDocument.getElementById('play').click()")
    browser.settle()
    still = browser.evaluate(f"{CANVAS}.toDataURL()")
    time.sleep(0.3)
    assert browser.evaluate(f"{CANVAS}.toDataURL()") == still
    assert browser.evaluate("document.querySelector('.doors a').href").startswith(f"{address}/playground.html#")


@pytest.mark.shows(191)
def test_the_home_pages_step_follows_the_scheme_and_stands_still_where_motion_is_unwanted(
    address: str, browser: Chromium
) -> None:
    open_home(browser, address, (1280, 800), color_scheme="light", reduced_motion="reduce")
    told = f"{FRAME}.contentDocument.getElementById('status').textContent"
    assert browser.evaluate(told).startswith("Microbatch 0: ")
    still = browser.evaluate(f"{CANVAS}.toDataURL()")
    time.sleep(0.5)
    assert browser.evaluate(f"{CANVAS}.toDataURL()") == still
    browser.evaluate("document.querySelector('[title=Dark]').click()")
    wait(browser, THEME, "dark")
    browser.evaluate("document.querySelector('[title=Light]').click()")
    browser.prefer()


# Each text of a drawing with its colour, and that of what lies right under it.
INKS = """[...document.querySelectorAll('text')].map(text => {
    const box = text.getBoundingClientRect(), at = [box.left + box.width / 2, box.top + box.height / 2];
    const filled = one => one.getAttribute && !one.closest('text') && one.closest('g, path, rect, use') === one
        && one.tagName !== 'g' && getComputedStyle(one).fill.startsWith('rgb');
    const under = document.elementsFromPoint(...at).find(filled);
    return [text.textContent, getComputedStyle(text).fill, under ? getComputedStyle(under).fill : 'none'];
})"""
DRAWINGS = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.svg"))


@pytest.mark.shows(191)
@pytest.mark.parametrize("drawing", DRAWINGS)
def test_every_text_of_a_drawing_can_be_read_on_light_and_dark(browser: Chromium, drawing: str) -> None:
    browser.resize(1400, 1600)
    for scheme in ("light", "dark"):
        browser.prefer(color_scheme=scheme)
        browser.open(DOCS / drawing)
        inks = browser.evaluate(INKS)
        assert len(inks) > 10 and "none" not in [ground for _, _, ground in inks]
        grounds = [rgb_of(ground) for _, _, ground in inks]
        for (text, ink, _), ground in zip(inks, grounds, strict=True):
            # Numbers on the saturated boxes of a rank's actions need no more than large text.
            least = 3.0 if max(ground) - min(ground) > 60 else 4.5
            assert contrast(rgb_of(ink), ground) >= least, (scheme, text, ink, ground)
        corner = rgb_of(browser.evaluate("getComputedStyle(document.elementsFromPoint(9, 9)[0]).fill"))
        assert max(corner) < 60 if scheme == "dark" else min(corner) > 200, (scheme, corner)
    browser.prefer()


def rgb_of(colour: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.mark.shows(191)
@pytest.mark.parametrize("page", ["gallery", "how/lanes"])
def test_pictures_follow_the_scheme_of_their_page_whatever_the_system_prefers(
    address: str, browser: Chromium, tmp_path: Path, page: str
) -> None:
    browser.resize(1280, 900)
    for preferred, chosen in (("light", "Dark"), ("dark", "Light")):
        browser.prefer(color_scheme=preferred)
        browser.open(f"{address}/{page}.html")
        for scheme in (preferred, chosen.lower()):
            wait(browser, "document.body.dataset.mdColorScheme", {"light": "default", "dark": "slate"}[scheme])
            picture = "document.querySelector('p > a > img')"
            browser.evaluate(f"{picture}.scrollIntoView({{block: 'start'}}), scrollBy(0, -100), {picture}.decode()")
            browser.settle()
            browser.screenshot(tmp_path / "page.png")
            left, top = browser.evaluate(f"(box => [box.left, box.top])({picture}.getBoundingClientRect())")
            corner = imread(tmp_path / "page.png")[int(top) + 12, int(left) + 12, :3]
            assert (corner.mean() < 0.3) == (scheme == "dark"), (preferred, scheme, corner)
            browser.evaluate(f"document.querySelector('[title={chosen}]').click()")
        browser.evaluate("localStorage.clear()")
    browser.prefer()


@pytest.mark.shows(191)
def test_the_navigation_is_folded_but_for_the_section_of_the_page(site: Path, browser: Chromium) -> None:
    browser.resize(1280, 900)
    shown = (
        "[...document.querySelectorAll('.md-sidebar--primary .md-nav__item > .md-nav__link')]"
        ".filter(link => link.checkVisibility({visibilityProperty: true, opacityProperty: true}) && link.offsetHeight"
        " && link.getClientRects()[0].width && link.closest('nav').getBoundingClientRect().height > 1)"
        ".map(link => link.textContent.trim())"
    )
    browser.open(site / "index.html")
    folded = browser.evaluate(shown)
    assert folded[:2] == ["Home", "Start in five minutes"] and len(folded) <= 12, folded
    browser.open(site / "guides" / "memory.html")
    opened = browser.evaluate(shown)
    assert "Memory" in opened and "A first schedule" not in opened and "Promises" not in opened
    assert len(opened) > len(folded) + 5


@pytest.mark.shows(191)
def test_the_reference_begins_with_the_engine_and_its_verbs(site: Path) -> None:
    page = (site / "reference" / "penstock.html").read_text()
    places = re.findall(r'<h[23] id="penstock\.([\w.]+)"', page)
    assert places[0] == "Engine" and places.count("Engine") == 1
    verbs = page[page.index("Methods:") : page.index('id="penstock.Engine.generator"')]
    first = list(dict.fromkeys(re.findall(r'<code><a [^>]*href="#penstock\.Engine\.(\w+)"', verbs)))
    assert first[:6] == ["from_config", "from_layers", "from_hf", "train_batch", "evaluate", "forward"], first
    # Each method has its line, those that the engine inherits last.
    methods = [name for name in places if re.fullmatch(r"Engine\.\w+", name)]
    assert {f"Engine.{name}" for name in first} < set(methods) and first.index("state") > first.index("save")
