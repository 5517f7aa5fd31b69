"""The rehearsal of one rank's training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.data import MicroBatchSpec, PackedBatch, Split, split
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.loss_metrics import LossMetrics
from penstock.engine.losses import LossFn, token_cross_entropy
from penstock.engine.microbatches import AgreedSplit
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal.guards import explained, never_read, read_by_design
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.rehearsal.pipeline import RehearsedPipeline, RehearsedPlace
from penstock.engine.rehearsal.units import unit_costs
from penstock.engine.run_check import check, with_pretrained
from penstock.engine.run_parts import engine_arguments, micro_batches
from penstock.engine.sharding import UnitSource
from penstock.engine.trainer import Trainer
from penstock.runtime import Feed
from penstock.schedule.rehearsal import MemoryKind, Rehearsal
from penstock.settings import ConfigError, Layout, Precision, RunConfig, read_config


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
