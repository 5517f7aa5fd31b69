"""The gallery shows every schedule that trains, as it is built and drawn today."""

from pathlib import Path

import pytest
from tools import gallery

from penstock import schedule
from penstock.draw.layers import read_recorded_step
from penstock.schedule.actions import parts
from penstock.settings import read_config

DOCS = Path(__file__).parents[3] / "docs"
pytestmark = pytest.mark.subject(
    "docs/*.*",
    "docs/gallery/*",
    "tools/gallery.py",
    "examples/tiny.toml",
    *(f"src/penstock/{room}/**/*.*" for room in ("io", "settings", "schedule", "planner", "draw")),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    gallery.write(folder)
    return folder


def test_no_picture_and_no_figure_is_stale(made: Path) -> None:
    new = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    committed = [DOCS / "gallery.md", *(DOCS / "gallery").iterdir()]
    old = {path.relative_to(DOCS): path.read_bytes() for path in committed}
    assert set(new) == set(old) and len(new) > 10
    assert [str(path) for path in new if new[path] != old[path]] == [], "make gallery draws them anew"


def test_every_schedule_has_its_picture_order_use_and_source() -> None:
    text = (DOCS / "gallery.md").read_text()
    for name in gallery.trained():
        (section,) = [part for part in text.split("\n## ")[1:] if part.startswith(f"{name}\n")]
        assert f"](gallery/{name}.svg)" in section and f"| [{name}](#{name}) |" in text
        for words in ("rank 0: `", "bubble ", "memory ", "when to use it: ", "source: "):
            assert words in section, (name, words)
    assert set(gallery.WHEN) == set(gallery.trained())


def test_the_readme_shows_the_order_that_the_demo_runs(tmp_path: Path) -> None:
    config = read_config(DOCS.parent / "examples/tiny.toml")
    assert config.schedule.early_gradients and config.schedule.stages_per_rank is None
    counts = {"ranks": config.parallel.pp, "microbatches": config.train.num_microbatches}
    orders = schedule.early_gradients(schedule.build(config.schedule.name, **counts)).orders
    recorded = read_recorded_step(DOCS / "timeline.json")
    assert len(recorded.layers) == 2
    for layer in recorded.layers:
        for events, order in zip(layer.timeline.events, orders, strict=True):
            compute = [event.action for event in events if parts(event.action)[0].microbatch >= 0]
            assert list(map(str, compute)) == list(map(str, order))
    gallery.draw_step(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").read_bytes() == (DOCS / "timeline.svg").read_bytes()


def test_the_guides_hang_is_drawn_anew_as_it_is(tmp_path: Path) -> None:
    gallery.draw_hang(tmp_path / "hang.svg")
    assert (tmp_path / "hang.svg").read_bytes() == (DOCS / "guides" / "hang.svg").read_bytes()
