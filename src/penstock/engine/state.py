"""The state of a model under training: all that checkpoints, exports and a user's own loop read and write of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from penstock.engine.memory import running_state_bytes
from penstock.engine.pipeline import Pipeline
from penstock.engine.sharding import local_parameters, local_state
from penstock.engine.trainer import Trainer
from penstock.parallel.buckets import StateBytes
from penstock.parallel.tensor_slice import LocalTensor, Shard
from penstock.schedule import Costs, Timeline


class ModelState:
    """This rank's weights, gradients and optimizer state by the parameters' full names, and the record of a step."""

    #: the model, cut into stages over the grid of processes
    pipeline: Pipeline
    #: gradients and optimizer
    trainer: Trainer

    def __init__(self, pipeline: Pipeline, trainer: Trainer) -> None:
        self.pipeline, self.trainer = pipeline, trainer

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        return self.pipeline.step

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameters that are copies: full name -> that of the one that counts, in norms and in checkpoints."""
        return self.pipeline.ties.owners

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Parameters of which this rank holds a part: full name -> which part."""
        return self.pipeline.sharding.shards

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by full name."""
        return self.pipeline.parameters()

    def gradient(self, name: str) -> Tensor:
        """The gradient of one of this rank's parameters, as the last step left it (a view).

        Where the optimizer's step is divided among ranks (`zero`), only the elements that this rank steps are summed.
        """
        return next(b.gradient(name) for b in self.trainer.gradients.values() if name in b.gradients)

    def state(self, optimizer: bool = True) -> dict[str, LocalTensor]:
        """This rank's part of the parameters and the optimizer's state, by full name: copy into it to load."""
        parameters = local_parameters(self.parameters(), self.shards)
        if not optimizer:
            return parameters
        return parameters | local_state(self.trainer.optimizer.owned_state(), self.shards)

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
        self.trainer.optimizer.load_progress(progress["optimizer"])

    def simulated(self, num_microbatches: int, costs: Costs) -> Timeline:
        """The simulated timeline of a step."""
        return self.pipeline.simulated(num_microbatches, costs)

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last step of pipeline 0, in ms, on rank 0; None elsewhere. All ranks call it.

        Ranks on one host share a clock; those of several hosts are aligned by it as well as the hosts are.
        """
        recording = self.pipeline.recording()
        return None if recording is None else recording.timeline

    def fixed_weights(self) -> AbstractContextManager[None]:
        """Within this context each weight is cast at most once, on first use (for autocast).

        `forward`, `evaluate` and `generate` are such a pass each; a user's own may hold several of them. After a
        training step inside, the weights are cast anew.
        """
        return self.pipeline.casts.kept()

    def close(self) -> None:
        """Stop helper threads; process groups belong to torch.distributed."""
        self.pipeline.close()
