"""The page in a headless Chromium: what is drawn is the timeline, and its controls do what they say."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from penstock import schedule
from penstock.draw.layers import KIND_OF, Kind, Layer, drawn_length
from penstock.draw.page import write_page
from penstock.schedule import Action, Costs, Event, Timeline
from penstock.schedule.actions import COMPUTE, parts
from penstock.schedule.recording import Wait
from tests.e2e.chromium import Chromium, find_chromium
from tests.schedule.hangs import HANGS, carried_out, hang_of, waiting

pytestmark = pytest.mark.subject(
    "src/penstock/draw/**/*", "src/penstock/schedule/**/*.py", "src/penstock/cli/schedule.py"
)

RANKS, MICROBATCHES = 4, 8
COMMAND = "penstock schedule show 1f1b --ranks 4 --microbatches 8 --output page.html"
Picture = np.ndarray


def simulated(ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    return schedule.simulate(schedule.lower(schedule.build("1f1b", ranks=ranks, microbatches=microbatches)), costs)


TIMELINE = simulated(RANKS, MICROBATCHES)
# The same step a tenth slower, with the idle times known to be waits for the rank before.
MEASURED = Timeline.from_events(
    [[Event(event.action, 1.1 * event.start, 1.1 * event.end) for event in own] for own in TIMELINE.events],
    title="1f1b, 4 ranks, measured in step 5",
)
WAITS = ((),) + tuple((Wait(rank - 1, 0.0, 1.1 * TIMELINE.events[rank][0].start),) for rank in range(1, RANKS))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("NO CHROMIUM FOUND: the HTML page was not tested at all; `apt-get install chromium`, then again")
    started = Chromium(program, tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


Open = Callable[..., "Page"]


@pytest.fixture
def show(browser: Chromium, tmp_path: Path) -> Open:
    """Write a page of the given layers and open it."""

    def write_and_open(*layers: Layer, fragment: str = "", **more: Any) -> Page:
        path = tmp_path / "page.html"
        write_page(path, layers or [Layer.simulated(TIMELINE)], command=COMMAND, **more)
        browser.open(path, fragment)
        return Page(browser, tmp_path / "shot.png")

    return write_and_open


class Page:
    """An open page, and where on it a time and a rank are; a place is (x, y) in pixels."""

    def __init__(self, browser: Chromium, shot: Path) -> None:
        self.browser, self.shot = browser, shot
        assert self.evaluate("document.documentElement.dataset.ready") == "true"

    def evaluate(self, expression: str) -> Any:
        return self.browser.evaluate(expression)

    def picture(self) -> Picture:
        """The page as it looks now: [height, width, 3], 0 to 255."""
        self.browser.settle()
        self.browser.screenshot(self.shot)
        return np.rint(255 * matplotlib.image.imread(self.shot)[:, :, :3]).astype(int)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element."""
        found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return tuple(self.evaluate(f"(b => [b.left, b.top, b.width, b.height])({found})"))

    def corners(self, selector: str) -> tuple[tuple[float, float], tuple[float, float]]:
        """An element's (top, left) and (height, width), as they cut it out of a picture."""
        left, top, width, height = self.box(selector)
        return (top, left), (height, width)

    def time(self, x: float) -> float:
        left, _, width, _ = self.box("#body")
        start, end = self.seen()
        return start + (x - left) / width * (end - start)

    def seen(self) -> tuple[float, float]:
        """The stretch of time that is seen."""
        return tuple(self.evaluate("[state.from, state.to]"))

    def x(self, time: float) -> int:
        left, _, width, _ = self.box("#body")
        start, end = self.seen()
        return int(left + width * (time - start) / (end - start))

    def y(self, rank: int, layer: int = 0, part: float = 0.25) -> int:
        """A place in a rank's row: a part of the height of a layer's bar."""
        _, top, _, _ = self.box(f"#labels li:nth-child({rank + 1})")
        bar = self.evaluate(f"[rows.bars[{layer}].top, rows.bars[{layer}].height]")
        return int(top + bar[0] + part * bar[1])

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def complaints(self) -> list[str]:
        self.browser.settle()
        return self.browser.complaints


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def colour_of(action: Action) -> tuple[int, ...]:
    return rgb(KIND_OF[action.op].colour)


def boxes(timeline: Timeline, microbatch: int | None = None) -> Iterator[tuple[int, Event, Action]]:
    """Rank, event and its (first) action, of those that take time; of one microbatch or of all."""
    for rank, events in enumerate(timeline.events):
        for event in events:
            action = parts(event.action)[0]
            if event.end > event.start and microbatch in (None, action.microbatch):
                yield rank, event, action


def at(picture: Picture, page: Page, time: float, rank: int, **more: Any) -> tuple[int, ...]:
    return tuple(picture[page.y(rank, **more), page.x(time)])


def test_all_of_it_is_there_and_has_its_size(show: Open):
    page = show()
    assert page.complaints() == []
    assert page.text("h1") == TIMELINE.title
    assert page.text(".command") == COMMAND
    _, _, width, height = page.box("#body")
    assert width > 1000
    assert height > 60 * RANKS
    labels = page.text("#labels")
    idle = [f"{own / TIMELINE.makespan:.0%} idle" for own in TIMELINE.idle]
    assert [labels.count(f"rank {rank}") for rank in range(RANKS)] == [1] * RANKS
    assert labels.count(idle[0]) == idle.count(idle[0]) == RANKS
    assert [f"peak {peak:.0f} live" in labels for peak in TIMELINE.peak_live_microbatches] == [True] * RANKS
    figures = page.text("#figures")
    for figure in ("makespan", "33", "bubble", "27.27%", "idle, all ranks", f"{sum(TIMELINE.idle):.0f}", "27%"):
        assert figure in figures
    assert page.text("#legend").split() == ["F", "forward", "B", "backward", "idle", "live", "microbatches"]
    for selector in ("#overview", "#labels li", "#legend i", "#microbatch", "#in", "#out", "#fit", "#theme", "#help"):
        assert min(page.box(selector)[2:]) >= 12, selector
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_each_action_is_drawn_at_its_time_in_its_colour_and_idle_time_is_seen(show: Open):
    page = show()
    picture = page.picture()
    drawn = list(boxes(TIMELINE))
    assert len(drawn) == 2 * RANKS * MICROBATCHES
    for rank, event, action in drawn:
        for time in (event.start + 0.1, event.end - 0.1):
            assert at(picture, page, time, rank) == colour_of(action), (rank, str(action))
    idle = rgb(Kind.IDLE.colour)
    for rank, events in enumerate(TIMELINE.events):
        steps = [event for event in events if event.end > event.start]
        gaps = [(a.end, b.start) for a, b in pairwise(steps) if b.start > a.end]
        assert gaps or rank == RANKS - 1
        for start, end in gaps:
            assert at(picture, page, (start + end) / 2, rank) == idle


def test_following_a_microbatch_leaves_only_its_way_in_full_colour(show: Open):
    page = show()
    before = page.picture()
    _, event, _ = next(b for b in boxes(TIMELINE, 2) if b[0] == 1)
    page.browser.click(page.x((event.start + event.end) / 2), page.y(1))
    page.browser.mouse("mouseMoved", 5, 5)
    followed = page.picture()
    for rank, event, action in boxes(TIMELINE):
        drawn = at(followed, page, event.start + 0.15, rank)
        assert (drawn == colour_of(action)) == (action.microbatch == 2), (rank, str(action))
    # Between rows there was nothing in these colours; now arrows cross from rank to rank.
    forward = rgb(Kind.FORWARD.colour)
    for rank in range(RANKS - 1):
        between = slice(page.y(rank, part=1.0) + 6, page.y(rank + 1, part=0.0) - 6)
        assert not (before[between] == forward).all(axis=2).any()
        assert (followed[between] == forward).all(axis=2).any()
    assert page.text("#status").startswith("Microbatch 2: 2 to 18, 12 of it at work, 8 actions, 6 messages")
    assert page.evaluate("document.querySelector('#microbatch').value") == "2"
    assert page.evaluate("location.hash") == "#microbatch=2"
    page.browser.press("]", 221)
    assert page.text("#status").startswith("Microbatch 3:")
    page.browser.press("Escape", 27)
    rows = tuple(slice(int(start) + 3, int(start + length) - 3) for start, length in zip(*page.corners("#body")))
    assert (page.picture()[rows] == before[rows]).all()
    assert page.complaints() == []


def test_a_link_opens_what_was_seen(show: Open):
    page = show(fragment="microbatch=5&from=10&to=20")
    assert page.seen() == (10.0, 20.0)
    assert page.text("#status").startswith("Microbatch 5:")


def test_the_keyboard_alone_reaches_every_action(show: Open):
    page = show()
    page.evaluate("document.querySelector('#chart').focus()")
    page.browser.press("ArrowRight", 39)
    assert page.text("#status").startswith("0F0 forward: rank 0, stage 0, microbatch 0, start 0, end 1")
    page.browser.press("ArrowRight", 39)
    assert page.text("#status").startswith("0F1")
    page.browser.press("ArrowDown", 40)
    assert page.text("#status").startswith("1F0")
    page.browser.press("Enter", 13)
    assert page.text("#status").startswith("Microbatch 0:")


@pytest.mark.parametrize("shown", ["simulated", "measured", "all"])
def test_a_measured_step_lies_under_the_simulated_one_on_one_axis(show: Open, shown: str):
    layers = [Layer.simulated(TIMELINE), Layer("measured", MEASURED, WAITS)]
    page = show(*layers, fragment=f"show={shown}", unit="ms")
    assert page.complaints() == []
    picture = page.picture()
    seen = [layer for layer in layers if shown in (layer.name, "all")]
    assert page.evaluate("rows.bars.map(bar => bar.layer.name)") == [layer.name for layer in seen]
    for number, layer in enumerate(seen):
        for rank, event, action in boxes(layer.timeline):
            assert at(picture, page, event.start + 0.2, rank, layer=number) == colour_of(action)
    if shown != "simulated":
        # What the rank waited is hatched: neither all idle nor all hatch.
        row = picture[page.y(3, len(seen) - 1), page.x(0.3) : page.x(3.0)]
        assert 0.3 < (row == rgb(Kind.IDLE.colour)).all(axis=1).mean() < 0.95
    assert "+10%" in page.text("#figures")
    assert page.text("#show").split() == ["simulated", "measured", "both"]
    page.evaluate("document.querySelectorAll('#show input')[0].click()")
    assert page.evaluate("rows.bars.map(bar => bar.layer.name)") == ["simulated"]


def test_every_control_has_a_name(show: Open):
    page = show(Layer.simulated(TIMELINE), Layer("measured", MEASURED, WAITS))
    nameless = """[...document.querySelectorAll("button, input, main")].filter(control =>
        !(control.getAttribute("aria-label") || control.innerText || control.labels?.length)).length"""
    assert page.evaluate(nameless) == 0
    assert TIMELINE.title in page.evaluate("document.querySelector('#chart').getAttribute('aria-label')")
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.shows(191)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (16, 300), (64, 100), (300, 4)])
def test_every_rank_and_the_whole_step_are_seen_at_first(show: Open, ranks: int, microbatches: int) -> None:
    timeline = simulated(ranks, microbatches)
    page = show(Layer.simulated(timeline))
    whole = page.seen()
    assert whole[0] < 0 and timeline.makespan < whole[1]
    assert page.evaluate("$('scroller').scrollHeight - $('scroller').clientHeight") <= 1
    # The last rank's actions are drawn in its row, at the foot; the first rank's at the head.
    picture, (top, _), (height, _) = page.picture(), *page.corners("#body")
    coloured = [rgb(kind.colour) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    for rank in (0, ranks - 1):
        event = next(event for event in timeline.events[rank] if event.end > event.start)
        x = page.x((event.start + event.end) / 2)
        column = picture[int(top + height * rank / ranks) : int(top + height * (rank + 1) / ranks) + 1, x - 2 : x + 3]
        assert min(np.abs(column - np.array(colour)).sum(axis=2).min() for colour in coloured) < 120, rank
    names = page.evaluate(
        "[...document.querySelectorAll('#labels li')].filter(item => item.style.visibility !== 'hidden')"
        ".map(item => item.getBoundingClientRect()).map(box => [box.top, box.bottom])"
    )
    assert all(one[1] <= other[0] + 0.5 for one, other in pairwise(names))
    # Seen close, rows are as high as can be read, and the rank under the pointer stays under it.
    x, y = page.x(timeline.makespan / 2), int(top + 0.8 * height)
    page.browser.mouse("mouseMoved", x, y)
    rank = page.evaluate(f"whatIsAt(10, {y} - $('body').getBoundingClientRect().top).rank")
    page.browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-3000)
    page.browser.settle()
    assert page.evaluate("rows.height") >= min(17, height / ranks)
    assert page.evaluate(f"whatIsAt(10, {y} - $('body').getBoundingClientRect().top).rank") == rank
    page.browser.press("0", 48)
    page.evaluate("new Promise(done => setTimeout(done, 400))")
    assert page.seen() == pytest.approx(whole)
    assert page.evaluate("$('scroller').scrollHeight - $('scroller').clientHeight") <= 1


SPY = """(() => {
  const arrows = [], words = [], old = paintArrow, pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
  paintArrow = (_, from, to) => arrows.push([from.x, from.y, to.x, to.y]);
  pen.fillText = function (text, ...place) { words.push(text); write.call(this, text, ...place); };
  paintBody();
  paintArrow = old;
  pen.fillText = write;
  const middle = rank => (box => box.y + box.height / 2)(barBox(rows.bars[0], rank, 0));
  return { arrows, words, middles: layers[0].ranks.map((_, rank) => middle(rank)) };
})()"""


@pytest.mark.shows(192)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_drawn_up_to_there_with_what_waits_and_the_cycle(show: Open, name: str, theme: str):
    program, arrows = HANGS[name][0](), HANGS[name][1]
    hang = hang_of(program)
    assert hang is not None
    timeline = schedule.simulate(hang)
    page = show(Layer.simulated(timeline))
    page.evaluate(f"paintTheme('{theme}')")
    assert page.text("#hang") == hang.sentence and page.box("#figures")[3] == 0
    names = "layers[0].ranks.map(({ compute }) => compute.map(nameOf))"
    ran = [[step for step in steps if parts(step)[0].op in COMPUTE] for steps in carried_out(program)]
    assert [[own for own in row if own[-1] not in "RS"] for row in page.evaluate(names)] == [
        [str(step) for step in steps] for steps in ran
    ]

    seen = page.evaluate(SPY)
    rank_at = {round(middle): rank for rank, middle in enumerate(seen["middles"])}
    assert sorted((rank_at[round(a)], rank_at[round(b)]) for _, a, _, b in seen["arrows"]) == sorted(arrows)
    assert all(page.evaluate(f"bodyScale().t({x})") > timeline.makespan for x, *_ in seen["arrows"])
    # In one line or two: what waits, for what and for whom.
    text = " ".join(seen["words"])
    stuck = waiting(program)
    for rank, (action, transfer, peer) in stuck.items():
        assert f"{action} waits for {transfer} of rank {peer}" in text
        assert page.text(f"#labels li:nth-child({rank + 1}) .idle") == f"→ rank {peer}"
        said = page.evaluate(f"describeIdle({{ rank: {rank}, layer: layers[0], time: layers[0].makespan }})")
        assert said[0] == "waits for ever" and ["wait", f"{action} waits for {transfer} of rank {peer}"] in said[1]
    assert text.count(" waits for ") == len(stuck)
    picture = page.picture()
    block = {"light": rgb(Kind.WAIT.colour), "dark": rgb("#3A2A22")}[theme]
    left, right = page.x(timeline.makespan) + 2, page.x(drawn_length(timeline)) - 2
    for rank in range(len(program.ranks)):
        shown = picture[page.y(rank, part=0.1), left:right]
        assert ((shown == block).all(axis=1).sum() > 0.2 * (right - left)) == (rank in stuck)
    assert page.complaints() == []


@pytest.mark.shows(188)
def test_a_forward_that_keeps_all_activations_bears_its_mark_and_the_key_says_so(show: Open):
    program = schedule.keep_first(schedule.lower(schedule.build("combined-1f1b", ranks=3, microbatches=6)), 1)
    timeline = schedule.simulate(program, Costs(1.0, 2.0, 1.0, recompute=1.0))
    page = show(Layer.simulated(timeline))
    names = page.evaluate("layers[0].ranks.map(({ compute }) => compute.map(nameOf))")
    for order, found in zip(program.schedule.orders, names, strict=True):
        assert [str(step).removesuffix("OVERLAP_F_B") for step in order] == found[: len(order)]
    assert "K keeps all activations, recomputes none" in " ".join(page.text("#legend").split())
    assert "keeps all" not in show().text("#legend")
