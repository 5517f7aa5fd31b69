"""The demo, with a small model and few steps, prints what docs/start.md shows; its tokens make indentation cheap."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tools import demo

from tests.e2e.pages import ROOT, agrees, blocks_of
from tests.e2e.scripts import in_folder
from tests.e2e.training import CORPUS
from tests.fork_server import Forked, run_command

TOKENS = "examples/python_tokenizer"
FIRST = "--- prompt 0 ---\n"
SMALL = {
    "hidden_size = 128": "hidden_size = 16",
    "num_heads = 4": "num_heads = 2",
    "intermediate_size = 384": "intermediate_size = 32",
    "num_layers = 4": "num_layers = 2",
    'corpus = "stdlib"': 'corpus = "corpus.py"\ncache = "cache"',
    "sequence_length = 256": "sequence_length = 32",
    "num_warmup_steps = 50": "num_warmup_steps = 5",
    "steps = 700": "steps = 20",
    "every = 175": "every = 5",
    "num_sequences = 64": "num_sequences = 8",
}
# Behind the middle a run waits for the demo, which looks five times a second, to ask it to end.
HOLD = """
import select, signal, time

class Hold:
    asked = False

    def on_step(self, result):
        if result.step == 1:
            told = signal.getsignal(signal.SIGTERM)

            def ask(*caught):
                self.asked = True
                told(*caught)

            signal.signal(signal.SIGTERM, ask)
        limit_s = time.monotonic() + 300
        while result.step == 11 and not self.asked and time.monotonic() < limit_s:
            select.select([], [], [], 0.01)

hold = Hold()
"""


class Command(Forked):
    """A command of the demo; what it writes is printed at its end."""

    def __init__(self, words: Sequence[str], cwd: Path) -> None:
        assert words[0] == str(demo.PENSTOCK)
        super().__init__(in_folder, cwd, run_command, words[1:], environ=os.environ)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        print(self.communicate()[0], end="", flush=True)


def run(words: Sequence[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
    process = Command(words, cwd)
    process.wait()
    assert process.returncode is not None
    return subprocess.CompletedProcess(words, process.returncode)


def without_numbers(text: str) -> str:
    return re.sub(r" *\d[\d,.:]*%?", " #", text)


def test_the_demo_prints_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / demo.EXAMPLE).read_text()
    for usual, small in SMALL.items():
        assert text.count(usual) == 1, usual
        text = text.replace(usual, small)
    (tmp_path / "examples").mkdir()
    (tmp_path / demo.EXAMPLE).write_text(text + '\n[watch]\ncallbacks = ["hold.py:hold"]\n')
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "corpus.py").write_text(CORPUS)
    shutil.copytree(ROOT / TOKENS, tmp_path / TOKENS)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(Popen=Command, run=run))
    assert demo.main() == 0
    printed = capfd.readouterr().out
    (shown,) = [block.text for block in blocks_of(ROOT / "docs/start.md") if block.text.startswith("1. Train")]
    (before, written), (shown_before, shown_written) = (text.split(FIRST) for text in (printed.lstrip("\n"), shown))
    assert agrees(without_numbers(shown_before), without_numbers(before)), printed
    # What it writes is another model's, and so much of it is shown.
    assert written.startswith(demo.PROMPTS[0]) and shown_written.startswith(demo.PROMPTS[0])
    _, _, end = shown_written.partition("...\n")
    assert agrees(without_numbers("...\n" + end), without_numbers(written)), printed
    commands = re.findall(r"^  \S+/penstock (\w+)", printed, re.MULTILINE)
    assert len(commands) >= 4
