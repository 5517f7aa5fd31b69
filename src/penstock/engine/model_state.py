"""The state of a model under training, as checkpoints, exports and a user's own loop read and write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.checkpoint import CheckpointReader
from penstock.engine.checkpoint.manifest import (
    CheckpointInfo,
    DamagedCheckpoint,
    restore_random_state,
    warn_of_attributes,
)
from penstock.engine.optimizer.state import FORM, STATE, is_of_all, state_name
from penstock.engine.optimizer.steppers import OwnedState, StateName, Stored
from penstock.engine.pipeline import Pipeline
from penstock.engine.sharding import SECOND_COPY
from penstock.engine.training.trainer import Trainer
from penstock.parallel.gradients import StateBytes
from penstock.parallel.host import DifferentCalls, gather_on_all_ranks, on_all_ranks
from penstock.parallel.tensor_slice import LocalTensor, Shard, TensorSlice, local_run
from penstock.settings.declare import check_argument, nearest


@dataclass(eq=False)
class ModelState:
    """This rank's weights, gradients and optimizer state, by the parameters' full names."""

    #: the model, cut into stages over the grid of processes
    pipeline: Pipeline
    #: gradients and optimizer
    trainer: Trainer

    @property
    def step(self) -> int:
        """The number of the last step, skipped ones included; 0 before the first."""
        return self.pipeline.step

    @property
    def ties(self) -> Mapping[str, str]:
        """Copies among parameters and buffers: full name -> the original's, under which checkpoints store both."""
        copies = {name: name.removesuffix(SECOND_COPY) for name in self.buffers() if name.endswith(SECOND_COPY)}
        return {**self.pipeline.model.ties.originals, **copies}

    @property
    def shards(self) -> Mapping[str, Shard]:
        """The parts of divided parameters that this rank holds, by full name."""
        return self.pipeline.model.sharding.shards

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by full name."""
        return self.pipeline.model.parameters()

    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers by full name, such as BatchNorm's statistics; the first rank's of each dp."""
        return self.pipeline.model.buffers()

    def extra_state(self) -> dict[str, Any]:
        """The extra state of this rank's modules (`get_extra_state`), by its name in the whole model's state dict."""
        return self.pipeline.extra_state.values()

    def gradient(self, name: str) -> Tensor:
        """The gradient of one of this rank's parameters, as the last step left it (a view).

        If ranks divide the optimizer's step (`zero`), only the elements that this rank steps are summed over ranks.
        """
        gradients: dict[str, Tensor] = {}
        for buckets in self.trainer.buckets.values():
            gradients |= buckets.gradients
        if name not in gradients:
            near = f"the nearest name is {nearest(str(name), gradients)!r}" if gradients else "none is trained here"
            raise ValueError(f"this rank has no gradient of {name!r}; {near}")
        return gradients[name]

    def state(self, optimizer: bool = True) -> dict[str, LocalTensor]:
        """This rank's part of parameters, buffers and optimizer state by full name, as views to load into."""
        self.pipeline.options.check_unpacked("the state")
        state: dict[str, LocalTensor] = {}
        for name, values in (self.parameters() | self.buffers()).items():
            state[name] = {self.shards[name].part: values.detach()} if name in self.shards else values.detach()
        if optimizer:
            state |= _local_state(self.trainer.optimizer.owned_state(), self.shards)
        return state

    def state_to_save(self) -> dict[str, LocalTensor]:
        """`state` and the layers' extra state, for a checkpoint; all ranks call it.

        Raises: ValueError on all ranks if one has an optimizer or a module with state that no checkpoint can hold.
        """
        # Ranks that see other parts of a batch may differ in extra state; the first one's is saved, as with buffers.
        is_first = self.pipeline.grid.is_first_of_stages

        def state() -> dict[str, LocalTensor]:
            return self.state() | (self.pipeline.extra_state.tensors() if is_first else {})

        return on_all_ranks(state, self.pipeline.grid.control, ValueError, message="{error}")

    def state_to_load(self, checkpoint: CheckpointInfo) -> dict[str, LocalTensor]:
        """`state`, and empty tensors for the checkpoint's optimizer state and extra state of this rank.

        Raises: DamagedCheckpoint if a tensor is larger than the files; ValueError for another optimizer's state.
        """
        total_bytes = sum(int(file["size_bytes"]) for file in checkpoint.files.values())
        for record in checkpoint.tensors.values():
            if math.prod(record.part.shape) > total_bytes:
                raise DamagedCheckpoint(
                    f"checkpoint {checkpoint.path} holds {total_bytes} bytes, but {record.of} is {record}"
                )
        if self.pipeline.grid.rank == 0:
            warn_of_attributes(checkpoint)
        control, extra = self.pipeline.grid.control, self.pipeline.extra_state
        room = on_all_ranks(lambda: extra.allocate_for(checkpoint), control, ValueError, message="{error}")
        state = self.state(optimizer=False) | room
        if not self.pipeline.options.learns:
            return state
        engine = checkpoint.extra.get("engine") if isinstance(checkpoint.extra, dict) else None
        saved_kinds, kinds = engine and engine["optimizer"].get("kinds"), self.trainer.optimizer.kinds
        if saved_kinds and saved_kinds != kinds:
            raise ValueError(
                f"checkpoint {checkpoint.path} has the state of {saved_kinds}, but this engine's optimizer is {kinds}; "
                "load it with the optimizer that it was saved with"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self.parameters().items():
            shape = self.shards[name].full_shape if name in self.shards else tuple(parameter.shape)
            # Files have complex numbers as pairs.
            shapes[name] = (*shape, 2) if parameter.is_complex() else shape
        names: dict[str, list[str]] = {}
        for name in shapes:
            names.setdefault(self.ties.get(name, name), []).append(name)
        stored: dict[StateName, Stored] = {}
        for record in checkpoint.tensors.values():
            if not record.of.startswith(STATE):
                continue
            (kind, parameter), shape = state_name(record.of), record.part.full_shape
            for name in [parameter] if is_of_all(parameter) else names.get(parameter, ()):
                has_its_shape = kind != FORM and shape == shapes.get(name)
                stored[kind, name] = getattr(torch, record.dtype), None if has_its_shape else shape
        return state | _local_state(self.trainer.optimizer.allocate_for(stored), self.shards)

    def load_checkpoint(self, reader: CheckpointReader, info: CheckpointInfo) -> None:
        """Go on from a checkpoint's tensors, counters and random numbers; all ranks call it.

        Raises: FileNotFoundError; ValueError for a damaged checkpoint or that of another model; on all ranks.
        """
        grid, options = self.pipeline.grid, self.pipeline.options
        with self.pipeline.recorder.collective("load a checkpoint"):
            tensors = self.state_to_load(info)
            reader.check_used(info, tensors, ignored="" if options.learns else "optimizer.")
            reader.load(info, tensors)

        def go_on(values: Any) -> None:
            self.load_progress(values["engine"])
            restore_random_state([of_rank["random"] for of_rank in info.rank_values], grid.rank, grid.world_size)

        try:
            reader.restore(info, go_on)
        except Exception:
            # Tensors are loaded, and counters of other ranks perhaps.
            self.pipeline.recovery.uncertain = "a checkpoint was not loaded whole: load it again, or another"
            raise
        self.trainer.trained.rebuild_as_loaded()
        self.pipeline.model.casts.renew()

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's parameters, gradients and optimizer state, each storage counted once."""
        trainer = self.trainer
        buckets = [bucket for stage_buckets in trainer.buckets.values() for bucket in stage_buckets.buckets]
        storages = [parameter.untyped_storage() for parameter in self.parameters().values()]
        return StateBytes(
            sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()),
            sum(bucket.gradients.untyped_storage().nbytes() for bucket in buckets),
            trainer.optimizer.state_bytes,
        )

    def progress(self) -> dict[str, Any]:
        """The step and the optimizer's counters, as JSON values: with `state` all that a resumed run needs."""
        return {"step": self.step, "optimizer": self.trainer.optimizer.progress()}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Go on from `progress`, after the tensors of `state` have been loaded; then ranks `rebuild_as_loaded`."""
        self.pipeline.extra_state.load_allocated()
        self.pipeline.continue_from(int(progress["step"]))
        self.trainer.optimizer.load_progress(progress["optimizer"])

    def check_call(self, call: str, **arguments: tuple[Any, Any]) -> None:
        """Begin the method `call` on all ranks: check that they are in the same one, and its arguments' types.

        arguments: name -> (value, type). Raises: ValueError for a wrong type, DifferentCalls if ranks are in different
        methods, on all ranks alike; PipelineError after `close`; TransportError if a rank does not come in time.
        """

        def check() -> str:
            for name, (value, kind) in arguments.items():
                check_argument(name, value, kind)
            return call

        self.pipeline.recovery.check_usable()
        with self.pipeline.recorder.collective(f"begin {call}, which all ranks call"):
            calls = gather_on_all_ranks(check, self.pipeline.grid.control, ValueError)
        if other := next((rank for rank, text in enumerate(calls) if text != calls[0]), None):
            raise DifferentCalls(
                f"all ranks make the same calls in the same order, but rank 0 made {calls[0]} and rank {other} "
                f"{calls[other]}"
            )


def _local_state(owned: Mapping[str, OwnedState], shards: Mapping[str, Shard]) -> dict[str, LocalTensor]:
    """The state of `Optimizer.owned_state` by name, as views of this rank's slices."""
    tensors: dict[str, LocalTensor] = {}
    for name, state in owned.items():
        if state.place is None:
            tensors[name] = state.values
            continue
        shard = shards.get(state.place.name)
        part = TensorSlice.whole(state.place.parameter.shape) if shard is None else shard.part
        tensors[name] = local_run(state.values, state.place.first, part)
    return tensors
