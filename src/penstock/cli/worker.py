"""One worker of a run: meets the others, agrees with them on what is to be done, trains, and ends with an exit code."""

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Self, TypeVar

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
    report_end,
)
from penstock.cli.train_arguments import TrainArguments
from penstock.cli.train_loop import TrainLoop
from penstock.engine.config import RunConfig, differences
from penstock.engine.config_file import ConfigError
from penstock.engine.run_folder import RunFolder, check_folder
from penstock.engine.run_parts import check_parts, run_engine
from penstock.runtime import PipelineError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

T = TypeVar("T")


class StopRequest:
    """Whether this process was told to end by SIGTERM, SIGINT or SIGHUP; it then finishes its step and saves."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._ask) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def run_worker(arguments: TrainArguments, group: Group) -> int:
    """Train as one process of `group` until the end, or until told to stop; returns the exit code.

    A user's mistake is told by one process for all, in one sentence. When a peer fails, every process tells where it
    was and ends at once: nothing that could wait for the peer is called any more.
    """
    follow_launcher()
    torch.set_num_threads(arguments.config.parallel.num_threads)
    # Told to stop while it tells of a failure, it still tells.
    with StopRequest() as stop:
        store = join(group, arguments.config.parallel.timeout_s)
        try:
            _train(arguments, group, store, stop)
        except ValueError as error:
            if is_first_to_tell(store):
                print(f"penstock: {error}", file=sys.stderr)
            return _end(group, REFUSED)
        except Exception as error:
            if not is_told(store):
                _tell_failure(group, error)
            return _end(group, FAILED)
    return 0


def _train(arguments: TrainArguments, group: Group, store: "Store", stop: StopRequest) -> None:
    config, switches = arguments.config, arguments.switches
    _agree_on_settings(store, group, config)
    # What one process can not do, none should start to do: all of them get the error of the first.
    _together(store, group, "folder", lambda: check_folder(config, switches.fresh, switches.resume))
    data = _together(store, group, "data", lambda: check_parts(config))
    _refuse_differing(store, group, "corpus", {"tokens of the corpus": data.corpus.fingerprint})
    folder = _together(store, group, "lock", lambda: RunFolder(config) if group.rank == 0 else None)
    config = _choose_device(store, group, config)
    _initialise(store, group, config)
    engine = run_engine(config, data.corpus.vocab_size)
    try:
        loop = TrainLoop(config, engine, data, folder, as_json=switches.json)
        loop.resume(must=switches.resume)
        result = loop.run(lambda: stop.asked)
    except Exception as error:
        error.add_note(engine.recorder.where())
        raise
    finally:
        if folder is not None:
            folder.close()
    if group.rank == 0:
        report_end()
        if switches.json:
            print(json.dumps(result.to_dict(), indent=2))
    if dist.is_initialized():
        dist.destroy_process_group()


def _agree_on_settings(store: "Store", group: Group, config: RunConfig) -> None:
    """Refuse settings that are not the same on every rank; the refusal names what differs."""
    _refuse_differing(store, group, "settings", json.loads(json.dumps(config.flat())))


def _refuse_differing(store: "Store", group: Group, key: str, ours: dict) -> None:
    told = agree(store, group, key, ours)
    for rank, theirs in enumerate(told):
        changed = differences(theirs, told[0], here=f"on rank {rank}", there="on rank 0")
        if changed:
            raise ConfigError(f"all ranks of a run need the same settings, but these differ: {'; '.join(changed)}")


def _together(store: "Store", group: Group, key: str, work: Callable[[], T]) -> T:
    """Do `work` on every process, and go on only if no process has refused.

    Raises:
        ValueError: on every process, if some process's work did.
    """
    refusal, done = None, None
    try:
        done = work()
    except ValueError as error:
        refusal = error
    refusals = [told["refused"] for told in agree(store, group, key, {"refused": refusal and str(refusal)})]
    if refusal is not None:
        raise refusal
    if any(refusals):
        raise ConfigError(next(text for text in refusals if text))
    return done  # pyright: ignore[reportReturnType]  # without a refusal the work is done


def _choose_device(store: "Store", group: Group, config: RunConfig) -> RunConfig:
    """Settle "auto": GPUs if every rank finds one of its own on its machine, else CPUs; the same on all ranks.

    Raises:
        ConfigError: GPUs are demanded, and some rank finds none.
    """
    found = torch.cuda.is_available() and torch.cuda.device_count() > group.local_rank
    lacking = [rank for rank, told in enumerate(agree(store, group, "gpu", {"found": found})) if not told["found"]]
    wanted = config.parallel.device
    if wanted == "cuda" and lacking:
        raise ConfigError(
            f'parallel.device = "cuda", but rank {lacking[0]} finds no GPU of its own; start fewer ranks a machine, '
            'or set it to "cpu"'
        )
    device = "cpu" if wanted == "cpu" or lacking else "cuda"
    return replace(config, parallel=replace(config.parallel, device=device))


def _initialise(store: "Store", group: Group, config: RunConfig) -> None:
    """Make the default process group, from which the engine makes its own."""
    on_gpu = config.parallel.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(group.local_rank)
    if group.world_size == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("penstock/groups", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=group.rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=config.parallel.timeout_s),
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
    """End now where others may be waiting: a regular end would wait for threads and groups that wait for a peer."""
    if group.world_size == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
