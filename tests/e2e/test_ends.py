"""Local commands that are stopped or lose a process, whenever it comes: nothing of them is left within ten seconds."""

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.processes.train_worker import TrainLoop
from penstock.engine.folders.runs import RunLock
from penstock.runtime.recovery import EXIT_CODE
from penstock.settings import RunConfig
from tests.e2e.training import Ended, Started, has_saved, last_step, run_with_endless_step, wait_until, write_run
from tests.fork_server import run_without_end
from tests.hugging_face import make_model

LIMIT_S = 10.0
ENDLESS = 1_000_000
LISTENING = "0A"  # in /proc/net/tcp
LOOPBACKS = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

PYTHON = [sys.executable]  # which has imported nothing yet

Act = Callable[[Started], None]


def everything_of(started: Started) -> list[int]:
    """The command's process and all that it has started, in whatever session."""
    found, unseen = [], [started.process.pid]
    while unseen:
        pid = unseen.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            unseen += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def imports_torch(started: Started) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{started.process.pid}/maps").read_text() and not started.workers()


def have_begun(started: Started) -> bool:
    return len(started.workers()) == 2


def signalled(*numbers: signal.Signals, holding: Sequence[int] = ()) -> Act:
    """Signal the command, once or more, while some ranks are stopped; two at the same moment would count as one."""

    def act(started: Started) -> None:
        if holding:
            started.hold(list(holding))
        for number in numbers:
            started.signal(number)
            select.select([], [], [], 0.2)

    return act


def loses_rank_1(started: Started) -> None:
    started.signal(signal.SIGKILL, ranks=[1])


def loses_launcher(started: Started) -> None:
    started.signal(signal.SIGKILL)


def loses_launcher_with_a_stopped_rank(started: Started) -> None:
    started.hold([1])
    started.signal(signal.SIGKILL)


def ends_in_time(started: Started, act: Act) -> Ended:
    """Act, and see that every process is gone within the limit."""
    there = everything_of(started)
    acted_at = time.monotonic()
    act(started)
    # On a machine that others use too, everything takes as many times longer.
    limit_s = LIMIT_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    ended = started.end(limit_s)
    while left := [pid for pid in there if is_alive(pid)]:
        assert time.monotonic() < acted_at + limit_s, f"processes {left} are left"
        select.select([], [], [], 0.01)
    assert "Traceback" not in ended.err, ended.err
    return ended


# A launcher that takes its time between its workers' start and the opening of the store at which they meet.
SLOW = """
import sys, time, torch.distributed
from penstock.cli.main import main
from penstock.cli.processes.train_worker import TrainLoop
store = torch.distributed.TCPStore
torch.distributed.TCPStore = lambda *args, **kwargs: time.sleep(1) or store(*args, **kwargs)
sys.exit(main(sys.argv[3:]))
"""
# A launcher that imports all that its workers need, and goes no further.
IMPORTING = """
import multiprocessing, sys, time
from penstock.cli.main import main
context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: time.sleep(3600) if method == "fork" else context(method)
sys.exit(main(sys.argv[3:]))
"""


@dataclass(frozen=True)
class Case:
    """What happens to a command, its exit code and what it says."""

    act: Act
    exit_code: int
    says: str = ""


TRAINING = {
    "importing": Case(signalled(signal.SIGTERM), -signal.SIGTERM),
    "starting": Case(signalled(signal.SIGTERM, holding=[1]), 128 + signal.SIGTERM),
    "meeting": Case(signalled(signal.SIGTERM, holding=[1]), 128 + signal.SIGTERM),
    "building": Case(loses_rank_1, 1, r"rank 1 \(process \d+\) was killed by SIGKILL; the same command continues"),
    "building, without launcher": Case(loses_launcher, -signal.SIGKILL),
    "training, without launcher": Case(loses_launcher_with_a_stopped_rank, -signal.SIGKILL),
    "training, all stopped": Case(signalled(signal.SIGTERM, holding=[0, 1]), 128 + signal.SIGTERM),
    "training": Case(signalled(signal.SIGINT, signal.SIGINT, holding=[1]), 128 + signal.SIGINT),
}


@pytest.fixture
def emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the commands."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    # PyTorch's own place for what it compiles, which otherwise lies in the temporary folder.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return folder


@pytest.mark.shows(147)
def test_a_run_that_ends_well_leaves_nothing_in_the_temporary_folder(tmp_path: Path, emptied: Path):
    words = [str(write_run(tmp_path, "run", 8)), "--log.tensorboard", "false"]
    with Started(words, launcher=PYTHON) as started:
        ended = started.end()
    assert ended.exit_code == 0, ended.err
    assert list(emptied.iterdir()) == []


@pytest.mark.shows(147, 149)
@pytest.mark.parametrize("moment", TRAINING)
def test_training_ends_at_once_whenever_it_is_stopped_or_loses_a_process(tmp_path: Path, emptied: Path, moment: str):
    file, output, case = write_run(tmp_path, "run", ENDLESS), tmp_path / "run", TRAINING[moment]
    has_come: dict[str, Callable[[Started], bool]] = {
        "importing": imports_torch,
        "starting": have_begun,
        "meeting": have_begun,
        "building": lambda _: (output / "run.toml").exists(),
        "training": lambda _: last_step(output) > 0,
    }
    launchers = {
        "importing": [*PYTHON, "-c", IMPORTING],
        "starting": [*PYTHON, "-c", SLOW],
        "training, without launcher": PYTHON,
    }
    launcher = launchers.get(moment)
    with Started([str(file), "--parallel.timeout_s", "600"], launcher=launcher) as started:
        wait_until(lambda: has_come[moment.split(",")[0]](started), started)
        if moment == "training":
            listens_on_the_loopback_alone(everything_of(started))
        ended = ends_in_time(started, case.act)
    assert ended.exit_code == case.exit_code, ended.err
    assert re.search(case.says, ended.err), ended.err
    # PyTorch's own words come where its variables came too late for it: in a fork of a process that has imported it.
    assert launcher is None or "frame #" not in ended.err, ended.err
    assert list(emptied.iterdir()) == []


@pytest.mark.parametrize(("pp", "exit_code"), [("1", EXIT_CODE), ("2", 128 + signal.SIGTERM)])
def test_one_signal_ends_a_step_that_does_not_end_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, pp: str, exit_code: int
):
    output, words = tmp_path / "run", [str(write_run(tmp_path, "run", 8)), "--parallel.pp", pp]
    words = [*words, "--parallel.shutdown_timeout_s", "1"]
    with Started(words, program=run_with_endless_step) as started:
        wait_until(lambda: last_step(output) == 6 and has_saved(output, 5), started)
        ended = ends_in_time(started, signalled(signal.SIGTERM))
    assert ended.exit_code == exit_code, ended.err
    assert re.search(r"rank 0, step 6: [^\n]*; asked to end, and not done within 1 s\n", ended.err), ended.err
    with Started(words) as started:
        ended = started.end()
    assert (ended.exit_code, last_step(output)) == (0, 8), ended.err
    assert "after step 5" in ended.out


def listens_on_the_loopback_alone(pids: Sequence[int]) -> None:
    """Every listening socket of the processes has an address of the loopback; there are at least as many as those."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(descriptor.readlink()))
    rows = [row.split() for net in ("tcp", "tcp6") for row in Path(f"/proc/net/{net}").read_text().splitlines()[1:]]
    addresses = [row[1].split(":")[0] for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in inodes]
    assert len(addresses) >= len(pids) >= 3
    assert set(addresses) <= LOOPBACKS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(folder)
    lines = [json.dumps({"tokens": [1 + number % 9, 2, 3]}) for number in range(9999)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.shows(147)
@pytest.mark.parametrize(
    ("command", "moment", "case"),
    [
        ("score", imports_torch, Case(signalled(signal.SIGINT), 130)),
        ("score", have_begun, Case(loses_rank_1, 1, r"rank 1 \(process \d+\) was killed by SIGKILL")),
        ("generate", have_begun, Case(signalled(signal.SIGINT, holding=[1]), 128 + signal.SIGINT)),
    ],
)
def test_scoring_and_generation_end_as_fast(
    model: Path, emptied: Path, command: str, moment: Callable[[Started], bool], case: Case
):
    given = ["--max-new-tokens", "8", "--file"] if command == "generate" else []
    words = [str(model), *given, str(model / "prompts.jsonl"), "--pp", "2", "--timeout", "600"]
    words += ["--output", str(emptied.with_name("output.jsonl"))]
    launcher = [*PYTHON, "-c", IMPORTING] if moment is imports_torch else None
    # However late the signal comes, the command has not ended.
    with Started(words, launcher=launcher, command=command, program=run_without_end) as started:
        wait_until(lambda: moment(started), started)
        ended = ends_in_time(started, case.act)
    assert ended.exit_code == case.exit_code, ended.err
    assert re.search(case.says, ended.err), ended.err
    assert list(emptied.iterdir()) == []


def limited(size: int) -> Callable[[Path], object]:
    """What lets a disk seem full after files of so many bytes."""
    return lambda output: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def at_start(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act as soon as the run has its folder."""

    class Acting(RunLock):
        def __init__(self, config: RunConfig) -> None:
            super().__init__(config)
            act()

    monkeypatch.setattr("penstock.cli.processes.train_worker.RunLock", Acting)


def at_save(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act before each checkpoint is saved."""
    save = TrainLoop._save

    def acting(loop: TrainLoop, wait: bool) -> None:
        act()
        save(loop, wait)

    monkeypatch.setattr(TrainLoop, "_save", acting)


@pytest.mark.shows(147)
@pytest.mark.parametrize(
    ("moment", "act", "says"),
    [
        (at_start, shutil.rmtree, "{0}/checkpoints cannot be written: [^\n]+"),
        (at_start, limited(0), "{0}/[^\n]+: [^\n]+"),
        (at_save, shutil.rmtree, "rank 0: {0}/[^\n]+: no such file or directory"),
        (at_save, limited(4096), "rank 0: {0}/checkpoints/[^\n]+: file too large"),
    ],
    ids=["deleted at the start", "full at the start", "deleted at a save", "full at a save"],
)
def test_a_folder_deleted_and_a_full_disk_are_one_sentence_with_the_path(
    moment: Callable[[pytest.MonkeyPatch, Callable[[], object]], None],
    act: Callable[[Path], object],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    output, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    moment(monkeypatch, lambda: act(output))
    try:
        assert main(["train", str(write_run(tmp_path, "run", 8)), "--parallel.pp", "1"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert re.fullmatch(rf"penstock: process 0: [^\n]*{says.format(output)}\n", err), err
    assert output.exists() == (act is not shutil.rmtree), "it is not made again"
