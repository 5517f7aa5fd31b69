"""One worker of a run: meets the others, agrees with them on what is to be done, trains, and ends with an exit code."""

import json
import signal
import sys
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Self

from penstock.cli.launch import Group, report_end
from penstock.cli.progress import show_log
from penstock.cli.together import choose_device, initialise, refuse_differing, together, work_together
from penstock.cli.train_arguments import TrainArguments
from penstock.cli.train_loop import TrainLoop
from penstock.engine.engine import Engine
from penstock.engine.run_parts import check_parts, engine_arguments
from penstock.engine.runs import RunFolder, check_folder

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]


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
    """Train as one process of `group` until the end, or until told to stop; returns the exit code."""
    parallel = arguments.config.parallel
    # Told to stop while it tells of a failure, it still tells.
    with StopRequest() as stop:
        return work_together(
            group, parallel.num_threads, parallel.timeout_s, lambda store: _train(arguments, group, store, stop)
        )


def _train(arguments: TrainArguments, group: Group, store: "Store", stop: StopRequest) -> None:
    config, switches = arguments.config, arguments.switches
    if group.rank == 0:
        show_log()
    refuse_differing(store, group, "settings", json.loads(json.dumps(config.flat())))
    together(store, group, "folder", lambda: check_folder(config, switches.fresh, switches.resume))
    data = together(store, group, "data", lambda: check_parts(config))
    refuse_differing(store, group, "corpus", {"tokens of the corpus": data.corpus.fingerprint})
    folder = together(store, group, "lock", lambda: RunFolder(config) if group.rank == 0 else None)
    device = choose_device(store, group, config.parallel.device)
    config = replace(config, parallel=replace(config.parallel, device=device))
    initialise(store, group, device, config.parallel.timeout_s)
    engine = Engine(*engine_arguments(config, data.corpus.vocab_size))
    vain = engine.pipeline.vain_overlap(config.train.num_microbatches)
    if vain is not None and group.rank == 0:
        print(f"penstock: {vain}", file=sys.stderr)
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
