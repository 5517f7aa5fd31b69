"""One worker of `penstock train`: it meets the others, then repeats batch, step, metrics, validation and checkpoint."""

import json
import math
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from penstock import schedule
from penstock.cli.main import STOPPED
from penstock.cli.output import Progress, print_json, print_progress, show_log, waiting
from penstock.cli.processes.meeting import Group
from penstock.cli.processes.session import Meeting, initialise, work_together
from penstock.data import DataShard, Loader, PackedBatch
from penstock.draw.layers import RECORDED_STEP_FILE, RecordedStep, write_recorded_step
from penstock.engine.callbacks import EarlyStop, Trackers
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.checkpoint.manifest import folder_name, random_state
from penstock.engine.engine import Engine
from penstock.engine.folders.run_parts import check_parts, engine_arguments, micro_batches
from penstock.engine.folders.runs import CHECKPOINT_FOLDER, METRICS_FILE, RunLock, check_folder, read_metrics
from penstock.engine.run_data import RunData
from penstock.engine.training.loss import LossFn, LossWeightFn
from penstock.runtime import Watchdog
from penstock.settings import ConfigError, RunConfig

TIMELINE_FILE = "timeline.png"
ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True)
class RunResult:
    """The end of one start of a run.

    `loss` is that of the last step, like `validation_loss` in nats per token, or for a reward model per pair of texts.
    """

    output: str
    step: int
    resumed_from: int
    complete: bool
    stopped_early: bool = False
    loss: float | None = None
    validation_loss: float | None = None
    num_tokens: int = 0
    train_time_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, with the speed of this start; a loss that is not finite is None, as in JSON."""
        speed = self.num_tokens / self.train_time_s if self.train_time_s else None
        values = {**asdict(self), "tokens_per_s": speed}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


class TrainLoop:
    """One rank's part of a run; every rank makes one and makes the same calls. Rank 0 has the folder and reports."""

    #: the run's settings, and its engine
    config: RunConfig
    engine: Engine
    #: the run's folder; None but on rank 0
    folder: RunLock | None
    #: batches to train on and to validate with
    loader: Loader
    validation: tuple[PackedBatch, ...]
    #: their loss, and its weight
    loss: tuple[LossFn, LossWeightFn]
    #: saves and loads the run's state
    checkpoints: Checkpointer
    #: ends the run where validation falls no further; None if it shall not
    early_stop: EarlyStop | None
    #: what the run has come to
    result: RunResult
    #: where progress is shown, and of what the loss is the mean
    _file: Any
    _unit: str
    #: what writes the numbers of `run`, and what shows them; None but on rank 0
    _trackers: Trackers | None
    _progress: Progress | None
    #: the step of the last checkpoint
    _saved_step: int
    #: True while that may still be on its way to the disk
    _unfinished: bool

    def __init__(
        self, config: RunConfig, engine: Engine, data: RunData, folder: RunLock | None, as_json: bool = False
    ) -> None:
        self.config, self.engine, self.folder = config, engine, folder
        shard = DataShard(engine.grid.dp_rank, config.parallel.dp)
        # Middle stages need a batch's lengths, not its tokens.
        with_data = engine.pipeline.holds_first_stage or engine.pipeline.holds_last_stage
        self.loader = data.loader(shard, with_data)
        self.validation = data.validation(shard, with_data)
        self.loss, self._unit = data.loss, "pair" if data.rewards else "token"
        folder_of_checkpoints, keep = Path(config.output) / CHECKPOINT_FOLDER, config.checkpoint.keep
        self.checkpoints = Checkpointer(
            folder_of_checkpoints, engine.grid, config.identity(), keep=keep, aliases=engine.ties
        )
        self._file = sys.stderr if as_json else sys.stdout
        self._saved_step, self._unfinished, self._trackers, self._progress = -1, False, None, None
        watch = config.watch
        self.early_stop = EarlyStop(watch.patience, watch.min_delta) if watch.patience else None
        engine.watch(*watch.callbacks)
        self.result = RunResult(config.output, step=0, resumed_from=0, complete=False)

    def resume(self, must: bool = False) -> None:
        """Continue from the newest intact checkpoint; without any, from the start.

        Raises: ConfigError if all checkpoints are damaged, or there is none and there `must` be one.
        """
        newest = self.checkpoints.latest()
        if newest is not None:
            self.engine.load_checkpoint(self.checkpoints, newest)
            self.checkpoints.restore(newest, self._go_on)
            self._saved_step = step = self.engine.step
            self.result = replace(self.result, step=step, resumed_from=step)
        elif damaged := self.checkpoints.refused:
            path, why = next(iter(damaged.items()))
            raise ConfigError(
                f"all {len(damaged)} checkpoints in {self.checkpoints.folder} are damaged, such as {path.name} "
                f"({why}); to start anew, give another --output"
            )
        elif must:
            raise ConfigError(f"output = {self.config.output!r} holds no checkpoint to continue; leave out --resume")

    def _go_on(self, values: Any) -> None:
        """Take up what a rank saved beside its engine's state."""
        self.loader.load_state_dict(values["loader"])
        if self.early_stop is not None and values.get("early_stop") is not None:
            self.early_stop.load_state(values["early_stop"])

    def run(self, stop_asked: Callable[[], bool]) -> RunResult:
        """Train to the last step, or until some rank is asked to stop; the current step is then finished and saved."""
        config, engine = self.config, self.engine
        if self.folder is not None:
            self._trackers = Trackers.open(self.folder.path, config.log, resumed_step=engine.step)
            self._progress = Progress(config.train.steps, engine.step, self._file)
            if engine.step:
                print_progress(f"continuing {config.output} after step {engine.step}", self._file)
        parallel, grid = config.parallel, engine.grid
        watchdog = Watchdog.of_run(
            engine.recorder, parallel.timeout_s, grid.control, grid.pp_ranks, parallel.shutdown_timeout_s
        )
        try:
            recorded = self._steps(stop_asked)
            self._finish_saving()
            if config.adapter.is_used and self.result.num_tokens and self._complete:
                engine.save_adapter(Path(config.output) / f"{ADAPTER_FOLDER}-{engine.step}")
        finally:
            watchdog.close()
            engine.close()
        self.result = replace(self.result, complete=self._complete, stopped_early=self._stopped_early)
        if self.folder is not None:
            self._report_end(self.folder.path, recorded)
        return self.result

    def _report_end(self, folder: Path, recorded: RecordedStep | None) -> None:
        """Draw the recorded step and say how the run has ended; its result gets the last validation loss of all."""
        assert self._trackers is not None
        result = self.result
        if recorded is not None:
            write_recorded_step(folder / RECORDED_STEP_FILE, recorded)
            if find_spec("matplotlib") is None:
                text = f"recorded one step; penstock trace {folder} shows it, and draws it where matplotlib is"
            else:
                # Takes a second to import, so not before there is something to draw.
                from penstock.draw.image import picture

                picture(folder / TIMELINE_FILE, [layer.timeline for layer in recorded.layers], unit="ms")
                text = f"drew one step, simulated and measured: {folder / TIMELINE_FILE}"
            print_progress(text, self._file)
        self._trackers.close()
        validated = [entry for entry in read_metrics(folder / METRICS_FILE) if "validation_loss" in entry]
        if result.validation_loss is None and validated:
            self.result = result = replace(result, validation_loss=validated[-1]["validation_loss"])
        loss = result.validation_loss
        said = "" if loss is None else f", validation loss {loss:.4f} nats a {self._unit}"
        how, where = "done", f"; all of it is in {result.output}"
        if not result.complete:
            how, said, where = "stopped", "", " and saved; the same command continues from there"
        elif result.stopped_early:
            how, said = "stopped early", f"{said}, which fell no further"
        print_progress(f"{how} after step {result.step}{said}{where}", self._file)

    def _steps(self, stop_asked: Callable[[], bool]) -> RecordedStep | None:
        """Take all remaining steps; on rank 0, returns the recording of the run's last step."""
        config, engine = self.config, self.engine
        spec, recorded = micro_batches(config), None
        while engine.step < config.train.steps and not self._stopped_early:
            if stop_asked():
                engine.request_stop()
            is_first = self._progress is not None and not self.result.num_tokens
            with waiting("the first step, which also compiles", self._file, is_first and bool(config.train.compile)):
                taken = engine.train_batch(next(self.loader), *self.loss, spec, config.train.normalize)
            self.result = replace(
                self.result,
                step=taken.step,
                loss=taken.loss,
                num_tokens=self.result.num_tokens + taken.num_tokens,
                train_time_s=self.result.train_time_s + taken.step_time_s,
            )
            last = taken.step == config.train.steps
            if self._trackers is not None and self._progress is not None:
                if last or _is_due(taken.step, config.log.every):
                    self._trackers.on_step(taken)
                self._progress.step(taken)
            if last and config.log.timeline and (measured := engine.pipeline.recording()) is not None:
                # As measured, and as simulated with the mean measured times.
                program, costs = engine.pipeline.program(taken.num_microbatches), measured.costs(taken.num_microbatches)
                recorded = RecordedStep(measured, schedule.simulate(program, costs))
            if self.validation and (last or _is_due(taken.step, config.validation.every)):
                # Equal parts in any layout, so that the loss has the same bits; the last batch may be small.
                loss = engine.evaluate(self.validation, *self.loss, micro_batches=replace(spec, allow_fewer=True))
                self.result = replace(self.result, validation_loss=float(loss))
                if self.early_stop is not None:
                    self.early_stop.on_evaluation(taken.step, loss)
                if self._trackers is not None and self._progress is not None:
                    self._trackers.on_evaluation(taken.step, loss)
                    self._progress.note(taken.step, f"validation loss {loss:.4f}")
            ends = last or taken.stop_requested or self._stopped_early
            if ends or _is_due(taken.step, config.checkpoint.every):
                self._save(wait=ends or not config.checkpoint.in_background)
            if taken.stop_requested:
                break
        return recorded

    @property
    def _stopped_early(self) -> bool:
        return self.early_stop is not None and self.early_stop.stopped

    @property
    def _complete(self) -> bool:
        return self._stopped_early or self.engine.step >= self.config.train.steps

    def _finish_saving(self) -> None:
        """Wait for the save under way, and show its checkpoint to the callbacks."""
        with self.engine.recorder.collective("finish saving"):
            self.checkpoints.finish()
        if self._unfinished:
            self._unfinished = False
            path = self.checkpoints.folder / folder_name(self._saved_step)
            self.engine.callbacks.notify("on_checkpoint", self._saved_step, path)

    def _save(self, wait: bool) -> None:
        step = self.engine.step
        if step == self._saved_step:
            return
        extra = {
            "engine": self.engine.progress(),
            "loader": self.loader.state_dict(),
            "random": random_state(),
            "early_stop": None if self.early_stop is None else self.early_stop.state(),
        }
        self._finish_saving()
        with self.engine.recorder.collective("save a checkpoint"):
            self.checkpoints.save(step, self.engine.state_to_save(), extra)
        self._saved_step, self._unfinished = step, True
        if wait:
            self._finish_saving()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def train_worker(config: RunConfig, group: Group, must_resume: bool, fresh: bool, as_json: bool) -> int:
    """Train as one process of a run until the end, or until asked to stop; returns the exit code.

    must_resume: there must be a checkpoint to continue. fresh: the output folder must hold no run. as_json: the result
    is printed as JSON, and progress to standard error.
    """
    stops: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def catch() -> None:
        # Until now they have ended the process at once: while it meets and loads there is nothing to finish or save.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before[number] = signal.signal(number, lambda caught, _: stops.append(caught))

    def train(meeting: Meeting) -> int:
        data, folder = _prepared(config, meeting, must_resume, fresh)
        on_device = replace(config, parallel=meeting.choose_device(config.parallel))
        initialise(meeting.store, group, on_device.parallel)
        engine = Engine(*engine_arguments(on_device, data.corpus.vocab_size))
        warning = engine.pipeline.useless_overlap_warning(config.train.num_microbatches)
        if warning is not None and group.rank == 0:
            print(f"penstock: {warning}", file=sys.stderr)
        try:
            loop = TrainLoop(on_device, engine, data, folder, as_json=as_json)
            loop.resume(must=must_resume)
            if folder is not None:
                # Not before: a start that cannot go on leaves the settings as they were.
                folder.keep(config)
            catch()
            result = loop.run(lambda: bool(stops))
        except Exception as error:
            error.add_note(engine.recorder.where())
            raise
        finally:
            if folder is not None:
                folder.close()
        if group.rank == 0 and as_json:
            print_json(result.to_dict())
        return 0 if result.complete else _code_of_stop(meeting, stops)

    try:
        return work_together(group, config.parallel.num_threads, config.parallel.timeout_s, train)
    finally:
        # Not before: a process that is asked to stop while it reports a failure still finishes the report.
        for number, handler in before.items():
            signal.signal(number, handler)


def _code_of_stop(meeting: Meeting, stops: list[int]) -> int:
    """The exit code of a run that was stopped before its end, and can go on.

    It is that of the signal, as shells have it, so that nobody takes the run for done. Where another host alone was
    asked to end, `STOPPED` lets this one's agent start it anew; workers of our own launcher say the same, all at once.
    """
    asked = meeting.exchange("stopped", stops[:1])
    first = next(filter(None, asked), []) if meeting.group.is_ours else stops
    return 128 + first[0] if first else STOPPED


def _prepared(config: RunConfig, meeting: Meeting, must_resume: bool, fresh: bool) -> tuple[RunData, RunLock | None]:
    """The run's data, and on rank 0 its folder, once all processes agree on them."""
    # Python and PyTorch seed their generators anew each time; a run that is started again gets the same numbers.
    random.seed(config.train.seed)
    torch.manual_seed(config.train.seed)
    if meeting.group.rank == 0:
        show_log()
    meeting.refuse_differing("settings", json.loads(json.dumps(config.flat())))
    meeting.together("folder", lambda: check_folder(config, fresh, must_resume))
    data = meeting.together("data", lambda: check_parts(config))
    meeting.refuse_differing("corpus", {"tokens of the corpus": data.corpus.fingerprint})
    return data, meeting.together("lock", lambda: RunLock(config) if meeting.group.rank == 0 else None)
