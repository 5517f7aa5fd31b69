"""The playground in a headless Chromium and in plain Python: its answers are those of the command."""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docs.playground import answers

from penstock import schedule
from penstock.cli.main import main
from penstock.schedule import files
from tests.e2e.chromium import Chromium, find_chromium, served
from tests.schedule.hangs import waiting

pytestmark = pytest.mark.subject(
    "src/penstock/draw/**/*",
    "src/penstock/schedule/**/*.py",
    "src/penstock/settings/*.py",
    "src/penstock/io/*.py",
    "docs/playground*",
    "docs/playground/*",
    "tools/playground.py",
    "mkdocs.yml",
)

ROOT = Path(__file__).parents[2]
SIZE = {"ranks": 4, "microbatches": 8}
COSTS = {"backward_weight": "0.5", "transfer": "0.25", "microbatch_bytes": "1000"}
NOTE = "getComputedStyle(document.getElementById('own')).display"
TAB, ENTER, RIGHT = ("Tab", 9), ("Enter", 13, "\r"), ("ArrowRight", 39)


def flags(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def data_of(page: str) -> dict[str, Any]:
    """The data of a timeline's page: each rank's actions and its memory over time."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1]) | {"command": ""}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command of schedules in a folder of its own, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        main(["schedule", *words])
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, of which only the playground has a page."""
    pytest.importorskip("mkdocs", reason="make setup installs it")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from tools import playground

    pages, built = tmp_path_factory.mktemp("docs"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs" / "playground", pages / "playground")
    for name in ("playground.md", "site.css"):
        shutil.copy(ROOT / "docs" / name, pages)
    nav = [{"Playground": "playground.md"}]
    config = load_config(
        str(ROOT / "mkdocs.yml"), docs_dir=str(pages), site_dir=str(built), nav=nav, plugins=[], strict=False
    )
    build(config)
    try:
        playground.put_into(built)
    except OSError as error:
        pytest.skip(f"NO PYODIDE: the playground was not tested in Pyodide at all; {error}")
    return built


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served(site) as started:
        yield f"{started}/playground.html"


class Playground:
    """The page of the playground in a browser."""

    def __init__(self, browser: Chromium, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, **state: str) -> None:
        self.browser.open(self.address, "&".join(f"{name}={value}" for name, value in state.items()))
        self.wait()

    def wait(self, also: str = "true") -> None:
        """Wait until every change has its answer."""
        deadline = time.monotonic() + 120
        form = "document.querySelector('.playground')"
        while not self.browser.evaluate(f"{form}.dataset.ready === 'true' && {form}.ariaBusy !== 'true' && ({also})"):
            assert time.monotonic() < deadline, f"the playground does not answer: {self.browser.complaints}"
            time.sleep(0.02)

    def value(self, name: str) -> Any:
        return self.browser.evaluate(f"document.getElementById('{name}').value")

    def told(self, name: str) -> str:
        return self.browser.evaluate(f"document.getElementById('{name}').textContent")

    @property
    def figures(self) -> dict[str, str]:
        pairs = (
            "[...document.querySelectorAll('#figures div')].map(pair => [...pair.children].map(one => one.textContent))"
        )
        return dict(self.browser.evaluate(pairs))

    @property
    def frame(self) -> str | None:
        """The page in the frame, or None if the frame is not shown."""
        self.wait("document.getElementById('timeline').contentDocument.readyState === 'complete'")
        shown = "(frame => frame.hidden ? null : frame.contentDocument.documentElement.outerHTML)"
        return self.browser.evaluate(f"{shown}(document.getElementById('timeline'))")

    def click(self, selector: str) -> None:
        self.browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def focus(self, selector: str) -> None:
        """Go to a control with the Tab key alone."""
        for _ in range(60):
            if self.browser.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
            self.browser.press(*TAB)
        raise AssertionError(f"the Tab key never reaches {selector}")


@pytest.fixture(scope="module")
def browser(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("NO CHROMIUM FOUND: the playground was not tested in a browser; `apt-get install chromium`")
    started = Chromium(program, tmp_path_factory.mktemp("chromium"), (1280, 900))
    yield started
    started.close()


@pytest.fixture
def page(browser: Chromium, address: str) -> Iterator[Playground]:
    yield Playground(browser, address)
    # Neither an error nor a warning, nor a request to any other host.
    assert browser.complaints == []


# ---- in plain Python


@pytest.mark.parametrize("name", schedule.names())
def test_answers_are_those_of_the_command(name: str, command: Callable[..., str], tmp_path: Path) -> None:
    stages = schedule.default_stages(name)
    text = answers.build(name, {**SIZE, "stages_per_rank": stages}, {}, COSTS)
    found = answers.look_at(text, COSTS)

    assert f"  {'  '.join(found['proof'])}" == command("verify", "schedule.txt").partition("\n")[2].replace("\n", "")
    given = json.loads(command("simulate", name, *flags(SIZE), *flags(COSTS), "--json"))
    assert found["figures"] == {
        "bubble": f"{given['bubble_rate']:.4f}",
        "makespan": f"{given['makespan']:.6g}",
        "span": f"{given['span_cost']:.6g}",
        "peak live microbatches": " ".join(f"{live:.4g}" for live in given["peak_live_microbatches"]),
    }
    command("show", name, *flags(SIZE), *flags(COSTS), "--output", "page.html")
    assert data_of(found["timeline"]) == data_of((tmp_path / "page.html").read_text())


# ---- in a browser


@pytest.mark.shows(159)
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "auto"])
def test_a_schedule_built_by_fields(page: Playground, name: str, command: Callable[..., str], tmp_path: Path) -> None:
    page.open(schedule=name, ranks="4", microbatches="12", **COSTS)
    sizes = flags({"ranks": 4, "microbatches": 12})

    command("export", name, *sizes, "--output", "schedule.txt")
    if name != "auto":  # whose order follows the costs, which an export does not take
        assert page.value("text") == (tmp_path / "schedule.txt").read_text()
    (tmp_path / "schedule.txt").write_text(page.value("text"))
    proof = command("verify", "schedule.txt").splitlines()
    assert page.told("verdict") == f"Proved: {proof[1].strip()}"
    assert page.told("proof") == "".join(line.strip() for line in proof[2:])

    told = command("simulate", name, *sizes, *flags(COSTS))
    assert [page.figures[key] for key in ("makespan", "span", "bubble")] == [
        re.findall(rf"  {key} +(\S+)\n", told)[0] for key in ("makespan", "span", "bubble")
    ]
    peaks = re.findall(r"^ +\d+ +\S+ +(\S+)$", told, re.MULTILINE)
    assert len(peaks) == 4 and page.figures["peak live microbatches"] == " ".join(peaks)
    command("show", name, *sizes, *flags(COSTS), "--output", "page.html")
    assert page.frame is not None
    drawn = data_of(page.frame)
    assert drawn == data_of((tmp_path / "page.html").read_text())
    assert drawn["inBytes"] and all(rank["live"]["value"] for rank in drawn["layers"][0]["ranks"])
    assert page.told("command").removeprefix("$ penstock schedule ").split()[:2] == ["simulate", name]
    assert command(*page.told("command").removeprefix("$ penstock schedule ").split()) == told


@pytest.mark.shows(159)
@pytest.mark.shows(192)
@pytest.mark.parametrize(
    ("button", "fault", "place"),
    [
        ("button[data-to='']", "3REDUCE_GRAD waits for 3B7 or 3W7", "rank 3: 3F0 3B0"),
        ("button[data-from='0F7 0B0']", "deadlock", "0B0"),
        ("#looks_fine", "deadlock", "0SEND_F1"),
    ],
)
def test_a_broken_schedule_is_refused_in_the_words_of_the_command(
    page: Playground, button: str, fault: str, place: str, command: Callable[..., str], tmp_path: Path
) -> None:
    page.open()
    assert page.browser.evaluate(NOTE) == "none"
    page.click(button)
    page.wait()
    # The fields still show a builder, and say that it is not the text's.
    assert page.browser.evaluate(NOTE) == "block"

    text = page.value("text")
    path = tmp_path / ("schedule.txt" if text.startswith("penstock") else "schedule.csv")
    path.write_text(text)
    told = command("verify", path.name)
    assert fault in told and told == f"penstock: {page.told('verdict')}\n"
    assert page.figures == {} and page.told("proof") == "" == page.told("command")
    # What can be carried out is drawn, with what waits and for whom, as the command draws it.
    assert page.frame is not None
    command("show", path.name, "--output", "page.html")
    drawn = data_of(page.frame)
    assert drawn == data_of((tmp_path / "page.html").read_text())
    program = plan if isinstance(plan := files.read(path), schedule.Program) else schedule.lower(plan)
    told = {wait["rank"]: (wait["told"].split()[0], wait["awaited"]) for wait in drawn["layers"][0]["hang"]["waits"]}
    assert told == {rank: (str(action), peer) for rank, (action, _, peer) in waiting(program).items()}
    inside = "document.getElementById('timeline').contentDocument.getElementById('hang')"
    assert (
        page.browser.evaluate(f"{inside}.offsetHeight > 0 && {inside}.textContent")
        == (drawn["layers"][0]["hang"]["sentence"])
    )

    page.click("#place")
    chosen = "(text => text.value.slice(text.selectionStart, text.selectionEnd))(document.activeElement)"
    assert page.browser.evaluate(chosen).startswith(place)
    # Mended, it is proved again.
    page.browser.evaluate("document.getElementById('text').select()")
    page.browser.type(schedule.to_text(schedule.build("afab", ranks=2, microbatches=2)))
    page.wait()
    assert page.told("verdict").startswith("Proved: ") and page.frame is not None


@pytest.mark.shows(191)
@pytest.mark.parametrize("ranks", ["4", "32"])
def test_every_rank_and_the_whole_step_are_seen_whatever_was_seen_before(page: Playground, ranks: str) -> None:
    page.open(schedule="1f1b", ranks="2", microbatches="2")
    assert page.frame is not None
    zoom = "document.getElementById('timeline').contentDocument.getElementById('in').click()"
    page.browser.evaluate(zoom)
    for name, value in (("ranks", ranks), ("microbatches", "64")):
        page.browser.evaluate(f"document.getElementById('{name}').value = {value}, 0")
        event = "new Event('input', {bubbles: true})"
        page.browser.evaluate(f"document.getElementById('{name}').dispatchEvent({event})")
    page.wait()
    assert page.frame is not None
    frame = "document.getElementById('timeline').contentDocument"
    assert page.browser.evaluate(f"{frame}.querySelectorAll('#labels li').length") == int(ranks)
    below = f"(one => one.scrollHeight - one.clientHeight)({frame}.getElementById('scroller'))"
    assert page.browser.evaluate(below) <= 1
    assert "from=" not in page.browser.evaluate("document.getElementById('timeline').contentWindow.location.hash")


@pytest.mark.shows(159)
def test_a_link_brings_back_text_and_costs(page: Playground) -> None:
    page.open(**COSTS)
    page.browser.evaluate("document.getElementById('text').select()")
    text = schedule.to_text(schedule.build("afab", ranks=2, microbatches=3)).replace("afab", "mine, with é & #")
    page.browser.type(text)
    page.wait()
    figures, link = page.figures, page.browser.evaluate("location.href")
    assert "rank" not in link.partition("text=")[2] and figures["makespan"] == "10.5"

    def same() -> bool:
        costs = {name: page.value(name) for name in COSTS}
        return (page.value("text"), page.figures, costs) == (text, figures, COSTS)

    page.open(schedule="zb-v")
    assert not same()
    # In the page that is open already, then in a new one.
    page.browser.evaluate(f"location.href = {json.dumps(link)}")
    page.wait(f"document.getElementById('text').value === {json.dumps(text)}")
    page.wait()
    assert same()
    page.open(**dict(pair.split("=", 1) for pair in link.partition("#")[2].split("&")))
    assert same() and page.browser.evaluate("location.href") == link
    # What the fields build replaces the text; the way back brings it again.
    page.focus("#ranks")
    page.browser.type("3")
    page.wait("!document.getElementById('text').value.startsWith('mine')")
    assert page.value("text") != text
    page.browser.evaluate("history.back()")
    page.wait(f"document.getElementById('text').value === {json.dumps(text)}")
    page.wait()
    assert same()

    cut = link.partition("text=")[2][:40]
    page.open(text=cut)
    assert page.told("verdict").startswith("this link is damaged") and page.value("text") == ""
    # Its address stays as it was, and what is written next is looked at.
    assert cut in page.browser.evaluate("location.hash") and page.frame is None
    page.browser.evaluate("document.getElementById('text').select()")
    page.browser.type(text)
    page.wait()
    assert page.told("verdict").startswith("Proved: ")


@pytest.mark.shows(159)
def test_the_keyboard_is_enough(page: Playground) -> None:
    page.open()
    page.focus("#schedule")
    page.browser.type("zb-v")
    page.browser.press("z", 90, "z")
    page.wait("document.getElementById('schedule').value.startsWith('zb')")
    page.focus("#ranks")
    page.browser.type("6")
    page.focus("#ranks + input")
    page.browser.press(*RIGHT)
    page.wait("document.getElementById('ranks').value === '7'")
    page.wait()
    assert "7 ranks" in page.told("verdict") and page.value("text").startswith("penstock schedule 1\nname: zb")
    page.focus("#transfer")
    page.browser.type("0.5")
    page.wait()
    assert "transfer=0.5" in page.browser.evaluate("location.hash")
    assert page.figures["bubble"] != "0.0000"

    page.focus("#timeline")
    page.browser.press(*TAB)  # to the first control in the frame
    inside = "document.getElementById('timeline').contentDocument"
    for _ in range(20):
        if page.browser.evaluate(f"{inside}.activeElement.id === 'chart'"):
            break
        page.browser.press(*TAB)
    page.browser.press(*RIGHT)
    page.browser.press(*ENTER)
    assert page.browser.evaluate(f"{inside}.getElementById('microbatch').value") == "0"

    page.focus("#text")
    page.focus("button[data-from='0F7 0B0']")
    page.browser.press(*ENTER)
    page.wait("document.querySelector('.playground').dataset.verdict === 'refused'")
    assert "deadlock" in page.told("verdict")
    # A reader of screens hears the verdict, and a name for every control.
    assert page.browser.evaluate("document.getElementById('verdict').role") == "status"
    tree = page.browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("textbox", "combobox", "spinbutton", "slider", "checkbox", "button", "Iframe")
    named = [(node["role"]["value"], node["name"]["value"]) for node in tree if node["role"]["value"] in roles]
    assert len(named) > 15 and [role for role, name in named if not name.strip()] == []


@pytest.mark.shows(159)
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_follows_the_scheme_of_the_site(page: Playground, width: int) -> None:
    page.browser.resize(width, 900)
    page.open(schedule="interleaved", ranks="8", microbatches="32")
    assert page.browser.evaluate("document.documentElement.scrollWidth") <= width
    theme = "document.getElementById('timeline').contentDocument.documentElement.dataset.theme"
    for scheme in ("dark", "light"):
        page.click(f"[data-md-color-media='(prefers-color-scheme: {scheme})']")
        page.wait(f"{theme} === '{scheme}'")


@pytest.mark.shows(159)
def test_what_takes_long_can_be_stopped(page: Playground) -> None:
    page.open(ranks="64")

    def begin() -> None:
        page.browser.evaluate("document.getElementById('microbatches').select()")
        page.browser.type("20000")
        deadline = time.monotonic() + 120
        while page.browser.evaluate("document.getElementById('stop').hidden"):
            assert time.monotonic() < deadline, "what takes long offers no way to stop it"
            time.sleep(0.02)
        assert page.told("verdict") == "Computing …"

    begin()
    page.click("#stop")
    page.wait()
    assert page.told("verdict") == "stopped; change something to begin again"
    # Any change stops it too.
    begin()
    page.browser.evaluate("document.getElementById('microbatches').select()")
    page.browser.type("8")
    page.wait()
    assert page.told("verdict").startswith("Proved: ") and page.value("microbatches") == "8"
