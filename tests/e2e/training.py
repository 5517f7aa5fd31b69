"""Small runs of `penstock train` for the tests: a model of a few thousand parameters, and ways to end a run."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.folders.runs import METRICS_FILE, read_metrics
from tests.fork_server import Forked, run_command

CORPUS = "".join(f"def f{i}(x):\n    return x * {i * i} + {i}\n\n\n" for i in range(400))

RUN_FILE = """
output = "{output}"
model.hidden_size = 16
model.intermediate_size = 32
model.num_layers = 2
model.num_heads = 2
model.tie_embeddings = true
data.corpus = "{corpus}"
data.cache = "{cache}"
data.sequence_length = 32
data.num_sequences = 8
parallel.pp = 2
parallel.timeout_s = 60
optimizer.num_warmup_steps = 5
train.steps = {steps}
train.num_microbatches = 4
validation.every = 20
validation.num_sequences = 8
checkpoint.every = 5
checkpoint.keep = 100
log.tensorboard = false
log.timeline = false
"""

# What must be the same, however often the run was interrupted; the rest of the metrics are times.
EXACT = ("loss", "grad_norm", "learning_rate", "loss_scale", "num_tokens", "validation_loss")


def write_run(folder: Path, name: str, steps: int) -> Path:
    """Write a run file whose output is ``folder/name``."""
    corpus = folder / "corpus.py"
    corpus.write_text(CORPUS)
    path = folder / f"{name}.toml"
    path.write_text(RUN_FILE.format(output=folder / name, corpus=corpus, cache=folder / "cache", steps=steps))
    return path


def exact_metrics(folder: Path, until: int | None = None) -> dict[tuple[int, str], str]:
    """Every number that has to be reproduced, by step and name, exactly as it is written."""
    return {
        (entry["step"], name): repr(entry[name])
        for entry in read_metrics(folder / METRICS_FILE)
        for name in EXACT
        if name in entry and (until is None or entry["step"] <= until)
    }


def last_step(folder: Path) -> int:
    return max((entry["step"] for entry in read_metrics(folder / METRICS_FILE)), default=0)


def has_saved(folder: Path, step: int) -> bool:
    """True once the checkpoint of a step is there, which is written while the next steps run."""
    return (folder / "checkpoints" / f"step-{step:08d}").is_dir()


def wait_until(condition: Callable[[], bool], started: "Started", limit_s: float = 300.0) -> None:
    """Look again and again, until it is so; fails when the run has ended or the time is up."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert started.process.poll() is None, f"the run ended too early:\n{started.end()}"
        assert time.monotonic() < deadline, "the run did not get there in time"
        select.select([], [], [], 0.005)


# How long an agent of torchrun may stay without processes: between two of its starts it is a few seconds.
_ALONE_S = 45


def run_with_endless_step(arguments: Sequence[str]) -> int:
    """`run_command`, whose ranks from their seventh step on take memory, and do nothing else."""
    from penstock.engine.engine import Engine

    train_batch = Engine.train_batch

    def endless(engine: Engine, *args: Any, **named: Any) -> Any:
        kept: list[bytes | bytearray] = [b""]
        while engine.step == 6:
            kept = [*kept[-9:], bytearray(1 << 20)]
        return train_batch(engine, *args, **named)

    Engine.train_batch = endless  # type: ignore[method-assign]
    return run_command(arguments)


@dataclass(frozen=True)
class Ended:
    """What has ended, how, and what it wrote; the exit code is None for an agent that had to be ended."""

    exit_code: int | None
    out: str
    err: str


@dataclass
class Started:
    """A run under way in processes of its own; everything it started is killed when the `with` block ends.

    `launcher` is the command that starts Penstock, as a module of that name; left out, a process that has imported all
    is forked, and runs `program`.
    """

    arguments: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    launcher: list[str] | None = None
    command: str = "train"
    program: Callable[[Sequence[str]], int] = run_command

    def __enter__(self) -> "Started":
        environ = {**os.environ, **self.environ}
        if self.launcher is None:
            self.process = Forked(self.program, [self.command, *self.arguments], environ=environ)
            return self
        self.process = subprocess.Popen(
            [*self.launcher, "-m", "penstock", self.command, *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()
        if isinstance(self.process, subprocess.Popen):
            for pipe in (self.process.stdout, self.process.stderr):
                if pipe is not None:
                    pipe.close()

    def workers(self) -> list[int]:
        """The processes of the ranks, in their order."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(pid) for pid in path.read_text().split()] if path.exists() else []
        ranks = {pid: rank for pid in children if (rank := _local_rank(pid)) is not None}
        return sorted(ranks, key=lambda pid: ranks[pid])

    def signal(self, number: signal.Signals, ranks: list[int] | None = None) -> None:
        """Signal the command, or some ranks' processes."""
        if ranks is None:
            _signal(self.process.pid, number)
            return
        workers = self.workers()
        for rank in ranks:
            _signal(workers[rank], number)

    def kill(self) -> None:
        """SIGKILL the ranks' processes and the command."""
        if self.process.poll() is not None:
            return
        # Listed first: without the command nobody could tell which they are.
        for pid in [*self.workers(), self.process.pid]:
            _signal(pid, signal.SIGKILL)

    def hold(self, ranks: list[int]) -> None:
        """Stop some ranks' processes where they are; returns when all their threads stand still."""
        pids = [self.workers()[rank] for rank in ranks]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        for pid in pids:
            while not _stands_still(pid):
                select.select([], [], [], 0.001)

    def stop(self) -> str:
        """Kill what is left of the run; returns all it has written to standard error."""
        self.kill()
        return self.process.communicate(timeout=10)[1]

    def end(self, limit_s: float = 300.0) -> Ended:
        """Wait for the run to end."""
        out, err = self.process.communicate(timeout=limit_s)
        return Ended(self.process.returncode, out, err)

    def end_of_agent(self, limit_s: float = 300.0) -> Ended:
        """Wait for the run to end on one of several hosts, whose agent is the command.

        At the end torchrun's agents wait for each other's word. Once in many runs one hears nothing, for five minutes:
        an agent whose processes have long ended is ended as well.
        """
        deadline, alone_since, has_had_workers = time.monotonic() + limit_s, time.monotonic(), False
        while True:
            try:
                out, err = self.process.communicate(timeout=1.0)
                return Ended(self.process.returncode, out, err)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                assert now < deadline, "the run did not end in time"
                if self.workers():
                    has_had_workers, alone_since = True, now
                elif has_had_workers and now > alone_since + _ALONE_S:
                    self.process.kill()
                    return Ended(None, *self.process.communicate())


def run(*arguments: str, command: str = "train") -> Ended:
    with Started(list(arguments), command=command) as started:
        return started.end()


def result_of(ended: Ended) -> dict[str, Any]:
    """The result that a run with --json has printed."""
    assert ended.exit_code == 0, ended.err
    return json.loads(ended.out)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped or gone."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return set(states) <= {"T", "t", "Z", "X"}


def _local_rank(pid: int) -> int | None:
    """The rank by which penstock has named its worker, or which torchrun has put into its environment."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    if name.startswith("penstock-"):
        return int(name.removeprefix("penstock-"))
    return next((int(entry[11:]) for entry in environ if entry.startswith(b"LOCAL_RANK=")), None)
