"""The scripts of --print-completion, in the shells that they are for."""

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penstock.cli.main import main

# What is typed before the key Tab, and the one word that it then becomes; alike in all shells.
TYPED = {
    "sched": "schedule",
    "--vers": "--version",
    "schedule sim": "simulate",
    "schedule show dualpipe-": "dualpipe-v",
    "schedule verify ord": "order.csv",
    "generate --top-l": "--top-log-probs",
    "train --schedule.early_release f": "false",
}
SET_UP = {
    "fish": "source penstock.fish",
    "zsh": "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D",
    "tcsh": "source penstock.tcsh",
}


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
_shtab_penstock
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_options_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="make setup installs it")
    assert main(["--print-completion", "bash"]) == 0
    file = tmp_path / "penstock.bash"
    file.write_text(capsys.readouterr().out)
    for words, wanted in (
        ("sched", {"schedule"}),
        ("schedule sim", {"simulate"}),
        ("generate --top-", {"--top-k", "--top-p", "--top-log-probs"}),
        ("train --optimizer.num_w", {"--optimizer.num_warmup_steps"}),
        ("train --schedule.early_release ", {"true", "false"}),
        ("train --schedule.name zb-h", {"zb-h1", "zb-h2"}),
    ):
        command = ["bash", "-c", COMPLETE, "complete", file, "penstock", *words.split(" ")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert set(done.stdout.split()) == wanted, words


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a shell's script, a schedule's file, and a command `penstock` that prints its arguments."""
    pytest.importorskip("shtab", reason="make setup installs it")
    shell: str = request.getfixturevalue("shell")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its completion was not tested; `apt-get install {shell}`")
    assert main(["--print-completion", shell]) == 0
    (tmp_path / ("_penstock" if shell == "zsh" else f"penstock.{shell}")).write_text(capsys.readouterr().out)
    (tmp_path / "order.csv").write_text("0F0,0B0\n")
    (tmp_path / "penstock").write_text('#!/bin/sh\necho "<$*>"\n')
    (tmp_path / "penstock").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_a_shell_completes_what_is_typed(shell: str, folder: Path) -> None:
    process, terminal = pty.fork()
    if not process:
        os.chdir(folder)
        environ = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "xterm"}
        os.execvpe(shell, [shell, "-f"], environ)
    said = ""

    def until(words: str) -> None:
        nonlocal said
        deadline = time.monotonic() + 60
        while words not in said:
            assert select.select([terminal], [], [], max(0, deadline - time.monotonic()))[0], said
            said += os.read(terminal, 65536).decode(errors="replace")

    try:
        os.write(terminal, f"{SET_UP[shell]}; penstock ready\n".encode())
        until("<ready>")
        for typed, word in TYPED.items():
            os.write(terminal, f"penstock {typed}\t\n".encode())
            until(f"<{' '.join([*typed.split()[:-1], word])}>")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


@pytest.mark.parametrize("words", [[], ["csh"], ["bash", "zsh"]])
def test_completion_names_the_shells_it_knows(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="make setup installs it")
    assert main(["--print-completion", *words]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and "bash, zsh" in told
