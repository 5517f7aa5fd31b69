"""One process of a group: it meets the others, refuses input that any of them refuses, and ends without waiting.

Training, scoring, generation and the test of links share this when they run on several processes.
"""

import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.group import (
    Group,
    agree,
    is_reported,
    report_is_written,
    reports_first,
    stay_for_others,
    stay_for_report,
)
from penstock.cli.launch import FAILED, REFUSED
from penstock.cli.main import in_plain_words, lacks_memory, sentence
from penstock.cli.meeting import join, secret_of
from penstock.engine.checkpoint.manifest import CheckpointError
from penstock.parallel.host import ProcessEnded, on_all_ranks
from penstock.runtime import CallbackError, PipelineError, StepError
from penstock.settings import ConfigError, Device, differences

T = TypeVar("T")


def work_together(group: Group, num_threads: int, timeout_s: float, work: Callable[[Store], int | None]) -> int:
    """Do `work`, given the store where the processes of `group` meet; returns its exit code, or the command's.

    One process reports a user's mistake for all, in one sentence. When a peer fails, every process reports where it
    was and ends at once: nothing is called any more that could wait for the peer.
    """
    if group.world_size > 1:
        # Python's own handler would wait for a backend that waits for a peer.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        faulthandler.enable()  # a crash below Python prints its place
    torch.set_num_threads(num_threads)
    store = join(group, timeout_s, secret_of(os.environ))
    threading.excepthook = _on_thread_failure
    try:
        code = work(store) or 0
        sys.stdout.flush()
        if dist.is_initialized():
            dist.destroy_process_group()
    except ValueError as error:
        if reports_first(store):
            print(f"penstock: {error}", file=sys.stderr)
            report_is_written(store)
        else:
            stay_for_report(store)
        stay_for_others(store, group)
        return _end(group, REFUSED)
    except Exception as error:
        if not is_reported(store):
            _report_failure(group, error)
        else:
            stay_for_report(store)
            stay_for_others(store, group)
        return _end(group, FAILED)
    return _end(group, code)


def refuse_differing(store: Store, group: Group, key: str, ours: Mapping[str, Any]) -> None:
    """Refuse values that differ between ranks.

    Raises:
        ConfigError: on every process; the message names what differs, and on which rank.
    """
    values = agree(store, group, key, ours)
    for rank, theirs in enumerate(values):
        changed = differences(theirs, values[0], here=f"on rank {rank}", there="on rank 0")
        if changed:
            raise ConfigError(f"all ranks of a run need the same settings, but these differ: {'; '.join(changed)}")


def together(store: Store, group: Group, key: str, work: Callable[[], T]) -> T:
    """Do `work` on every process; if any process refuses, all raise the error of the first that did.

    Raises:
        ValueError: on every process, if some process's work raised one, or could not use a file.
    """

    def refusing() -> T:
        try:
            return work()
        except OSError as error:
            raise error if isinstance(error, ValueError) else ConfigError(sentence(error)) from None

    def gather(error: Any) -> list[Any]:
        return [theirs["refused"] for theirs in agree(store, group, key, {"refused": error})]

    return on_all_ranks(refusing, gather, otherwise=ConfigError, catch=ValueError, message="{error}")


def choose_device(store: Store, group: Group, wanted: str) -> Device:
    """Resolve "auto": "cuda" if every rank finds a GPU of its own on its machine, else "cpu"; the same on all ranks.

    Raises:
        ConfigError: GPUs are demanded, and some rank finds none.
    """
    found = torch.cuda.is_available() and torch.cuda.device_count() > group.local_rank
    answers = agree(store, group, "gpu", {"found": found})
    lacking = [rank for rank, answer in enumerate(answers) if not answer["found"]]
    if wanted == "cuda" and lacking:
        raise ConfigError(
            f'parallel.device = "cuda", but rank {lacking[0]} finds no GPU of its own; start fewer ranks a machine, '
            'or set it to "cpu"'
        )
    return "cpu" if wanted == "cpu" or lacking else "cuda"


def initialise(store: Store, group: Group, device: str, timeout_s: float) -> None:
    """Create the default process group, from which the engine creates its own."""
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


def _report_failure(group: Group, error: Exception) -> None:
    """Print one sentence if a peer has failed or is silent, and a traceback for an unexpected error."""
    # Of a step or callback that failed here, the cause is what this process raised itself.
    cause = error.__cause__ if isinstance(error, StepError | CallbackError) else error
    is_of_file = isinstance(cause, OSError) and cause.filename is not None
    is_of_class = isinstance(cause, PipelineError | CheckpointError | ProcessEnded)
    expected = is_of_class or is_of_file or _is_of_backend(cause) or lacks_memory(cause)
    if not expected or os.environ.get("PENSTOCK_TRACEBACK"):
        traceback.print_exception(error)
    # Errors from below the engine do not say where in the run they happened.
    where = "" if isinstance(error, PipelineError) else "; ".join([*getattr(error, "__notes__", []), ""])
    what = sentence(error) if isinstance(error, OSError) else _first_sentence(error)
    # In one piece: without buffers, as torchrun starts them, processes would write into each other's lines.
    sys.stderr.write(f"penstock: process {group.rank}: {where}{what}\n")


def _on_thread_failure(failure: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread's error; of TensorBoard's thread the process itself raises it again."""
    if not (isinstance(failure.exc_value, OSError) and type(failure.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(failure)


def _first_sentence(error: Exception) -> str:
    """The message of an error, without the place in a backend's source, the backend's advice and the store's keys.

    Under keys lies the secret of the run, which no log should hold.
    """
    text = re.sub(r"^\[\S+\] |\. This is typically[^)]*", "", in_plain_words(" ".join(str(error).split())))
    return re.sub(r"wait timeout after (\d+)ms, keys: .*", r"another process did not answer within \1 ms", text)


def _is_of_backend(error: BaseException | None) -> bool:
    """Return whether a collective failed; gloo has no exception class of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _end(group: Group, code: int) -> int:
    """End this process now if it is one of several.

    A regular exit would wait for threads and groups that wait for a peer, and a thread that is inside a backend while
    the interpreter shuts down would abort a process that has done all its work.
    """
    if group.world_size == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
