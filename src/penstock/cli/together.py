"""One process of a group at work: it meets the others, refuses what any of them must refuse, and ends without waiting.

What training, scoring and generating have in common when they run on several processes.
"""

import faulthandler
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from penstock.cli.launch import (
    FAILED,
    REFUSED,
    Group,
    agree,
    follow_launcher,
    is_first_to_tell,
    is_told,
    join,
    stay_for_others,
)
from penstock.parallel.host import on_all_ranks
from penstock.runtime import PipelineError
from penstock.settings import ConfigError, Device, differences

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

T = TypeVar("T")


def work_together(group: Group, num_threads: int, timeout_s: float, work: Callable[["Store"], None]) -> int:
    """Do `work`, given the store where the processes of `group` meet; returns the command's exit code.

    A user's mistake is told by one process for all, in one sentence. When a peer fails, every process tells where it
    was and ends at once: nothing that could wait for the peer is called any more.
    """
    follow_launcher()
    if group.world_size > 1:
        faulthandler.enable()  # what crashes below Python says where it was
    torch.set_num_threads(num_threads)
    store = join(group, timeout_s)
    try:
        work(store)
        if dist.is_initialized():
            dist.destroy_process_group()
    except ValueError as error:
        if is_first_to_tell(store):
            print(f"penstock: {error}", file=sys.stderr)
        stay_for_others(store, group)
        return _end(group, REFUSED)
    except Exception as error:
        if not is_told(store):
            _tell_failure(group, error)
        return _end(group, FAILED)
    return _end(group, 0)


def refuse_differing(store: "Store", group: Group, key: str, ours: Mapping[str, Any]) -> None:
    """Refuse values that are not the same on every rank.

    Raises:
        ConfigError: on every process; the message names what differs, and on which rank.
    """
    told = agree(store, group, key, ours)
    for rank, theirs in enumerate(told):
        changed = differences(theirs, told[0], here=f"on rank {rank}", there="on rank 0")
        if changed:
            raise ConfigError(f"all ranks of a run need the same settings, but these differ: {'; '.join(changed)}")


def together(store: "Store", group: Group, key: str, work: Callable[[], T]) -> T:
    """Do `work` on every process, and go on only if no process has refused: all of them get the error of the first.

    Raises:
        ValueError: on every process, if some process's work did.
    """

    def gather(error: Any) -> list[Any]:
        return [theirs["refused"] for theirs in agree(store, group, key, {"refused": error})]

    return on_all_ranks(work, gather, otherwise=ConfigError, catch=ValueError, message="{error}")


def choose_device(store: "Store", group: Group, wanted: str) -> Device:
    """Settle "auto": "cuda" if every rank finds a GPU of its own on its machine, else "cpu"; the same on all ranks.

    Raises:
        ConfigError: GPUs are demanded, and some rank finds none.
    """
    found = torch.cuda.is_available() and torch.cuda.device_count() > group.local_rank
    lacking = [rank for rank, told in enumerate(agree(store, group, "gpu", {"found": found})) if not told["found"]]
    if wanted == "cuda" and lacking:
        raise ConfigError(
            f'parallel.device = "cuda", but rank {lacking[0]} finds no GPU of its own; start fewer ranks a machine, '
            'or set it to "cpu"'
        )
    return "cpu" if wanted == "cpu" or lacking else "cuda"


def initialise(store: "Store", group: Group, device: str, timeout_s: float) -> None:
    """Make the default process group, from which the engine makes its own."""
    if device == "cuda":
        torch.cuda.set_device(group.local_rank)
    if group.world_size == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore("penstock/groups", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _tell_failure(group: Group, error: Exception) -> None:
    """One sentence where a peer has failed or is silent; a traceback for what nobody has foreseen."""
    expected = isinstance(error, PipelineError) or _is_of_backend(error)
    if not expected or os.environ.get("PENSTOCK_TRACEBACK"):
        traceback.print_exception(error)
    # What comes from below the engine does not say where in the run it happened.
    where = "" if isinstance(error, PipelineError) else "; ".join([*getattr(error, "__notes__", []), ""])
    print(f"penstock: process {group.rank}: {where}{_first_sentence(error)}", file=sys.stderr)


def _first_sentence(error: Exception) -> str:
    """What an error says, without the place in a backend's source and the backend's advice."""
    return re.sub(r"^\[\S+\] |\. This is typically[^)]*", "", " ".join(str(error).split()))


def _is_of_backend(error: Exception) -> bool:
    """Whether a collective failed; gloo has no error of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _end(group: Group, code: int) -> int:
    """End a process of its own now.

    A regular end would wait for threads and groups that wait for a peer, and a thread that is inside a backend while
    the interpreter goes away would abort a process that has done all its work.
    """
    if group.world_size == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
