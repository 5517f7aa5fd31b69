"""Every block of the documentation and the README runs and prints what the page shows, or says why it is not run."""

import shlex
from pathlib import Path

import pytest

from tests.e2e.pages import ROOT, PageRun, blocks_of, prepare
from tests.e2e.training import run
from tests.e2e.unrun_commands import check_command

pytestmark = pytest.mark.subject("*.md", "docs/**/*.md", "examples/**/*", "src/penstock/**/*.py")

PAGES = {
    str(path.relative_to(ROOT)): blocks_of(path)
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}
# Of each page, the blocks that say `not run`: pictures, and what needs a cluster, minutes or a server, as no test has.
NUM_NOT_RUN = {
    "CONTRIBUTING.md": 1,
    "README.md": 2,
    "docs/architecture.md": 1,
    "docs/clusters.md": 1,
    "docs/failing_steps.md": 1,
    "docs/guides/check.md": 1,
    "docs/guides/fine_tuning.md": 1,
    "docs/guides/finding_a_hang.md": 2,
    "docs/guides/generation.md": 1,
    "docs/index.md": 1,
    "docs/serving.md": 3,
    "docs/start.md": 2,
    "docs/testing.md": 7,
    "docs/tutorials/many_hosts.md": 2,
    "docs/weights_between_engines.md": 2,
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, where the demo's would lie."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "corpus.py").write_text("import os\n\n\ndef main():\n    return os.name\n" * 200)
    ended = run(
        *("examples/tiny.toml", "--output", str(folder / "run"), "--data.corpus", str(folder / "corpus.py")),
        *(
            "--data.cache",
            "None",
            "--train.steps",
            "2",
            "--optimizer.num_warmup_steps",
            "0",
            "--log.tensorboard",
            "false",
        ),
    )
    assert ended.exit_code == 0, ended.err
    return folder / "run"


@pytest.mark.shows(157)
@pytest.mark.parametrize("name", [name for name, blocks in PAGES.items() if blocks])
def test_every_block_of_a_page_runs_and_prints_what_it_shows(
    name: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, demo)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    # Where tokenised texts are kept.
    monkeypatch.setenv("HOME", str(demo.parent))
    page = PageRun(ROOT / name, tmp_path)
    page.run()
    shown = [block for block in PAGES[name] if block.language in ("text", "console") and block.not_run is None]
    assert page.num_compared >= len(shown)


@pytest.mark.shows(157)
def test_blocks_that_are_not_run_are_few_and_counted() -> None:
    found = {name: sum(block.not_run is not None for block in blocks) for name, blocks in PAGES.items()}
    assert {name: count for name, count in found.items() if count} == NUM_NOT_RUN


@pytest.mark.shows(157)
@pytest.mark.parametrize("name", sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/tutorials").iterdir()))
def test_every_block_of_a_tutorial_is_run(name: str) -> None:
    blocks = PAGES[name]
    assert sum(block.language in ("text", "console") for block in blocks) >= 1


FENCE = "```"


def page_of(folder: Path, *lines: str) -> PageRun:
    (folder / "page.md").write_text("\n".join(lines) + "\n")
    return PageRun(folder / "page.md", folder)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([f"{FENCE}python", "print(1)", FENCE, f"{FENCE}text", "2", FENCE], "line 4: shown"),
        ([f"{FENCE}python", "print(1)", FENCE], "is not shown"),
        ([f"{FENCE}python", "1 / 0", FENCE], "line 1: division by zero"),
        ([f"{FENCE}rust", "fn main() {}", FENCE], "no rule covers a block of 'rust'"),
        ([FENCE, "some text", FENCE], "no rule covers a block that begins with ''"),
        (["    indented"], "no rule covers"),
        ([f"{FENCE}python numbered", "1", FENCE], "no rule covers a block that begins with 'python numbered'"),
        ([f"{FENCE}console", "$ penstock schedule list --jsn", FENCE], "--jsn"),
        ([f"{FENCE}sh", "penstock schedule show 2f2b", FENCE], "2f2b"),
        ([f"{FENCE}sh", "ls", FENCE], "no rule covers the command 'ls'"),
        ([f"{FENCE}toml", "[model]", "hiden_size = 3", FENCE], "hidden_size"),
        (["<!-- not run: it takes long -->", "Words."], "no block follows"),
        (["<!-- not run: it takes long -->", f"{FENCE}toml", "[model]", FENCE], "can be run"),
        (["<!-- not run: it takes long -->", f"{FENCE}python", "print(", FENCE], "line 2: '\\(' was never closed"),
        (["<!-- not run: it takes long -->", f"{FENCE}sh", "penstock plan --cluster h100 --modl x", FENCE], "--modl"),
    ],
)
def test_a_fault_in_a_page_is_found(tmp_path: Path, lines: list[str], why: str) -> None:
    with pytest.raises((AssertionError, ValueError), match=why):
        page_of(tmp_path, *lines).run()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("penstock trane", "no command 'trane'"),
        ("penstock train run.toml --parallel.pipes 2", "parallel.pipes"),
        ("penstock train run.toml --parallel.pp two", "'two'"),
        ("penstock schedule shw 1f1b", "no command 'shw'"),
        ("penstock serve runs/demo --prt 8000", "--prt"),
        ("torchrun --nproc-per-nod 2 examples/own_layers.py", "nproc-per-nod"),
        ("torchrun --nproc-per-node 2 -m penstock trane run.toml", "'trane'"),
        ("torchrun --nproc-per-node 2 examples/own_layer.py", "no examples/own_layer.py"),
        ("torchrun --nproc-per-node 2 examples/grpo.py --gaol 1", "does not take --gaol 1"),
        ("make demmo", "demmo"),
        ('make late ARGS="--sedes 3"', "does not take"),
        ("pip install .[server]", "installs nothing of ours"),
        ("git clone https://github.com/penstok/penstock", "clones nothing of ours"),
        ("cd penstok", "enters no clone of ours"),
        ("docker run penstock", "no rule covers the command 'docker'"),
    ],
)
def test_a_command_that_cannot_be_is_found_without_running_it(command: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_command(shlex.split(command))
