"""The rehearsal of one rank's training step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from penstock.data import MicroBatchSpec, PackedBatch, Split, split
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.build import recomputes
from penstock.engine.folders.run_check import check, with_pretrained
from penstock.engine.folders.run_parts import engine_arguments, micro_batches
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal.counted import RehearsedPipeline, RehearsedPlace
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.sharding import UnitSource
from penstock.engine.training.losses import LossFn, LossMetrics, token_cross_entropy
from penstock.engine.training.microbatches import AgreedSplit
from penstock.engine.training.trainer import Trainer
from penstock.model import drain
from penstock.runtime import Feed, Recorder, Stage
from penstock.runtime.tape import Tape
from penstock.schedule import Op
from penstock.schedule.rehearsal import ActionCost, MemoryKind, Rehearsal, RehearsalError, UnitCost
from penstock.settings import ConfigError, Layout, Precision, RunConfig, read_config

# ---- Finds what a CPU forgives and a device does not: values read back by the host within a step


def read_by_design(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` outside of the program, where the engine reads a few values, such as the gradient norm.

    Each is 1.
    """
    if func is not _READ or not isinstance(args[0], FakeTensor):
        return _of_host(func, args)
    return 1.0 if args[0].is_floating_point() else 1


def never_read(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` within the program, where no value of a device may be read.

    Raises:
        RehearsalError: one would be.
        RuntimeError: factors of a product have different types.
    """
    if func is _READ and isinstance(args[0], FakeTensor):
        raise RehearsalError(f"the host reads a value of {_described(args[0])}")
    if func in _COPIES:
        source, target = (args[0], kwargs.get("device")) if func is _TO_COPY else (args[1], args[0].device)
        if target is not None and torch.device(target).type == "cpu" != source.device.type:
            raise RehearsalError(f"{_described(source)} is copied to the host")
    if func in _PRODUCTS and len({factor.dtype for factor in args if isinstance(factor, Tensor)}) > 1:
        # Tensors without data are multiplied whatever their types.
        raise RuntimeError(f"{func} of {' and '.join(str(f.dtype) for f in args if isinstance(f, Tensor))}")
    return _of_host(func, args)


_READ = torch.ops.aten._local_scalar_dense.default
_TO_COPY = torch.ops.aten._to_copy.default
_PRODUCTS = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default}
)
_COPIES = frozenset({_TO_COPY, torch.ops.aten.copy_.default})


def _of_host(func: Any, args: Any) -> Any:
    """The value of a real tensor, which lies in the host's memory; None for all other operations."""
    if func is not _READ or isinstance(args[0], FakeTensor):
        return None
    with _disable_current_modes():
        return func(*args)


def _described(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}"


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Say of a failure in which action it came, and what it would be on a device.

    Raises:
        RehearsalError: the step would fail, or wait for the device.
    """
    try:
        yield
    except RehearsalError as error:
        raise RehearsalError(
            f"{recorder.doing}: {error}, so that it waits for the device, which then idles; keep values on the device "
            "until the step has ended"
        ) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RehearsalError(
            f"{recorder.doing}: {error.func} needs the data of a tensor on the host, which would wait for the device; "
            "use operations whose result's shape does not depend on data"
        ) from error
    except FakeTensorDeviceMismatchError as error:
        raise RehearsalError(f"{recorder.doing}: {error}; the host's tensors are 'cpu', the device's 'meta'") from error
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise RehearsalError(f"{recorder.doing}: {type(error).__name__}: {error}") from error


# ---- The cost of each unit of a rank by itself: one microbatch's forward, and its backward, whole and in two parts


def unit_costs(pipeline: RehearsedPipeline, feed: Feed) -> tuple[UnitCost, ...]:
    """The costs of this rank's units for a microbatch, in the order of its stages; equal units are run once."""
    known: dict[Hashable, tuple[ActionCost, ...]] = {}
    found = []
    for number, stage in pipeline.stages.items():
        members = [pipeline.units[i] for i in pipeline.cut[number % len(pipeline.cut)]]
        for spec, (name, module) in zip(members, stage.units, strict=True):
            kind = _kind(spec.build), recomputes(name, pipeline.options), spec is pipeline.units[-1]
            if kind not in known:
                alone = Stage(
                    number,
                    [(name, module)],
                    stage.boundary,
                    stage.weight_gradients,
                    stage.autocast,
                    {name} if recomputes(name, pipeline.options) else (),
                )
                last, first = spec is pipeline.units[-1], spec is pipeline.units[0]
                run = _UnitRun(alone, pipeline, feed.finish if last else None, feed.tokens if first else None)
                known[kind] = run.costs(feed)
            num_bytes = sum(parameter.nbytes for parameter in module.parameters())
            found.append(UnitCost(name, number, num_bytes, known[kind]))
    return tuple(found)


def _kind(build: Callable[..., Any]) -> Hashable:
    """A key that two units share if they do the same: the function that makes them, with equal arguments."""
    if not isinstance(build, partial):
        return build
    arguments = (*build.args, *sorted(build.keywords.items()))
    return _kind(build.func), *(_kind(part) if callable(part) else part for part in arguments)


@dataclass(frozen=True, eq=False)
class _UnitRun:
    """One unit, as a stage of its own, with what it takes and gives at the model's ends."""

    stage: Stage
    pipeline: RehearsedPipeline
    finish: Callable[[Tensor], Tensor] | None
    tokens: Tensor | None

    def costs(self, feed: Feed) -> tuple[ActionCost, ...]:
        """The costs of F, of a whole backward B, and of its parts I and W."""
        boundary = self.stage.boundary
        with self.pipeline.traffic.apart():
            tape = Tape()
            forward = self._measured(Op.F, partial(self._forward, tape, feed))
            grad = None
            if self.finish is None:
                grad = torch.empty(boundary.shape(feed.num_tokens), dtype=boundary.dtype, device=self.pipeline.device)
            whole = self._measured(Op.B, partial(self._backward, tape, grad))
            tape = Tape()
            self._forward(tape, feed)
            inputs = self._measured(Op.I, partial(self._backward, tape, grad, split=True))
            weights = self._measured(Op.W, partial(self.stage.weight_backward, tape))
        return forward, whole, inputs, weights

    def _forward(self, tape: Tape, feed: Feed) -> None:
        x, boundary = self.tokens, self.stage.boundary
        if x is None:
            x = torch.empty(boundary.shape(feed.num_tokens), dtype=boundary.dtype, device=self.pipeline.device)
        drain(self.stage.forward(tape, x, feed.sequences, self.finish, feed.given))

    def _backward(self, tape: Tape, grad: Tensor | None, split: bool = False) -> None:
        drain(self.stage.backward(tape, grad, split))

    def _measured(self, op: Op, run: Callable[[], object]) -> ActionCost:
        """The cost of an act."""
        meter, traffic = self.pipeline.meter, self.pipeline.traffic
        traffic.restart()
        meter.restart()
        before = sum(meter.point("before").after.values())
        run()
        point = meter.point(op.name)
        return ActionCost(
            op,
            point.flops,
            point.read_bytes,
            point.written_bytes,
            point.after.get(MemoryKind.TAPE, 0),
            point.peak_bytes - before,
            traffic.collectives,
        )


# ---- The rehearsal of one rank's training step


@dataclass(frozen=True)
class RehearsedBatch:
    """The batch of a rehearsed step: the lengths of a data-parallel rank's sequences, and how they are split."""

    lengths: Sequence[int]
    micro_batches: MicroBatchSpec
    loss_fn: LossFn = token_cross_entropy


def rehearse_run(config: RunConfig | str | Path, rank: int = 0, device: str | None = None) -> Rehearsal:
    """`rehearse` for a run's settings, read from a TOML file or given.

    Every sequence has `data.sequence_length` tokens. `device` is that of the settings where it is left out, of which
    "auto" is "cuda".

    Raises:
        ValueError: the settings cannot go together, or the layout has no such rank.
        RehearsalError: the step would fail on devices; names the action.
    """
    settings = check(with_pretrained(read_config(config) if isinstance(config, str | Path) else config))
    if settings.model.native is False:
        raise ConfigError("a rehearsal knows native layers alone, but transformers' own run this model; train it")
    vocab_size = settings.model.vocab_size
    if not vocab_size:
        vocab_size = load_tokenizer(settings.data.tokenizer, settings.data.end_token or False).vocab_size
    arguments = engine_arguments(settings, vocab_size)
    num_sequences = settings.data.num_sequences // settings.parallel.dp
    batch = RehearsedBatch([settings.data.sequence_length] * num_sequences, micro_batches(settings))
    device = device or arguments.options.device
    options = replace(arguments.options, device="cuda" if device == "auto" else device)
    return rehearse(arguments.units, arguments.hidden_size, arguments.layout, options, batch, rank)


def rehearse(
    units: UnitSource,
    hidden_size: int,
    layout: Layout,
    options: EngineOptions,
    batch: RehearsedBatch,
    rank: int = 0,
) -> Rehearsal:
    """Run one rank's step by the engine's own code, with tensors that have no data, and nobody at the other ends.

    What would be read from the tokens is taken as even: each expert gets as many rows as any other. Operations are
    those of `options.device`, "cpu" or "cuda"; no device is used.

    Raises:
        ValueError: the layout has no such rank, or the settings cannot be rehearsed.
        RehearsalError: the step would fail on devices; names the action.
    """
    layout.coordinates(rank)
    on_device = "cpu" if options.device == "cpu" else "cuda"
    if on_device == "cuda" and options.precision is Precision.BF16_AUTOCAST:
        raise ConfigError(
            "a step under autocast cannot be rehearsed for a GPU where there is none; --device cpu is possible, and so "
            'is train.precision = "bf16"'
        )
    # Whatever is made for a unit's measured times would be measured without data.
    options = replace(options, measure_lengths=None, compile=False)
    # A device that no machine needs to have: operations on it take the ways that a GPU's take.
    device = torch.device("cpu" if on_device == "cpu" else "meta")
    data = PackedBatch.from_documents([torch.zeros(length, dtype=torch.int64) for length in batch.lengths])
    parts = split(data, batch.micro_batches)
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, meter, meter.guarded(read_by_design):
        pipeline = RehearsedPipeline(RehearsedPlace(rank, device, meter), units, hidden_size, layout, options)
        trainer = Trainer(pipeline)
        if pipeline.own_layers is not None:
            pipeline.own_layers.prepare_for(data)
        # The batch keeps its values, which the host may read; the mode goes on with these wherever it meets it.
        known = [mode.from_tensor(microbatch[key]) for microbatch in parts.microbatches for key in data.keys]
        meter.claim(MemoryKind.OTHER, known)
        feeds = _take_step(trainer, _agreed(pipeline, parts), batch.loss_fn)
        timeline = tuple(meter.timeline)
        costs = unit_costs(pipeline, feeds[0])
    program, traffic = pipeline.program(len(feeds)), pipeline.traffic
    return Rehearsal(
        rank=rank,
        place=str(pipeline.grid.place),
        device=on_device,
        schedule=program.schedule.name,
        num_microbatches=len(feeds),
        units=costs,
        timeline=timeline,
        messages=traffic.messages,
        collectives=traffic.collectives,
        launches=tuple(traffic.launches),
    )


def claim_state(trainer: Trainer, meter: Meter) -> None:
    """Report to the meter which tensors are state, and of which kind."""
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    buckets = [bucket for of_stage in trainer.gradients.values() for bucket in of_stage.buckets]
    states = optimizer.owned_state()
    masters = {name for name in states if name.startswith("optimizer.master.")}
    meter.claim(MemoryKind.OTHER, pipeline.buffers().values())
    meter.claim(MemoryKind.OPTIMIZER, [state.values for name, state in states.items() if name not in masters])
    meter.claim(MemoryKind.MASTERS, [states[name].values for name in masters])
    meter.claim(MemoryKind.PARAMETERS, pipeline.parameters().values())
    meter.claim(MemoryKind.GRADIENTS, [bucket.gradients for bucket in buckets])


def _take_step(trainer: Trainer, agreed: AgreedSplit, loss_fn: LossFn) -> list[Feed]:
    """The parts of `Trainer.train_batch` that one rank takes, in their order; returns the microbatches."""
    pipeline, loss_scale = trainer.pipeline, trainer.optimizer.loss_scale
    assert isinstance(pipeline, RehearsedPipeline)
    factors = [loss_scale / agreed.num_tokens for _ in agreed.weights]
    with explained(pipeline.recorder):
        feeds = trainer.feeds(agreed, LossMetrics(loss_fn), factors)
        claim_state(trainer, pipeline.meter)
        pipeline.meter.restart()
        pipeline.traffic.restart()
        with pipeline.meter.guarded(never_read):
            trainer.run(feeds)
        trainer.finish(feeds, loss_scale, 1, trainer.optimizer.rates(1))
    return feeds


def _agreed(pipeline: RehearsedPipeline, parts: Split) -> AgreedSplit:
    """The split that all ranks would agree on if each had a batch like this."""
    weights = [float(microbatch.num_tokens) for microbatch in parts.microbatches]
    return AgreedSplit(
        split=parts,
        weights=weights if pipeline.holds_last_stage else [],
        rank_totals=[sum(weights)] * pipeline.layout.dp,
        num_tokens=int(sum(weights)) * pipeline.layout.dp,
        stop_requested=False,
    )
