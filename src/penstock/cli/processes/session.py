"""One process of a group: it meets the others, refuses input that any of them refuses, and ends without waiting.

Training, scoring, generation and the test of links share this when they run on several processes.
"""

import faulthandler
import hashlib
import json
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.main import (
    CLOSED,
    FAILED,
    REFUSED,
    STOPPED,
    WORKER_DONE,
    in_plain_words,
    lacks_memory,
    printable,
    say,
    sentence,
)
from penstock.cli.output import NAME
from penstock.cli.processes.machine import check_open_files
from penstock.cli.processes.meeting import Group, listen, reason, store_at
from penstock.engine.checkpoint.manifest import CheckpointError
from penstock.parallel.device import agree_on_device
from penstock.parallel.host import ProcessEnded, answer_of_store, on_all_ranks, refuse_other_software
from penstock.runtime import CallbackError, PipelineError, StepError
from penstock.runtime.errors import is_of_link
from penstock.settings import ConfigError, ParallelConfig, differences
from penstock.settings.declare import words_of

# ---- Several pipelines that share the work of one command, each a group of its own, and hand results to one writer


# A store takes values of up to 8 MiB.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Pipelines:
    """This process's pipeline, number `index` of `count`; the processes of all of them meet at `store`.

    Each sends values of JSON to the process that writes, in an order of its own.
    """

    index: int
    count: int
    store: Store

    @classmethod
    def of(cls, store: Store, group: Group, count: int) -> Self:
        """Divide the processes of a group evenly, consecutive ones to one pipeline."""
        return cls(group.rank * count // group.world_size, count, store)

    def world(self, group: Group) -> tuple[Store, Group]:
        """This pipeline's own group, and its part of the store."""
        size = group.world_size // self.count
        world = replace(group, rank=group.rank - self.index * size, world_size=size)
        return PrefixStore(f"penstock/pipeline/{self.index}", self.store), world

    def send(self, value: Any) -> None:
        """Send a value to the process that writes."""
        text = json.dumps(value)
        pieces = [text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES)]
        for piece in (str(len(pieces)), *pieces):
            self.store.queue_push(f"penstock/sent/{self.index}", piece)

    def has(self, index: int) -> bool:
        """Return whether that pipeline has sent a value that is not received yet."""
        return self.store.queue_len(f"penstock/sent/{index}") > 0

    def receive(self, index: int, what: str) -> Any:
        """Receive the next value of that pipeline; `what` describes it in messages.

        Raises: PipelineError if it does not come in time.
        """
        key = f"penstock/sent/{index}"
        try:
            num_pieces = int(self.store.queue_pop(key))
            return json.loads(b"".join(self.store.queue_pop(key) for _ in range(num_pieces)))
        except RuntimeError as error:
            raise PipelineError(f"no {what} in time") from error


# ---- The meeting of a run's processes: at the store that rank 0 opens, in the round of one start, under its secret


# Set by torchrun where its agents, which outlive the workers, lend them their store.
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SECRET = "PENSTOCK_SECRET"
"""The environment variable with a secret of the run, the same on all its hosts."""
_PLACE = "penstock/rounds"
_ATTEMPT_S = 5.0
# How long a process has at least, while it starts, for what the others then wait for: to import libraries and to read a
# model's files takes some of them longer than any message may.
_PREPARING_S = 120.0


def join(group: Group, timeout_s: float, secret: str = "") -> Store:
    """Meet the other processes of the group at a store that no process of an earlier start shares.

    Where there is a secret of the run, all keys lie under it: who lacks it cannot guess them.

    Raises: ValueError naming what did not come in time, or where the secrets of the hosts differ, or rank 0 cannot open
        the store.
    """
    if group.world_size == 1:
        return HashStore()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = group.address, str(group.port)
    deadline = time.monotonic() + timeout_s
    store = agree_on_round(_store_of(group, timeout_s), group.rank, group.world_size, deadline - time.monotonic())
    # It says whether secrets are equal, and not where the keys lie.
    signs = Meeting(store, group).exchange("secret", hashlib.blake2b(os.fsencode(secret), person=b"sign").hexdigest())
    if rank := next((rank for rank, sign in enumerate(signs) if sign != signs[0]), None):
        raise ValueError(
            f"{SECRET} of rank {rank} is not that of rank 0; set it to the same text on all hosts, or on none"
        )
    store.set_timeout(timedelta(seconds=max(timeout_s, _PREPARING_S)))
    return PrefixStore(hashlib.blake2b(os.fsencode(secret)).hexdigest(), store) if secret else store


def secret_of(environ: Mapping[str, str]) -> str:
    """The secret of the run, or an empty text where it has none.

    Raises: ValueError if it is given and empty, as by a program that could not make one.
    """
    if environ.get(SECRET) == "":
        raise ValueError(f"{SECRET} is empty; give it a text that is hard to guess, or leave it out")
    return environ.get(SECRET, "")


def _store_of(group: Group, timeout_s: float) -> Store:
    """The store that rank 0 opens, or torchrun's agents lend."""
    if group.rank == 0 and os.environ.get(_AGENTS_STORE) != str(True):
        store = store_at(listen(group.address, group.port))
        store.set_timeout(timedelta(seconds=timeout_s))
        return store
    deadline = time.monotonic() + timeout_s
    _reach(group, deadline)
    answers = queue.SimpleQueue[Store | None]()

    def connect() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            answers.put(TCPStore(group.address, group.port, is_master=False, wait_for_workers=False, timeout=limit))
        except RuntimeError:
            answers.put(None)

    # Whatever else may listen there need never answer, and PyTorch itself would wait for it without a limit.
    threading.Thread(target=connect, daemon=True).start()
    store = None
    with suppress(queue.Empty):
        store = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    if store is None:
        place = f"{group.address}:{group.port}"
        raise ValueError(f"what listens at {place} is not the run's store; is MASTER_PORT another program's?")
    return store


def _reach(group: Group, deadline: float) -> None:
    """Wait until something listens where the store should be; PyTorch itself would print a page at each attempt."""
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((group.address, group.port), max(0.1, min(left, _ATTEMPT_S))).close()
            return
        except OSError as error:
            if left <= 0:
                raise ValueError(
                    f"rank {group.rank} found no store at {group.address}:{group.port} in time ({reason(error)}); "
                    "rank 0 opens it at MASTER_ADDR and MASTER_PORT, which all hosts must reach"
                ) from None
        time.sleep(min(0.1, max(0.0, left)))


# A group that torchrun restarts keeps one store for all its rounds: values that an earlier round left there must not be
# taken for this round's.


def agree_on_round(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """The part of a store that belongs to the processes that call this now, and to no earlier ones.

    Each process sends rank 0 a unique word, is answered with the round's name, and sends that back. Rank 0 answers the
    words of processes that have ended, too; only a live one sends the name.

    Raises: ValueError for what did not come in time; on rank 0 it names the ranks that did not arrive.
    """
    deadline = time.monotonic() + timeout_s
    if rank > 0:
        word = uuid.uuid4().hex
        store.queue_push(_PLACE, f"{rank} {word}")
        try:
            store.wait([f"{_PLACE}/{word}"], _until(deadline))
        except RuntimeError:
            raise ValueError(f"rank {rank} was not answered by rank 0 of the run in time") from None
        name = store.get(f"{_PLACE}/{word}").decode()
        store.queue_push(_PLACE, f"{rank} {name}")
        return PrefixStore(f"{_PLACE}/{name}", store)
    name, missing = uuid.uuid4().hex, set(range(1, world_size))
    while missing:
        store.set_timeout(_until(deadline))
        try:
            sender, word = store.queue_pop(_PLACE).decode().split()
        except RuntimeError:
            ranks = ", ".join(map(str, sorted(missing)))
            raise ValueError(f"rank(s) {ranks} of the run did not come in time") from None
        if word == name:
            missing.discard(int(sender))
        else:
            store.set(f"{_PLACE}/{word}", name)
    return PrefixStore(f"{_PLACE}/{name}", store)


def _until(deadline: float) -> timedelta:
    """The time that is left; none at all would mean no limit."""
    return timedelta(seconds=max(0.01, deadline - time.monotonic()))


T = TypeVar("T")

# Where the store counts processes that have met a user's mistake, and where each leaves that it asks nothing more.
_REPORTED, _WRITTEN, _DONE = "penstock/reported", "penstock/report_written", "penstock/done_with_store"
# How long a process that fails waits for the store's answer.
_ANSWER_LIMIT_S = 3.0


def work_together(group: Group, num_threads: int, timeout_s: float, work: Callable[["Meeting"], int | None]) -> int:
    """Do `work`, given the meeting of the processes of `group`; returns its exit code, or the command's.

    One process reports a user's mistake for all, in one sentence. When a peer fails, every process reports where it
    was and ends at once: nothing is called any more that could wait for the peer.
    """
    if group.world_size > 1:
        check_open_files(group.world_size)
        # Python's own handler would wait for a backend that waits for a peer.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.enable()  # a crash below Python prints its place
    torch.set_num_threads(num_threads)
    store = join(group, timeout_s, secret_of(os.environ))
    meeting = Meeting(store, group)
    threading.excepthook = _on_thread_failure
    try:
        if not group.is_ours:
            refuse_other_software(partial(meeting.exchange, "versions"))
        code = work(meeting) or 0
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
    except ValueError as error:
        if is_first := reports_first(store):
            say(sentence(error))
        leave_together(store, group, is_first)
        return _end(group, REFUSED)
    except Exception as error:
        cause = _cause(error)
        if isinstance(cause, BrokenPipeError) and cause.filename == NAME:
            # The reader of standard output (head, less) has closed the pipe: nobody is left to be told.
            leave_together(store, group, has_reported=True)
            return _end(group, CLOSED)
        # Other errors merely follow from the end of a process that has reported a user's mistake. That which held the
        # store need not have reported anything.
        if answer_of_store(lambda: store.check([_REPORTED]), _ANSWER_LIMIT_S):
            leave_together(store, group, has_reported=False)
        else:
            _report_failure(group, error)
        return _end(group, FAILED)
    except SystemExit as ending:
        # A callback, a loss or a library took the process for its own.
        say(f"process {group.rank} was ended by SystemExit({ending.code!r}) before its work was done")
        return _end(group, FAILED if ending.code else STOPPED)
    return _end(group, code)


@dataclass(frozen=True)
class Meeting:
    """The processes of a group at their store. All of them make the same calls, each with a key of its own."""

    store: Store
    group: Group

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Exchange values among all processes, as JSON; returns them by rank."""
        store, place, world_size = self.store, f"penstock/{key}", self.group.world_size
        store.set(f"{place}/{self.group.rank}", json.dumps(value, sort_keys=True))
        if self.group.rank == 0:
            # Most ranks say the same, which is then passed on once: none need read ten thousand values.
            texts = [store.get(f"{place}/{rank}").decode() for rank in range(world_size)]
            numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
            store.set(f"{place}/all", json.dumps([list(numbers), [numbers[text] for text in texts]]))
        different, by_rank = json.loads(store.get(f"{place}/all"))
        values = [json.loads(different[number]) for number in by_rank]
        if store.add(f"{place}/num_read", 1) == world_size:
            store.set(f"{place}/all_have_read", "")
        if self.group.rank == 0:
            # The store may live in this process, which may end because of what it read: not before all have read it.
            store.get(f"{place}/all_have_read")
        return values

    def refuse_differing(self, key: str, values: Mapping[str, Any]) -> None:
        """Refuse values that differ between ranks.

        Raises: ConfigError on every process; the message names what differs, and on which rank.
        """
        views = self.exchange(key, values)
        for rank, view in enumerate(views):
            if changed := differences(view, views[0], here=f"on rank {rank}", there="on rank 0"):
                raise ConfigError(f"all ranks of a run need the same settings, but these differ: {'; '.join(changed)}")

    def together(self, key: str, work: Callable[[], T]) -> T:
        """Do `work` on every process; if any process refuses, all raise the error of the first that did.

        Raises: ValueError on every process, if some process's work raised one, or could not use a file.
        """

        def refusing() -> T:
            try:
                return work()
            except OSError as error:
                raise error if isinstance(error, ValueError) else ConfigError(sentence(error)) from None

        group = partial(self.exchange, key)
        return on_all_ranks(refusing, group, otherwise=ConfigError, catch=ValueError, message="{error}")

    def choose_device(self, parallel: ParallelConfig) -> ParallelConfig:
        """Give each process its device, as `agree_on_device` does; returns the settings with the one for "auto".

        Raises: ConfigError on all of them where that is not possible.
        """
        group = partial(self.exchange, "device")
        device = agree_on_device(parallel.device, group, self.group.rank, parallel.transport)
        return replace(parallel, device="cuda" if device.type == "cuda" else "cpu")


def initialise(store: Store, group: Group, parallel: ParallelConfig) -> None:
    """Create the default process group, from which the engine creates its own; the device has been chosen."""
    if group.world_size == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if parallel.device == "cuda" and parallel.transport != "host" else "gloo",
        store=PrefixStore("penstock/groups", store),
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=parallel.timeout_s),
    )


def _cause(error: Exception) -> BaseException | None:
    """The exception that this process raised itself, where a step or callback failed here."""
    return error.__cause__ if isinstance(error, StepError | CallbackError) else error


def _report_failure(group: Group, error: Exception) -> None:
    """Print one sentence if a peer has failed or is silent, and a traceback for an unexpected error."""
    cause = _cause(error)
    is_of_file = isinstance(cause, OSError) and cause.filename is not None
    is_of_class = isinstance(cause, PipelineError | CheckpointError | ProcessEnded)
    expected = is_of_class or is_of_file or is_of_link(cause) or lacks_memory(cause)
    if not expected or os.environ.get("PENSTOCK_TRACEBACK"):
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    # Errors from below the engine do not say where in the run they happened; a file that takes no more says all.
    says_all = isinstance(error, PipelineError) or is_of_file
    where = "" if says_all else "; ".join([*getattr(error, "__notes__", []), ""])
    what = sentence(error) if isinstance(error, OSError) else _first_sentence(error)
    say(f"process {group.rank}: {where}{what}")


def reports_first(store: "Store") -> bool:
    """Return whether no other process has reported a user's mistake yet; all of them may find the same one."""
    # The store may have gone with a process that has already reported.
    return answer_of_store(lambda: store.add(_REPORTED, 1) == 1, _ANSWER_LIMIT_S, if_silent=True)


def leave_together(store: "Store", group: Group, has_reported: bool) -> None:
    """Wait briefly until the report is written, since once one process has ended the others are soon ended, too.

    Then ask the store nothing more; rank 0, with which it may end, waits briefly until that holds for all: a process
    whose store goes while it asks prints a page of torch's own beside the one sentence.
    """

    limit = timedelta(seconds=_ANSWER_LIMIT_S)
    with suppress(RuntimeError):  # the store has gone, or does not answer
        if has_reported:
            store.set(_WRITTEN, "")
        store.wait([_WRITTEN], limit)
    with suppress(RuntimeError):
        store.set(f"{_DONE}/{group.rank}", "")
        if group.rank == 0:
            store.wait([f"{_DONE}/{rank}" for rank in range(group.world_size)], limit)


def _on_thread_failure(failure: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread's error; of TensorBoard's thread the process itself raises it again."""
    if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(failure)


def _first_sentence(error: Exception) -> str:
    """The message of an error, without the place in a backend's source, the backend's advice and the store's keys.

    Under keys lies the secret of the run, which no log should hold.
    """
    text = re.sub(r"^\[\S+\] |\. This is typically[^)]*", "", in_plain_words(" ".join(words_of(error).split())))
    return re.sub(r"wait timeout after (\d+)ms, keys: .*", r"another process did not answer within \1 ms", text)


def _end(group: Group, code: int) -> int:
    """End this process now if it is one of several.

    A regular exit would wait for threads and groups that wait for a peer, and a thread that is inside a backend while
    the interpreter shuts down would abort a process that has done all its work.
    """
    if group.world_size == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(WORKER_DONE if code == 0 and group.is_ours else code)
