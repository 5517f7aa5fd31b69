"""The command `penstock`: runs the requested subcommand, and turns users' mistakes into one sentence."""

import os
import platform
import re
import signal
import sys
from contextlib import suppress

from penstock import __version__
from penstock.cli import output
from penstock.cli.options import Command, Main, dispatch
from penstock.io.files import UnfitFileError
from penstock.settings.declare import words_of

COMMANDS = {
    "train": Command("train a model cut into stages, as set in a TOML file", "penstock.cli.train"),
    "score": Command("write each token's log-probability and each text's perplexity", "penstock.cli.models.score"),
    "generate": Command("continue prompts with a saved model", "penstock.cli.models.generate"),
    "chat": Command("talk with a saved model in the terminal", "penstock.cli.models.chat"),
    "serve": Command("answer over HTTP with a saved model, by OpenAI's interface", "penstock.cli.models.serve"),
    "convert": Command("a run's model for Hugging Face's transformers, and back", "penstock.cli.convert"),
    "schedule": Command("list, draw, prove, simulate and export schedules (no torch)", "penstock.cli.schedule"),
    "check": Command("compare your own layers in stages with a plain loop, bit for bit", "penstock.cli.check"),
    "rehearse": Command("a rank's step without data or device: memory, arithmetic, traffic", "penstock.cli.rehearse"),
    "trace": Command("draw a recorded step of a run, and show where its time went", "penstock.cli.trace"),
    "plan": Command("find the fastest layout and schedule for a model on a cluster", "penstock.cli.plan"),
    "store": Command("hold the store at which the hosts of a run meet", "penstock.cli.processes.store"),
    "doctor": Command("show what this machine has, and test the links of a layout", "penstock.cli.doctor"),
}

_MAX_LENGTH = 2000

LIBRARIES = frozenset({"datasets", "matplotlib", "numpy", "peft", "rich", "safetensors"})
LIBRARIES |= {"starlette", "tensorboard", "tokenizers", "torch", "transformers", "uvicorn", "wandb"}
"""Each is imported where it is used, so that a command does without those of others."""

HEAD = """Pipeline parallelism whose schedules are data: built, proved, simulated and
drawn before they run. The object that was proved is the one that runs."""

FAILED, REFUSED, STOPPED, CLOSED = 1, 2, os.EX_TEMPFAIL, 128 + signal.SIGPIPE
"""Exit codes of a command that is not done; of one that a signal ended it is 128 and the signal's number."""
WORKER_DONE = 113
"""The exit code by which a worker tells its launcher that it is done: any library may end a process with 0."""

FOOT = """penstock COMMAND --help explains each command. Exit codes: 0 done, 1 failed
while running, 2 refused before anything was started or written, of which
PENSTOCK_TRACEBACK=1 shows the full traceback; 128 + N ended by signal N, as in
shells, also of a run that has saved; 75 a run stopped because another process
was, or by a callback, or silent beyond its limit: the same command goes on.

options:
  --version  print the versions of Penstock, torch and Python

examples:
  penstock schedule show 1f1b --ranks 4 --microbatches 8
      see what four ranks do, and when
  penstock train examples/tiny.toml --dry-run
      see how a model would be cut, start nothing
  penstock train examples/tiny.toml
      train it on this machine"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns: its exit code; 2 after a user's mistake, reported in one sentence on stderr.
    """
    if arguments is not None:
        return run_as_script(_run, arguments)
    code = run_as_script(_run, sys.argv[1:])
    # Nothing is left to interrupt; one more Ctrl-C would only break into what Python does at its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["--version"], ["-V"]):
        from importlib.metadata import PackageNotFoundError, version

        torch = "no torch"
        with suppress(PackageNotFoundError):
            torch = f"torch {version('torch')}"
        print(f"penstock {__version__}, {torch}, Python {platform.python_version()}")
        return 0
    return dispatch("penstock", COMMANDS, arguments, head=HEAD, foot=FOOT)


def run_as_script(main: Main, arguments: list[str] | None = None) -> int:
    """Run a command's `main`, and turn its errors for users' mistakes into one sentence and an exit code."""
    output.prepare()
    try:
        _check_folder()
        try:
            return main(sys.argv[1:] if arguments is None else arguments)
        finally:
            # Also where argparse's help ends by SystemExit: what cannot be written is an error of the command.
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error) or os.environ.get("PENSTOCK_TRACEBACK"):
            raise
        say(in_plain_words(words_of(error)))
        return FAILED
    except (ValueError, OSError, ModuleNotFoundError) as error:
        is_fault = isinstance(error, ModuleNotFoundError) and library_of(error) not in LIBRARIES
        if is_fault or os.environ.get("PENSTOCK_TRACEBACK"):
            raise
        from penstock.cli.processes.meeting import leave_report_to_first

        leave_report_to_first(os.environ)
        say(sentence(error))
        return REFUSED


def say(text: str) -> None:
    """Print a sentence on standard error, under the name of the command unless it begins with that itself.

    In one piece: without buffers, as torchrun starts them, processes would write into each other's lines.
    """
    text = printable(text)
    sys.stderr.write(f"{text}\n" if text.startswith("penstock ") else f"penstock: {text}\n")


def printable(text: str) -> str:
    """A text without characters that move a terminal's cursor or change its colours, which are shown as Python does."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _check_folder() -> None:
    """Refuse a working folder that is gone: libraries look there too, and some end the process without a word of it."""
    try:
        os.getcwd()
    except OSError:
        raise ValueError("the working folder is gone; change to one that exists") from None


_ALLOCATION = re.compile(r"(?:RuntimeError: )?(?:\[[^\]]*\][^:]*)?DefaultCPUAllocator: [^:]*:[^\d]*(\d+) bytes\.?[^;]*")


def lacks_memory(error: BaseException | None) -> bool:
    """True for the failure of an allocation; PyTorch has no exception class for that of a processor's memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_ALLOCATION.search(words_of(error)))
    )


def in_plain_words(text: str) -> str:
    """The text of an error, with the size alone of an allocation that has failed."""
    said = "there is too little memory for {:,.1f} GiB; give smaller sizes"
    plain = _ALLOCATION.sub(lambda size: said.format(int(size[1]) / 2**30), text)
    return plain or "there is too little memory; give smaller sizes"


def library_of(error: ModuleNotFoundError) -> str:
    """The name by which the missing library is imported."""
    return (error.name or "").partition(".")[0]


def sentence(error: ValueError | OSError | ModuleNotFoundError) -> str:
    """The error's message, with the file if there is one, or with the package that is missing."""
    if isinstance(error, ModuleNotFoundError):
        package = library_of(error).replace("_", "-")
        return f"this needs the library {package}, which is not installed; install it with pip install {package}"
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, UnfitFileError):
        # Some libraries open files by their path's bytes.
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return f"{name}: {(error.strerror or str(error)).lower()}"
    text = words_of(error)
    # A message quotes what it refuses, which may be of any length.
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]} ... {text[-_MAX_LENGTH // 2 :]}"


if __name__ == "__main__":
    sys.exit(main())
