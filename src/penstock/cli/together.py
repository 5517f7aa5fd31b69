"""One process of a group at work: it meets the others, refuses what any of them must refuse, and ends without waiting.

Training, scoring, generation and the test of links share this when they run on several processes.
"""

import faulthandler
import os
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from penstock.cli.launch import (
    FAILED,
    REFUSED,
    Group,
    agree,
    follow_launcher,
    is_first_to_tell,
    is_told,
    stay_for_others,
)
from penstock.parallel.host import on_all_ranks
from penstock.runtime import PipelineError
from penstock.settings import ConfigError, Device, differences

T = TypeVar("T")

# Set by torchrun where its agents, which outlive the workers, lend them their store.
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PLACE = "penstock/rounds"
_POLL_S = 0.01
# How long rank 0 waits for one rank's word before it looks whether the rank it has greeted was of an earlier round.
_PATIENCE_S = 0.2


def work_together(group: Group, num_threads: int, timeout_s: float, work: Callable[[Store], None]) -> int:
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


def refuse_differing(store: Store, group: Group, key: str, ours: Mapping[str, Any]) -> None:
    """Refuse values that are not the same on every rank.

    Raises:
        ConfigError: on every process; the message names what differs, and on which rank.
    """
    told = agree(store, group, key, ours)
    for rank, theirs in enumerate(told):
        changed = differences(theirs, told[0], here=f"on rank {rank}", there="on rank 0")
        if changed:
            raise ConfigError(f"all ranks of a run need the same settings, but these differ: {'; '.join(changed)}")


def together(store: Store, group: Group, key: str, work: Callable[[], T]) -> T:
    """Do `work` on every process, and go on only if no process has refused: all of them get the error of the first.

    Raises:
        ValueError: on every process, if some process's work did.
    """

    def gather(error: Any) -> list[Any]:
        return [theirs["refused"] for theirs in agree(store, group, key, {"refused": error})]

    return on_all_ranks(work, gather, otherwise=ConfigError, catch=ValueError, message="{error}")


def choose_device(store: Store, group: Group, wanted: str) -> Device:
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


def initialise(store: Store, group: Group, device: str, timeout_s: float) -> None:
    """Make the default process group, from which the engine makes its own."""
    if device == "cuda":
        torch.cuda.set_device(group.local_rank)
    if group.world_size == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=PrefixStore("penstock/groups", store),
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


def join(group: Group, timeout_s: float) -> Store:
    """Meet the other processes of the group at a store that all share, and no process of an earlier start does."""
    if group.world_size == 1:
        return HashStore()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = group.address, str(group.port)
    meeting = rendezvous("env://", rank=group.rank, world_size=group.world_size, timeout=timedelta(seconds=timeout_s))
    store, _, _ = next(meeting)
    if os.environ.get(_AGENTS_STORE) != str(True):
        return store
    return agree_on_round(store, group.rank, group.world_size, timeout_s)


# A group that torchrun restarts keeps one store for all its rounds: what the processes of an earlier round have left
# there must not be taken for what those of this round say.


class Missing(ValueError):
    """Some processes of the group did not come in time."""


def agree_on_round(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of a store that belongs to the processes that call this now, and to no earlier ones.

    Each process leaves a word that nobody has used before. Rank 0 answers every word it finds with the round's name,
    also those that were left by processes which are no more; only a process that lives thanks for it.

    Raises: Missing on rank 0, naming the ranks that did not come; TimeoutError on the others.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid.uuid4().hex
        _greet_all(store, name, set(range(1, world_size)), deadline)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_PLACE}/word/{rank}", word)
        if not _appears(store, f"{_PLACE}/answer/{word}", deadline):
            raise TimeoutError(f"rank {rank} was not answered by rank 0 within {timeout_s:g} s")
        name = store.get(f"{_PLACE}/answer/{word}").decode()
        store.set(f"{_PLACE}/{name}/thanks/{rank}", "")
    return PrefixStore(f"{_PLACE}/{name}", store)


def _greet_all(store: Store, name: str, missing: set[int], deadline: float) -> None:
    while missing:
        for rank in sorted(missing):
            word = f"{_PLACE}/word/{rank}"
            if store.check([word]):
                store.set(f"{_PLACE}/answer/{store.get(word).decode()}", name)
                if _appears(store, f"{_PLACE}/{name}/thanks/{rank}", min(deadline, time.monotonic() + _PATIENCE_S)):
                    missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise Missing(f"rank(s) {', '.join(map(str, sorted(missing)))} of the run did not come in time")
        time.sleep(_POLL_S)


def _appears(store: Store, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
