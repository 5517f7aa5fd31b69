"""The README is true: its commands print what it shows, its Python runs, its links lead somewhere."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from penstock.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[tuple[list[str], str]]:
    """Each command that a console block shows, with what it shows it to print."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((shlex.split(command), output))
    return found


def test_schedule_commands_print_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    num_compared = 0
    for (program, *arguments), shown in commands():
        if program == "cat":
            assert Path(arguments[0]).read_text() == shown
        elif program == "penstock" and arguments[0] == "schedule":
            main(arguments)
            printed = capsys.readouterr()
            assert printed.out + printed.err == shown, arguments
            num_compared += 1
    assert num_compared >= 4


def test_python_about_schedules_runs():
    programs = [block for block in blocks("python") if "from penstock import schedule" in block]
    assert programs
    for program in programs:
        exec(compile(program, "README.md", "exec"), {})


def test_the_loop_of_failing_steps_runs(capsys: pytest.CaptureFixture[str]):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "failing_steps.md").read_text(), re.DOTALL)
    exec(compile(program, "failing_steps.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "step 1: 8 tokens" and printed[2] == "step 2: 10 tokens"
    assert printed[1] == "left out: this batch cannot be used" and len(printed) == 3


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/serving.md", "docs/testing.md"]
)
def test_links_and_paths_lead_somewhere(page: str):
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    paths = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text)
    assert links or paths
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []
    assert [path for path in paths if not any((ROOT / top / path).exists() for top in ("", "src/penstock"))] == []


def test_the_way_to_read_is_true():
    """The files of the list exist, are few, and each is short enough to be read in one go."""
    _, _, rest = README.partition("## What to read first")
    files = re.findall(r"^\d+\. \[`[^`]+`\]\(([^)]+)\)", rest.partition("\n## ")[0], re.MULTILINE)
    assert {"src/penstock/schedule/lower.py", "src/penstock/runtime/stage.py"} <= set(files)
    assert all(len((ROOT / file).read_text().splitlines()) <= 400 for file in files)
