"""Processes of a run: the group that torchrun, Slurm or Kubernetes has made, or local workers of our own."""

import ctypes
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LOOPBACK = "127.0.0.1"
# Exit codes of the command.
FAILED, REFUSED = 1, 2
# Set for workers that we launched ourselves.
_LAUNCHER_PID = "PENSTOCK_LAUNCHER_PID"
_ENDED_WELL = "PENSTOCK_ENDED_WELL"
_AGENTS_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# The store's counter of processes that have reported a user's mistake.
_REPORTED = "penstock/reported"
# How long a process that fails waits for the store's answer.
_ANSWER_LIMIT_S = 5.0
# Stopped workers finish their step and save; only one that hangs is killed.
_SAVE_LIMIT_S = 600


@dataclass(frozen=True)
class Group:
    """This process's place in the run, and the address at which all meet; `origin` names the maker of the group."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    origin: str

    @classmethod
    def alone(cls) -> "Group":
        """The group of a run of one process."""
        return cls(rank=0, world_size=1, local_rank=0, address=LOOPBACK, port=0, origin="this process")


def find_group(environ: Mapping[str, str]) -> Group | None:
    """Find the group that this process was started in, if any.

    torchrun and Kubernetes' training operators set RANK and WORLD_SIZE; Slurm's srun sets variables of its own.

    Raises:
        ValueError: such a variable is set but is not a number, or related ones are missing.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Group(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", "0"),
            address=_text(environ, "MASTER_ADDR"),
            port=_number(environ, "MASTER_PORT"),
            origin="this launch" if _LAUNCHER_PID in environ else "the group this process was started in",
        )
    # A Slurm batch script has a rank as well, but only steps started by srun have a step's variables.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        job = _number(environ, "SLURM_JOB_ID", "0")
        return Group(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            address=environ.get("MASTER_ADDR") or _first_host(_text(environ, "SLURM_STEP_NODELIST")),
            # Every process of a job must find the same port before they meet, so the job's number decides.
            port=_number(environ, "MASTER_PORT", str(20000 + job % 20000)),
            origin="this Slurm step",
        )
    return None


def find_group_of(sizes: Mapping[str, int]) -> tuple[Group | None, int]:
    """Find the group of this process, if any, for a layout with these sizes by axis; also returns their product.

    Raises: ValueError as `find_group` does, and for a group of another size.
    """
    group, world_size = find_group(os.environ), math.prod(sizes.values())
    if group is not None and group.world_size != world_size:
        words = " x ".join(f"--{axis} {size}" for axis, size in sizes.items())
        raise ValueError(
            f"{group.origin} has {group.world_size} processes, but {words} is {world_size}; make them equal"
        )
    return group, world_size


def launch(
    arguments: Sequence[str],
    num_workers: int,
    num_threads: int,
    module: str = "penstock.cli.train",
    again: str = "continues from the newest checkpoint",
    environ: Mapping[str, str] | None = None,
) -> int:
    """Start the workers of a command on this machine, wait for them, and return the exit code of the command.

    `arguments` are those of the command, whose `module` every worker runs as a script and which reads them again.
    `again` ends the sentence "the same command ...", printed after a worker was killed. `environ` is for the workers
    alone. SIGTERM and SIGINT are passed on; the workers of a training run then finish their step, save and end well.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The workers report what went wrong themselves, in a sentence; the agent would add pages.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_SAVE_LIMIT_S,
    )
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, _process_kept():
        ended_well = Path(folder) / "ended_well"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        os.environ |= {**(environ or {}), _LAUNCHER_PID: str(os.getpid()), _ENDED_WELL: str(ended_well)}
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _explain(error, again)
        except SignalException as error:
            if ended_well.exists():
                return 0
            print(f"penstock: stopped by {error.sigval.name}; the same command {again}", file=sys.stderr)
            return 128 + error.sigval
    return 0


@contextmanager
def _process_kept() -> Iterator[None]:
    """Restore this process's environment and signal handlers, which workers inherit and the agent replaces.

    This process may launch again; workers that found themselves named as their launcher would take it for dead.
    """
    environ = dict(os.environ)
    signals = {number: signal.getsignal(number) for number in _AGENTS_SIGNALS}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= environ
        if threading.current_thread() is threading.main_thread():
            for number, handler in signals.items():
                signal.signal(number, handler)


def follow_launcher() -> None:
    """In a worker: get SIGTERM when the launcher dies, so that no worker is left behind. Works on Linux only."""
    launcher = os.environ.get(_LAUNCHER_PID)
    if launcher is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def report_end() -> None:
    """In a worker: signal to the launcher that the run is saved and over."""
    path = os.environ.get(_ENDED_WELL)
    if path is not None:
        Path(path).touch()


def agree(store: "Store", group: Group, key: str, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Exchange values among all processes, as JSON; returns them by rank, the same on every process."""
    place = f"penstock/{key}"
    store.set(f"{place}/{group.rank}", json.dumps(ours, sort_keys=True))
    values = [json.loads(store.get(f"{place}/{rank}")) for rank in range(group.world_size)]
    if store.add(f"{place}/num_read", 1) == group.world_size:
        store.set(f"{place}/all_have_read", "")
    if group.rank == 0:
        # The store may live in this process, which may end because of what it read: not before all have read it.
        store.get(f"{place}/all_have_read")
    return values


def reports_first(store: "Store") -> bool:
    """Return whether no other process has reported a user's mistake yet; all of them may find the same one."""
    # The store may have gone with a process that has already reported.
    return _asked(lambda: store.add(_REPORTED, 1) == 1, if_gone=False, if_silent=True)


def stay_for_others(store: "Store", group: Group) -> None:
    """On rank 0, with which the store may end: wait briefly until all have asked whether they report first."""
    deadline = time.monotonic() + _ANSWER_LIMIT_S
    while group.rank == 0 and time.monotonic() < deadline:
        if _asked(lambda: store.add(_REPORTED, 0) >= group.world_size, if_gone=True, if_silent=True):
            return
        time.sleep(0.01)


def is_reported(store: "Store") -> bool:
    """Return whether some process has reported a user's mistake, so that other errors merely follow from its end."""
    # The process that held the store need not have reported anything.
    return _asked(lambda: store.check([_REPORTED]), if_gone=False, if_silent=False)


def _asked(question: Callable[[], bool], *, if_gone: bool, if_silent: bool) -> bool:
    """Ask the store in a thread, for at most `_ANSWER_LIMIT_S`: a process about to end may be cut off from it."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError:
            answers.append(if_gone)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_LIMIT_S)
    return answers[0] if answers else if_silent


def _explain(error: Any, again: str) -> int:
    """Report workers that could not explain themselves; returns the exit code of the failed run."""
    asked_to_end = -signal.SIGTERM
    killed = [
        (rank, died) for rank, died in error.failures.items() if died.exitcode < 0 and died.exitcode != asked_to_end
    ]
    for rank, died in killed:
        print(
            f"penstock: rank {rank} (process {died.pid}) was killed by {signal.Signals(-died.exitcode).name}; "
            f"the same command {again}",
            file=sys.stderr,
        )
    # A mistake that one worker has reported makes the others fail as well.
    refused = any(failure.exitcode == REFUSED for failure in error.failures.values())
    return REFUSED if refused else FAILED


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default) if default is not None else _text(environ, name)
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"the environment variable {name} = {text!r} is not a number")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise ValueError(f"RANK or SLURM_PROCID is set, but not {name}; start the run with torchrun, srun or plainly")
    return environ[name]


def _first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: ``node[03-07,9],other`` gives ``node03``."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\](.*?)(?:,|$))?", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes!r} names no host")
    return found[1] + (found[2] or "") + (found[3] or "")
