"""Every benchmark is listed, has a help that teaches, with examples that are true, and prints JSON on request."""

import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks.__main__ import FOLDER, benchmarks
from benchmarks.common import main

NAMES = sorted(benchmarks())
ROOT = Path(__file__).parents[2]
MAX_LINES, MAX_COLUMNS = 110, 80


def test_every_program_of_the_folder_is_listed_with_a_sentence() -> None:
    run = [path.stem for path in FOLDER.glob("*.py") if 'sys.exit(main("' in path.read_text()]
    assert sorted(run) == NAMES and len(NAMES) >= 15
    listed = subprocess.run(
        [sys.executable, "-m", "benchmarks"], capture_output=True, text=True, check=True, timeout=300, cwd=ROOT
    ).stdout
    for name, sentence in benchmarks().items():
        assert sentence and f"  {name} " in listed and sentence in listed


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(name, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    lines = text.rstrip().splitlines()
    assert 5 < len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_COLUMNS
    assert benchmarks()[name].split()[0] in text
    parser = import_module(f"benchmarks.{name}").parser()
    assert [action.option_strings for action in parser._actions if not action.help] == []
    assert parser.parse_args(["--json"]).json
    examples = [shlex.split(line) for line in lines[lines.index("examples:") + 1 :]]
    assert examples
    for example in examples:
        assert example[:3] == ["python", "-m", f"benchmarks.{name}"]
        parser.parse_args(example[3:])


def test_a_mistake_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("train", ["--layer", "4"]) == 2
    told = capsys.readouterr()
    assert "did you mean '--layers'" in told.err and told.err.count("\n") == 1 and not told.out
