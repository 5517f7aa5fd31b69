"""Runs the blocks of a page of the documentation one after another, as docs/testing.md says."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from tools import site_pages

from penstock.cli.main import main
from penstock.planner import Cluster
from penstock.settings import read_config
from tests.e2e.scripts import free_port, in_folder, run_ranks_of
from tests.e2e.unrun_commands import check_command
from tests.fork_server import Forked, run_command, run_script

ROOT = Path(__file__).parents[2]
TITLE = re.compile(r'(\w*)(?: title="([^"]+)")?')
NOT_RUN = re.compile(r"<!-- not run: (.+) -->\s*")
# Of this a page's port is replaced by a free one.
PORT = "29400"
# Numbers of time and speed, which differ from run to run; `...` on a line of its own stands for any lines.
MASKS = (
    (
        re.compile(r"\s*\b\d[\d,]*(?:\.\d+)? ?(?=(?:h|min|s|ms|us|tokens/s|tokens/s/device|[KMGT]B/s|[GT]FLOP/s)\b)"),
        " # ",
    ),
    (re.compile(r"\s*\b\d+(?::\d\d)+\b"), " #"),
    (re.compile(r"\b(idle|share)\s+\d+(?:\.\d+)?%"), r"\1 #"),
)
LIMIT_S = 1500.0


@dataclass(frozen=True)
class Block:
    """A block of a page: the line where it begins, and the reason in the page's source why it is not run, if any."""

    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None


def blocks_of(page: Path) -> list[Block]:
    """Every block of a page, with fences or indented.

    Raises: ValueError for a fence whose first line no rule covers, or a reason that stands above no block.
    """
    found, reason = [], None
    for token in MarkdownIt().parse(site_pages.with_files(page.read_text(encoding="utf-8"))):
        line = token.map[0] + 1 if token.map else 0
        if token.type in ("fence", "code_block"):
            info = TITLE.fullmatch(token.info.strip())
            if info is None or not info[1]:
                raise ValueError(f"{page.name}, line {line}: no rule covers a block that begins with {token.info!r}")
            found.append(Block(line, info[1], info[2], token.content, reason))
            reason = None
        elif token.type == "html_block" and (mark := NOT_RUN.fullmatch(token.content)):
            reason = mark[1]
        elif reason is not None and token.nesting >= 0:
            raise ValueError(f"{page.name}, line {line}: no block follows 'not run'")
    return found


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Each command that a console block shows, with what it shows it to print."""
    before, *parts = re.split(r"^\$ ", text.replace("\\\n", ""), flags=re.MULTILINE)
    if before or not parts:
        raise ValueError(f"a console block begins with $ and a command, not with {text[:40]!r}")
    for part in parts:
        command, _, output = part.partition("\n")
        yield command, output


def lines_of(text: str) -> list[str]:
    """The commands of a block of shell, without comments; a line of nothing else is none."""
    return [line for line in text.replace("\\\n", "").splitlines() if shlex.split(line, comments=True)]


def agrees(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed, numbers of time and speed aside."""
    for pattern, mask in (*MASKS, (re.compile(r" +$", re.MULTILINE), "")):
        shown, printed = pattern.sub(mask, shown), pattern.sub(mask, printed)
    lines = (r"(?:.*\n)*?" if line == "..." else re.escape(line) + "\n" for line in shown.splitlines())
    return re.fullmatch("".join(lines), printed) is not None


@dataclass
class PageRun:
    """A page that is run in a folder, from its first block to its last."""

    page: Path
    folder: Path
    #: the names that its blocks of Python share
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "page"})
    #: what a block of Python has printed, until the block that shows it
    printed: str = ""
    #: commands that end with &
    background: list[subprocess.Popen[str] | Forked] = field(default_factory=list)
    port: str = field(default_factory=lambda: str(free_port()))
    num_compared: int = 0

    def run(self) -> None:
        """Run every block.

        Raises: AssertionError or ValueError with the line of a block that fails or prints something else.
        """
        rules = {
            "python": self._python,
            "text": self._text,
            "console": self._console,
            "sh": self._shell,
            "toml": self._toml,
            "csv": self._file,
            "nginx": check_unrun,
            "jsonl": self._file,
        }
        try:
            for block in blocks_of(self.page):
                place = f"{self.page.name}, line {block.line}"
                if block.language not in rules:
                    raise ValueError(f"{place}: no rule covers a block of {block.language!r}")
                assert self.printed == "" or block.language == "text", f"{place}: what is printed above is not shown"
                try:
                    if block.not_run is None:
                        rules[block.language](block)
                    else:
                        check_unrun(block)
                except (Exception, SystemExit) as error:
                    raise AssertionError(f"{place}: {error}") from error
            assert self.printed == "", f"{self.page.name}: what its last block prints is not shown"
        finally:
            for process in self.background:
                _end(process)

    def _compare(self, shown: str, printed: str) -> None:
        assert agrees(shown, printed), f"shown:\n{shown}\nprinted:\n{printed}"
        self.num_compared += 1

    def _python(self, block: Block) -> None:
        if block.title is None:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, self.page.name, "exec"), self.names)
            self.printed = out.getvalue()
        elif (self.folder / block.title).exists():
            assert block.text in (self.folder / block.title).read_text(), f"{block.title} is otherwise"
        else:
            self._file(block)

    def _file(self, block: Block) -> None:
        assert block.title is not None, f"a block of {block.language} needs the name of a file"
        (self.folder / block.title).write_text(block.text)

    def _toml(self, block: Block) -> None:
        tomllib.loads(block.text)
        path = self.folder / (block.title or "run.toml")
        path.write_text(block.text)
        Cluster.read(path) if "cluster" in path.stem else read_config(path)

    def _text(self, block: Block) -> None:
        self._compare(block.text, self.printed)
        self.printed = ""

    def _shell(self, block: Block) -> None:
        for line in lines_of(block.text):
            code, printed = self._command(line)
            assert code == 0, f"{line}\n{printed}"

    def _console(self, block: Block) -> None:
        for line, shown in commands_of(block.text):
            code, printed = self._command(line)
            assert code in (0, 1, 2), f"{line} ended with {code}:\n{printed}"
            try:
                self._compare(shown, printed)
            except AssertionError as error:
                raise AssertionError(f"{line}\n{error}") from None

    def _command(self, line: str) -> tuple[int, str]:
        """Run a command; returns its exit code and what it prints, errors too if it fails."""
        words = shlex.split(line.replace(PORT, self.port), comments=True)
        behind = words[-1] == "&"
        program, *arguments = words[: len(words) - behind]
        program = Path(program).name
        if program == "cat":
            return 0, (self.folder / arguments[0]).read_text()
        if program == "penstock" and arguments[0] in ("schedule", "plan"):
            return self._here(arguments)
        if program == "torchrun" and "--nnodes" not in arguments:
            assert arguments[0] == "--nproc-per-node", line
            script = self.folder / arguments[2]
            return 0, run_ranks_of(script, int(arguments[1]), *arguments[3:], folder=self.folder, limit_s=LIMIT_S)
        process = self._start(program, arguments)
        if behind:
            self.background.append(process)
            return 0, ""
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            _end(process)
        assert process.returncode is not None
        return process.returncode, out if process.returncode == 0 else out + err

    def _here(self, arguments: list[str]) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return code, out.getvalue() + (err.getvalue() if code else "")

    def _start(self, program: str, arguments: list[str]) -> subprocess.Popen[str] | Forked:
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        if program == "penstock":
            return Forked(in_folder, self.folder, run_command, arguments, environ=environ)
        if program == "python":
            script = str(self.folder / arguments[0])
            return Forked(in_folder, self.folder, run_script, script, arguments[1:], environ=environ)
        assert program == "torchrun", f"no rule covers the command {program!r}"
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=self.folder, env=environ)


def _end(process: subprocess.Popen[str] | Forked) -> None:
    """End a process that may still be at work; torchrun, asked, ends what it has started."""
    if isinstance(process, subprocess.Popen) and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
    process.kill()
    process.wait()


def check_unrun(block: Block) -> None:
    """Check what can be checked of a block without running it: its syntax, and its commands' options.

    Raises: ValueError or SyntaxError for what cannot be read.
    """
    if block.language == "python":
        compile(block.text, "block", "exec")
    elif block.language in ("sh", "console"):
        texts = lines_of(block.text) if block.language == "sh" else [line for line, _ in commands_of(block.text)]
        for text in texts:
            check_command(shlex.split(text, comments=True))
    elif block.language not in ("text", "nginx"):
        raise ValueError(f"a block of {block.language!r} can be run")


def prepare(folder: Path, demo: Path) -> None:
    """Put into a folder what pages suppose: the examples, the README's recorded step, texts, and a run of the demo."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/timeline.json", folder / "docs")
    (folder / "texts.jsonl").write_text('{"text": "import os"}\n{"text": "def main():\\n    pass"}\n')
    shutil.copytree(demo, folder / "runs/demo")
