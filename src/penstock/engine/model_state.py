"""The state of a model under training: all that checkpoints, exports and a user's own loop read and write of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from penstock.engine.build import SECOND_COPY
from penstock.engine.optimizer.optimizer import state_aliases
from penstock.engine.pipeline import Pipeline
from penstock.engine.sharding import local_parameters, local_state
from penstock.engine.training.trainer import Trainer
from penstock.parallel.gradients import StateBytes
from penstock.parallel.host import check_same_calls, gather_json, shown_to_all_ranks
from penstock.parallel.tensor_slice import LocalTensor, Shard
from penstock.settings.declare import check_argument, nearest


@dataclass(eq=False)
class ModelState:
    """This rank's weights, gradients and optimizer state by the parameters' full names, and the record of a step."""

    #: the model, cut into stages over the grid of processes
    pipeline: Pipeline
    #: gradients and optimizer
    trainer: Trainer

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
        """Memory that this rank's parameters, gradients and optimizer take, counted by storage: buckets are flat."""
        trainer = self.trainer
        buckets = [bucket for of_stage in trainer.gradients.values() for bucket in of_stage.buckets]
        storages = {own.data_ptr(): own for own in (p.untyped_storage() for p in self.parameters().values())}
        return StateBytes(
            sum(own.nbytes() for own in storages.values()),
            sum(bucket.gradients.untyped_storage().nbytes() for bucket in buckets),
            trainer.optimizer.state_bytes,
        )

    def progress(self) -> dict[str, Any]:
        """The numbers that a resumed run needs beside `state`, as JSON values; the same on every rank."""
        return {"step": self.step, "optimizer": self.trainer.optimizer.progress()}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Go on from there, after the tensors of `state` have been loaded."""
        self.pipeline.continue_from(int(progress["step"]))
        self.trainer.load_progress(progress["optimizer"])

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
