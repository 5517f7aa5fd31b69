"""The state of a model under training: all that checkpoints, exports and a user's own loop read and write of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.engine.build import SECOND_COPY
from penstock.engine.checkpoint import Checkpointer, CheckpointReader
from penstock.engine.checkpoint.manifest import folder_name
from penstock.engine.checkpoint.rank_values import random_state, restore_random_state
from penstock.engine.folders.lora import save_adapter
from penstock.engine.optimizer.optimizer import state_aliases
from penstock.engine.pipeline import Pipeline
from penstock.engine.rehearsal.memory import running_state_bytes
from penstock.engine.sharding import local_parameters, local_state
from penstock.engine.training.losses import EvaluationLoss
from penstock.engine.training.trainer import Trainer, TrainResult
from penstock.engine.watch import Watchers
from penstock.engine.weight_transfer import Port, Slices, slices_of
from penstock.model.hf.config_json import HuggingFaceForm
from penstock.parallel.gradients import StateBytes
from penstock.parallel.grid import own_world_rank
from penstock.parallel.host import check_same_calls, gather_json, shown_to_all_ranks
from penstock.parallel.tensor_slice import LocalTensor, Shard
from penstock.runtime import PipelineError
from penstock.schedule import Costs, Timeline
from penstock.schedule.recording import Recording
from penstock.settings.arguments import check_argument, checked
from penstock.settings.declare import nearest

# ---- The records of the last step, of all ranks of a pipeline or of one alone


def gathered_recording(pipeline: Pipeline) -> Recording | None:
    """The record of pipeline 0's last step, in ms; None on all ranks but 0. All ranks call it."""
    by_rank = gather_json(_rows(pipeline), pipeline.grid.pp_control)
    return None if pipeline.grid.rank else _recording(pipeline, by_rank)


def own_recording(pipeline: Pipeline) -> Recording:
    """The record of this rank's last step, in ms, as that of a pipeline of one rank."""
    return _recording(pipeline, [_rows(pipeline)])


def _rows(pipeline: Pipeline) -> tuple[list[Any], list[Any]]:
    records, collectives = pipeline.recorder.records(), pipeline.recorder.collective_records()
    return (
        [record.row() for record in records if record.end_ns],
        [record.row() for record in collectives if record.end_ns],
    )


def _recording(pipeline: Pipeline, by_rank: Sequence[Sequence[Any]]) -> Recording:
    num_ranks = pipeline.layout.pp
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    return Recording.gathered(
        *zip(*by_rank, strict=True),
        title=f"{pipeline.options.choice.name}, {ranks}, measured in step {pipeline.step}",
        step=pipeline.step,
        stages_per_rank=pipeline.placement.stages_per_microbatch,
    )


# ---- The state of a model under training: all that checkpoints, exports and a user's own loop read and write of it


class ModelState:
    """This rank's weights, gradients and optimizer state by the parameters' full names, and the record of a step."""

    #: the model, cut into stages over the grid of processes
    pipeline: Pipeline
    #: gradients and optimizer
    trainer: Trainer
    #: the model's form in transformers; None where that does not know it
    form: HuggingFaceForm | None

    #: a user's own callbacks
    watchers: Watchers
    #: the place where weights leave for other engines, or arrive; on ranks outside of the layout too
    port: Port

    def __init__(self, pipeline: Pipeline, trainer: Trainer, form: HuggingFaceForm | None = None) -> None:
        self.pipeline, self.trainer, self.form = pipeline, trainer, form
        self.watchers = Watchers(pipeline)
        self.port = Port(pipeline.grid, pipeline.options, pipeline, self._own_slices)

    if not TYPE_CHECKING:  # attributes that are misspelt are found

        def __getattr__(self, name: str) -> Any:
            """Say why this process has no part of the engine, where it is asked for one."""
            port = vars(self).get("port")
            if port is None or port.pipeline is not None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise PipelineError(
                f"this engine is on ranks {', '.join(map(str, port.ranks))} of the world, and not on this one "
                f"(rank {own_world_rank()}), which can only take part in send_weights; ask engine.is_here"
            )

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.pipeline.step

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameters and buffers that are copies: full name -> that of the one that counts in checkpoints."""
        copies = {name: name.removesuffix(SECOND_COPY) for name in self.buffers() if name.endswith(SECOND_COPY)}
        return {**self.pipeline.ties.owners, **copies}

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Parameters of which this rank holds a part: full name -> which part."""
        return self.pipeline.sharding.shards

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names of tied copies and of their optimizer state -> the owner's, under which alone they are stored."""
        return state_aliases(self.ties, self.trainer.optimizer.state_kinds)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by full name."""
        return self.pipeline.parameters()

    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers by full name, such as BatchNorm's statistics; the first rank's of each dp."""
        return self.pipeline.buffers()

    def gradient(self, name: str) -> Tensor:
        """The gradient of one of this rank's parameters, as the last step left it (a view).

        Where the optimizer's step is divided among ranks (`zero`), only the elements that this rank steps are summed.
        """
        found = [buckets for buckets in self.trainer.gradients.values() if name in buckets.gradients]
        if not found:
            names = [own for buckets in self.trainer.gradients.values() for own in buckets.gradients]
            near = f"the nearest name is {nearest(str(name), names)!r}" if names else "no parameter is trained here"
            raise ValueError(f"this rank has no gradient of {name!r}; {near}")
        return found[0].gradient(name)

    def state(self, optimizer: bool = True) -> dict[str, LocalTensor]:
        """This rank's part of the parameters, buffers and the optimizer's state, by full name: copy into it to load."""
        model = local_parameters(self.parameters(), self.shards) | self.buffers()
        self.pipeline.options.check_unpacked("the state")
        if not optimizer:
            return model
        return model | local_state(self.trainer.optimizer.owned_state(), self.shards)

    def state_bytes(self) -> StateBytes:
        """Memory that this rank's parameters, gradients and optimizer take."""
        trainer = self.trainer
        return running_state_bytes(
            self.parameters().values(), list(trainer.gradients.values()), trainer.optimizer.state_bytes
        )

    def progress(self) -> dict[str, Any]:
        """The numbers that a resumed run needs beside `state`, as JSON values; the same on every rank."""
        return {"step": self.step, "optimizer": self.trainer.optimizer.progress()}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Go on from there, after the tensors of `state` have been loaded."""
        self.pipeline.continue_from(int(progress["step"]))
        self.trainer.load_progress(progress["optimizer"])

    def save(self, path: str | Path, extra: Any = None, keep: int = 1) -> None:
        """Save weights, buffers, optimizer, step and random numbers as a checkpoint in the folder; all ranks call it.

        A crash leaves the checkpoint before it intact. `extra` is a JSON value of the caller's, such as a position in
        the data; `keep` is how many of the newest checkpoints stay.

        Raises: AnotherRun, ValueError, CheckpointError; on all ranks alike.
        """
        grid = self.pipeline.grid
        self.check_call("save", path=(path, str | Path), keep=(keep, int))
        with self.pipeline.recorder.collective("save a checkpoint"):
            saved = Checkpointer(path, grid, {}, keep, self.aliases, newest_last=True)
            values = {"engine": self.progress(), "random": random_state(), "extra": extra}
            saved.save(self.step, self.state(), values, wait=True)
        self.watchers.saw_checkpoint(self.step, Path(path) / folder_name(self.step))

    def load(self, path: str | Path) -> Any:
        """Go on from the newest intact checkpoint in the folder, saved by any layout; returns its `extra`.

        The folder is that of `save`, that of a run's checkpoints, or a single checkpoint. An engine that does not learn
        leaves the optimizer's state. Each rank gets its own `extra` back if there are as many ranks, else rank 0's.

        Raises: FileNotFoundError, DamagedCheckpoint; ValueError if it is of another model. On all ranks alike, with
        nothing loaded.
        """
        pipeline = self.pipeline
        self.check_call("load", path=(path, str | Path))
        rank, world_size = pipeline.grid.rank, pipeline.grid.world_size
        with pipeline.recorder.collective("load a checkpoint"):
            saved, own = CheckpointReader(path, pipeline.grid, None, self.aliases), self.state()
            found = saved.existing()
            saved.check_used(found, own, ignored="" if pipeline.options.learns else "optimizer.")
            saved.load(found, own)

        def go_on(values: Any) -> Any:
            self.load_progress(values["engine"])
            restore_random_state([theirs["random"] for theirs in found.rank_values], rank, world_size)
            return values.get("extra")

        extra = saved.restore(found, go_on)
        pipeline.casts.renew()
        return extra

    # ---- weights between engines

    @property
    def is_here(self) -> bool:
        """True on the ranks of the engine's layout; elsewhere weights can be sent from it and to it, and no more."""
        return self.port.pipeline is not None

    @property
    def version(self) -> int:
        """The version of the weights: the optimizer steps that they have seen, here or where they came from."""
        return self.port.version

    def send_weights(self, to: ModelState) -> int:
        """Give another engine this one's weights and buffers, bit for bit, and their version, which is returned.

        All ranks of both engines call it on the one that sends; elsewhere it does nothing. Their layouts and ranks may
        differ in everything, or be the same. Nothing is written to disk, and a rank holds no more than its parts of
        both engines and what it sends or receives of one tensor. The engine that receives has `learns=False`.

        Raises:
            ValueError: the models differ, naming the first tensor; on all ranks alike, with nothing sent.
            TransportError: a rank has ended, or did not come in time.
        """
        check_argument("to", to, ModelState)
        return self.port.send(to.port)

    def weights_wait(self, to: ModelState) -> bool:
        """True if this engine's first rank waits in `send_weights` for the other engine; asked on ranks of that."""
        return self.port.is_awaited(to.port)

    def _own_slices(self) -> Slices:
        state = self.state(optimizer=False)
        return slices_of({name: own for name, own in state.items() if name not in self.pipeline.loans}, self.ties)

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters as a new folder in peft's format; all ranks call it. See `EngineOptions.adapter`.

        Raises: ValueError if there are none, or the folder holds something; on all ranks alike.
        """
        self.check_call("save_adapter", path=(path, str | Path))
        save_adapter(self.pipeline, self.form, path)

    def check_call(self, call: str, **given: tuple[Any, Any]) -> None:
        """Begin a method of this name, which all ranks call: refuse arguments of other types than those beside them.

        Raises: ValueError; DifferentCalls if a rank is in another method; on all ranks alike. PipelineError after
        `close`, TransportError if a rank does not come in time.
        """

        def check() -> tuple[None, str]:
            for name, (value, kind) in given.items():
                check_argument(name, value, kind)
            return None, call

        self.pipeline.recovery.check_usable()
        with self.pipeline.recorder.collective(f"begin {call}, which all ranks call"):
            gather = partial(gather_json, group=self.pipeline.grid.control)
            _, calls = shown_to_all_ranks(check, gather, ValueError)
        check_same_calls(calls)

    def request_stop(self) -> None:
        """Ask all ranks to end after the next step: its `TrainResult.stop_requested` is true on each of them."""
        self.trainer.request_stop()

    def watch(self, *callbacks: Any) -> None:
        """Let callbacks see each step, evaluation and checkpoint, and the end, on this rank.

        A callback is an object with any of the methods `on_step(result)`, `on_evaluation(step, loss)`,
        `on_checkpoint(step, path)` and `on_end(step)`, a class that makes one, or the name of either,
        ``package.module:object``. True from one of the first two asks all ranks to end, as `Engine.request_stop` does.

        Raises: ConfigError for an object without any of these methods.
        """
        self.watchers.add(callbacks)

    def stepped(self, taken: TrainResult) -> TrainResult:
        """Show a step to the callbacks."""
        if self.watchers.saw_step(taken):
            self.trainer.request_stop()
        return taken

    def evaluated(self, loss: EvaluationLoss) -> EvaluationLoss:
        """Show an evaluation to the callbacks."""
        if self.watchers.saw_evaluation(loss):
            self.trainer.request_stop()
        return loss

    @checked
    def simulated(self, num_microbatches: int, costs: Costs) -> Timeline:
        """The simulated timeline of a step."""
        return self.pipeline.simulated(num_microbatches, costs)

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last step of pipeline 0, in ms, on rank 0; None elsewhere. All ranks call it.

        Ranks on one host share a clock; those of several hosts are aligned by it as well as the hosts are.
        """
        self.check_call("timeline")
        recording = gathered_recording(self.pipeline)
        return None if recording is None else recording.timeline

    def fixed_weights(self) -> AbstractContextManager[None]:
        """Within this context each weight is cast at most once, on first use (for autocast).

        `forward`, `evaluate` and `generate` are such a pass each; a user's own may hold several of them. After a
        training step inside, the weights are cast anew.
        """
        return self.pipeline.casts.kept()

    def close(self) -> None:
        """Stop helper threads; process groups belong to torch.distributed."""
        self.port.close()
        if not self.is_here:
            return
        try:
            self.watchers.saw_end()
        finally:
            self.pipeline.close()
