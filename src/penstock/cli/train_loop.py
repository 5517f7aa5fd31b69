"""The loop of a run on one rank: batch, step, metrics; validation and checkpoints every so many steps."""

import base64
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.cli.progress import Progress, StepFigures
from penstock.data import DataShard
from penstock.draw.record import RECORDED_STEP_FILE, RecordedStep, write_recorded_step
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.engine import Engine
from penstock.engine.measured import gather_recording
from penstock.engine.optimizer import state_aliases
from penstock.engine.run_parts import RunData, micro_batches
from penstock.engine.runs import CHECKPOINT_FOLDER, METRICS_FILE, MetricsLog, RunFolder, read_metrics
from penstock.engine.trainer import TrainResult
from penstock.runtime import Watchdog
from penstock.schedule import Costs, Op, Timeline
from penstock.settings import ConfigError, RunConfig

TIMELINE_FILE = "timeline.png"


@dataclass(frozen=True)
class RunResult:
    """How one start of a run ended. `loss` is that of the last step, in nats a token, like `validation_loss`."""

    output: str
    step: int
    resumed_from: int
    complete: bool
    loss: float | None = None
    validation_loss: float | None = None
    num_tokens: int = 0
    train_time_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the speed of this start."""
        speed = self.num_tokens / self.train_time_s if self.train_time_s else None
        return {**asdict(self), "tokens_per_s": speed}


class TrainLoop:
    """One rank's part of a run; every rank makes one and calls alike. Rank 0 has the folder and tells what happens."""

    def __init__(
        self, config: RunConfig, engine: Engine, data: RunData, folder: RunFolder | None, as_json: bool = False
    ) -> None:
        self.config, self.engine, self.folder = config, engine, folder
        shard = DataShard(engine.grid.dp_rank, config.parallel.dp)
        # Middle stages need to know a batch's lengths, not its tokens.
        with_data = engine.pipeline.holds_first_stage or engine.pipeline.holds_last_stage
        self.loader = data.loader(shard, with_data)
        self.validation = data.validation(shard, with_data)
        self.checkpoints = Checkpointer(
            Path(config.output) / CHECKPOINT_FOLDER,
            engine.grid,
            config.identity(),
            keep=config.checkpoint.keep,
            aliases=state_aliases(engine.ties),
        )
        self._file = sys.stderr if as_json else sys.stdout
        self._saved_step = -1
        self.result = RunResult(config.output, step=0, resumed_from=0, complete=False)

    def resume(self, must: bool = False) -> None:
        """Go on from the newest intact checkpoint; without any, from the start.

        Raises:
            ConfigError: there is none, and there must be, or there are only damaged ones.
        """
        found = self.checkpoints.latest()
        if found is None:
            if damaged := self.checkpoints.refused:
                raise ConfigError(
                    f"all {len(damaged)} checkpoints in {self.checkpoints.folder} are damaged, such as "
                    f"{next(iter(damaged)).name} ({next(iter(damaged.values()))}); to start anew, give another --output"
                )
            if must:
                raise ConfigError(
                    f"output = {self.config.output!r} holds no checkpoint to continue; leave out --resume"
                )
            return
        self.checkpoints.load(found, self.engine.state())
        rank, world_size = self.engine.grid.rank, self.engine.grid.world_size
        # What belongs to all ranks can be taken from any; the rest makes sense in the same layout alone.
        told = found.extras[rank if len(found.extras) == world_size else 0]
        self.engine.load_progress(told["engine"])
        self.loader.load_state_dict(told["loader"])
        if len(found.extras) == world_size:
            _set_random_state(told["random"])
        step = self.engine.step
        self._saved_step = step
        self.result = replace(self.result, step=step, resumed_from=step)

    def run(self, stop_asked: Callable[[], bool]) -> RunResult:
        """Train to the last step, or until some rank is asked to stop; the step under way is finished, then saved."""
        config, engine = self.config, self.engine
        teller = _Teller(config, self.folder, engine.step, self._file) if self.folder is not None else None
        watchdog = Watchdog(engine.recorder, config.parallel.timeout_s)
        watchdog.listen_to_signals()
        watchdog.answer_peers(engine.grid.control, engine.grid.pp_ranks)
        try:
            recorded = self._steps(stop_asked, teller)
            with engine.recorder.collective("finish saving"):
                self.checkpoints.finish()
        finally:
            watchdog.close()
            engine.close()
        self.result = replace(self.result, complete=engine.step >= config.train.steps)
        if teller is not None:
            self.result = teller.end(self.result, recorded)
        return self.result

    def _steps(self, stop_asked: Callable[[], bool], teller: "_Teller | None") -> RecordedStep | None:
        """All steps that are left; returns what was recorded of the last one of the run, on rank 0."""
        config, engine = self.config, self.engine
        spec, recorded = micro_batches(config), None
        while engine.step < config.train.steps:
            if stop_asked():
                engine.request_stop()
            taken = engine.train_batch(next(self.loader), micro_batches=spec, normalize=config.train.normalize)
            self._count(taken)
            last = taken.step == config.train.steps
            if teller is not None:
                teller.step(taken)
            if last and config.log.timeline:
                recorded = self._recorded(taken.num_microbatches)
            if last or _is_due(taken.step, config.validation.every):
                self._validate(teller)
            if last or taken.stop_requested or _is_due(taken.step, config.checkpoint.every):
                self._save(wait=last or taken.stop_requested or not config.checkpoint.in_background)
            if taken.stop_requested:
                break
        return recorded

    def _count(self, taken: TrainResult) -> None:
        result = self.result
        self.result = replace(
            result,
            step=taken.step,
            loss=taken.loss,
            num_tokens=result.num_tokens + taken.num_tokens,
            train_time_s=result.train_time_s + taken.step_time_s,
        )

    def _validate(self, teller: "_Teller | None") -> None:
        if not self.validation:
            return
        # The same parts on any layout, so that the loss has the same bits; a last batch may be too small for all.
        loss = self.engine.evaluate(
            self.validation, micro_batches=replace(micro_batches(self.config), allow_fewer=True)
        )
        self.result = replace(self.result, validation_loss=loss)
        if teller is not None:
            teller.validated(self.engine.step, loss)

    def _save(self, wait: bool) -> None:
        step = self.engine.step
        if step == self._saved_step:
            return
        extra = {
            "engine": self.engine.progress(),
            "loader": self.loader.state_dict(),
            "random": _random_state(),
        }
        with self.engine.recorder.collective("save a checkpoint"):
            self.checkpoints.save(step, self.engine.state(), extra, wait=wait)
        self._saved_step = step

    def _recorded(self, num_microbatches: int) -> RecordedStep | None:
        """The last step as it was measured, and as it was simulated with the mean times that were measured."""
        measured = gather_recording(self.engine.pipeline)
        if measured is None:
            return None
        costs = _costs(measured.timeline, num_microbatches)
        return RecordedStep(measured, self.engine.pipeline.simulated(num_microbatches, costs))


class _Teller:
    """What rank 0 tells of a run: progress, metrics, pictures."""

    def __init__(self, config: RunConfig, folder: RunFolder, step: int, file: Any) -> None:
        self._config, self._folder = config, folder
        self._metrics = MetricsLog(folder.path, resumed_step=step, tensorboard=config.log.tensorboard)
        self._progress = Progress(config.train.steps, step, file)
        if step:
            self._progress.note(f"continuing {config.output} after step {step}")

    def step(self, taken: TrainResult) -> None:
        if _is_due(taken.step, self._config.log.every) or taken.step == self._config.train.steps:
            seconds = taken.step_time_s
            self._metrics.write(
                taken.step,
                {
                    "loss": taken.loss,
                    "grad_norm": taken.grad_norm,
                    "learning_rate": taken.learning_rate,
                    "loss_scale": taken.loss_scale,
                    "success": taken.success,
                    "num_tokens": taken.num_tokens,
                    "tokens_per_s": taken.num_tokens / seconds if seconds else 0.0,
                    "idle_share": taken.idle_share,
                    "step_time_s": seconds,
                    **taken.extras.metrics(),
                },
            )
        self._progress.step(StepFigures(taken.step, taken.loss, taken.num_tokens, taken.step_time_s, taken.idle_share))

    def validated(self, step: int, loss: float) -> None:
        self._metrics.write(step, {"validation_loss": loss})
        self._progress.validated(step, loss)

    def end(self, result: RunResult, recorded: RecordedStep | None) -> RunResult:
        """Say how it ended; returns the result, with the last validation loss that the run has told of."""
        if recorded is not None:
            write_recorded_step(self._folder.path / RECORDED_STEP_FILE, recorded)
            # Takes a second to import, so only once there is something to draw.
            from penstock.draw import picture

            path = self._folder.path / TIMELINE_FILE
            picture(path, [layer.timeline for layer in recorded.layers], unit="ms")
            self._progress.note(f"drew one step, simulated and measured: {path}")
        self._metrics.close()
        told = [entry for entry in read_metrics(self._folder.path / METRICS_FILE) if "validation_loss" in entry]
        if result.validation_loss is None and told:
            result = replace(result, validation_loss=told[-1]["validation_loss"])
        self._progress.close()
        self._progress.note(_last_words(result))
        return result


def _last_words(result: RunResult) -> str:
    if not result.complete:
        return f"stopped after step {result.step} and saved; the same command continues from there"
    loss = "" if result.validation_loss is None else f", validation loss {result.validation_loss:.4f} nats a token"
    return f"done after step {result.step}{loss}; all of it is in {result.output}"


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _costs(measured: Timeline, num_microbatches: int) -> Costs:
    """Mean times of a microbatch on a rank, as they were measured, in the timeline's unit."""
    spent = dict.fromkeys(Op, 0.0)
    for events in measured.events:
        for event in events:
            op = getattr(event.action, "op", None)
            if op is not None:
                spent[op] += event.end - event.start
    each = num_microbatches * len(measured.events)
    return Costs(
        forward=spent[Op.F] / each,
        backward_input=(spent[Op.B] + spent[Op.I]) / each,
        backward_weight=spent[Op.W] / each,
        step=spent[Op.STEP] / len(measured.events),
    )


def _random_state() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def _set_random_state(text: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))
