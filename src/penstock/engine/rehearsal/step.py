"""The rehearsal of one rank's training step."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from penstock.data import MicroBatchSpec, PackedBatch, Split, labels_of_share, split
from penstock.data.tokenizer import load_tokenizer
from penstock.engine.adapter import with_adapter
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.run_parts import engine_arguments, micro_batches
from penstock.engine.folders.runs import tokenizer_of
from penstock.engine.optimizer.groups import ParameterGroups
from penstock.engine.options import EngineArguments, EngineOptions, UnitSource, units_for
from penstock.engine.pipeline import Pipeline
from penstock.engine.rehearsal.counted import CountedArena
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.rehearsal.place import RehearsedPlace
from penstock.engine.rehearsal.units import rehearsed_costs, without_values
from penstock.engine.training.loss import BoundLoss, LossFn, StepLoss, num_loss_tokens, token_cross_entropy
from penstock.engine.training.microbatches import BatchReport, MicrobatchList, MicrobatchSource
from penstock.engine.training.trainer import Trainer
from penstock.model import ModelGroups
from penstock.runtime import Feed, Recorder
from penstock.schedule import Action, Op
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.rehearsal import MemoryKind, Rehearsal, RehearsalError, communicator_bytes
from penstock.schedule.rules import channels_of
from penstock.settings import ConfigError, Division, Layout, Normalize, Precision, RunConfig, read_config
from penstock.settings.declare import checked, words_of

# ---- Guards against values that the host reads back within a step, for which a device would wait


def read_by_design(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` outside of the program, where the engine may read values: each one is 1."""
    if func is not _READ or not isinstance(args[0], FakeTensor):
        return _of_host(func, args)
    return 1.0 if args[0].is_floating_point() else 1


def never_read(func: Any, args: Any, kwargs: Any) -> Any:
    """A guard for a `Meter` within the program, where no value of a device may be read.

    Raises:
        RehearsalError: a value would be read.
        RuntimeError: factors of a product have different dtypes.
    """
    if func is _READ and isinstance(args[0], FakeTensor):
        raise RehearsalError(f"the host reads a value of {_shape_and_dtype(args[0])}")
    if func in _COPIES:
        source, target = (args[0], kwargs.get("device")) if func is _TO_COPY else (args[1], args[0].device)
        places = source.device.type, source.device.type if target is None else torch.device(target).type
        if places[0] != places[1] == "cpu":
            raise RehearsalError(f"{_shape_and_dtype(source)} is copied to the host")
        if places[0] != places[1] and not (kwargs.get("non_blocking") or True in args[2:]):
            raise RehearsalError(f"{_shape_and_dtype(source)} is copied to the device")
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
    """The value that is read from a real tensor in host memory; None for any other operation."""
    if func is not _READ or isinstance(args[0], FakeTensor):
        return None
    with _disable_current_modes():
        return func(*args)


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"a tensor of shape {list(tensor.shape)} and {tensor.dtype}"


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Within this context a failure names its action, and says what it would be on a device.

    Raises: RehearsalError if the step would fail, or wait for the device.
    """
    try:
        yield
    except (RehearsalError, DataDependentOutputException, DynamicOutputShapeException) as error:
        what = error if isinstance(error, RehearsalError) else f"{error.func} needs the data of a tensor on the host"
        raise RehearsalError(
            f"{recorder.doing}: {what}, so that it waits for the device, which then idles; keep values on the device "
            "until the step has ended"
        ) from error
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # Releases of PyTorch differ in the type and text of this error, but all say "devices".
        places = "; the host's tensors are 'cpu', the device's 'meta'" if "devices" in str(error) else ""
        raise RehearsalError(f"{recorder.doing}: {type(error).__name__}: {words_of(error)}{places}") from error


# ---- The batch of a step


@dataclass(frozen=True)
class RehearsedBatch:
    """The batch of a rehearsed step: the lengths of a data-parallel rank's sequences, and how they are split."""

    lengths: Sequence[int]
    micro_batches: MicroBatchSpec
    loss_fn: LossFn = token_cross_entropy
    #: share of tokens with a label, which are the last ones of each sequence
    label_share: float = 1.0
    #: the cut and the schedule for measured times; None for those of the options
    given_cut: tuple[tuple[range, ...], ScheduleChoice] | None = None

    @cached_property
    def data(self) -> PackedBatch:
        tokens = [torch.zeros(length, dtype=torch.int64) for length in self.lengths]
        labels = [labels_of_share(length, self.label_share) for length in self.lengths]
        return PackedBatch.from_sequences({"tokens": tokens, "labels": labels})

    @cached_property
    def parts(self) -> Split:
        return split(self.data, self.micro_batches)


# ---- The rehearsal of one rank's training step


@dataclass(frozen=True, eq=False)
class RehearsedRun:
    """A run whose ranks are rehearsed: the arguments of its engine, and its batch."""

    arguments: EngineArguments
    batch: RehearsedBatch
    #: the model's experts, and how many of them each token goes to; 0 without any
    num_experts: int
    num_active: int

    @classmethod
    def of(
        cls,
        config: RunConfig,
        device: str | None = None,
        vocab_size: int | None = None,
        lengths: Sequence[int] | None = None,
    ) -> RehearsedRun:
        """The run of settings that have been checked; see `rehearse_run`.

        vocab_size: the tokenizer's, if it is known. lengths: of a data-parallel rank's sequences; None for
        `data.sequence_length` each.

        Raises: ConfigError if transformers' own layers run the model.
        """
        if config.model.native is False:
            raise ConfigError("a rehearsal knows native layers alone, but transformers' own run this model; train it")
        vocab_size = config.model.vocab_size or vocab_size
        if not vocab_size:
            vocab_size = load_tokenizer(tokenizer_of(config), config.data.end_token).vocab_size
        arguments = engine_arguments(config, vocab_size)
        device = device or arguments.options.device
        options = replace(arguments.options, device="cuda" if device == "auto" else device)
        units = arguments.units
        if options.adapter is not None:
            units = with_adapter(units, options.adapter, arguments.form, arguments.layout)
        num_sequences = config.data.num_sequences // config.parallel.dp
        lengths, share = lengths or [config.data.sequence_length] * num_sequences, config.data.label_share
        batch = RehearsedBatch(lengths, micro_batches(config), label_share=share)
        experts = config.model.experts
        return cls(arguments._replace(units=units, options=options), batch, experts.num_experts, experts.num_active)

    def rehearse(self, rank: int) -> Rehearsal:
        """One rank's step; see `rehearse`."""
        units, hidden_size, layout, options, _ = self.arguments
        return rehearse(units, hidden_size, layout, options, self.batch, rank)

    def peers(self) -> list[int]:
        """For each rank the first rank whose step takes as many bytes.

        Such ranks hold the same stages, shards of equal sizes, and equal parts of a microbatch. If an optimizer steps
        whole parameters, ranks that share its state may step unequally many.
        """
        layout, options = self.arguments.layout, self.arguments.options
        rules = ParameterGroups(options.optimizer).rules if options.optimizer.zero else ()
        owns_whole = any(rule.division is not Division.ELEMENTS for rule in rules)
        sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        first: dict[Hashable, int] = {}
        representatives = []
        for rank in range(layout.world_size):
            place = layout.coordinates(rank)
            ep_rank = next((ranks.index(rank) for ranks in layout.expert_groups() if rank in ranks), 0)
            shared = place.tp, ep_rank
            if shared not in sizes:
                groups = ModelGroups.planned(
                    tp=layout.tp, cp=layout.cp, ep=layout.ep, form=options.attention, places=(place.tp, 0, ep_rank)
                )
                sizes[shared] = tuple(unit.num_parameters for unit in units_for(self.arguments.units, groups, layout))
            divided = () if self._is_even else (place.tp, place.cp, ep_rank)
            owned = (place.dp, place.cp) if owns_whole else ()
            representatives.append(first.setdefault((place.pp, sizes[shared], divided, owned), rank))
        return representatives

    @property
    def _is_even(self) -> bool:
        """True if all ranks that share a microbatch, and all experts, get equally many of its tokens."""
        layout = self.arguments.layout
        shares = (2 * layout.cp if layout.cp > 1 else 1) * layout.tp
        counts = self.batch.lengths if layout.cp > 1 else [parts.num_tokens for parts in self.batch.parts.microbatches]
        return all(
            count % shares == 0 and (not self.num_experts or count // shares * self.num_active % self.num_experts == 0)
            for count in counts
        )


@checked
def rehearse_run(config: RunConfig | str | Path, rank: int = 0, device: str | None = None) -> Rehearsal:
    """Rehearse one rank's training step of a run, given its settings or their TOML file.

    Every sequence has `data.sequence_length` tokens. device: "cpu" or "cuda"; left out, the settings' (for "auto",
    "cuda").

    Raises:
        ValueError: the settings cannot go together, or the layout has no such rank.
        RehearsalError: the step would fail on devices; names the action.
    """
    settings = check_run(with_pretrained(read_config(config) if isinstance(config, str | Path) else config))
    return RehearsedRun.of(settings, device).rehearse(rank)


def rehearse(
    units: UnitSource,
    hidden_size: int,
    layout: Layout,
    options: EngineOptions,
    batch: RehearsedBatch,
    rank: int = 0,
) -> Rehearsal:
    """Run one rank's step by the engine's own code, on tensors without data and without other ranks.

    Experts are taken to get equally many tokens. Operations are those of `options.device`, "cpu" or "cuda", but no
    device is used.

    Raises:
        ValueError: the layout has no such rank, or the settings cannot be rehearsed.
        RehearsalError: the step would fail on devices; names the action.
    """
    layout.coordinates(rank)
    device = "cpu" if options.device == "cpu" else "cuda"
    if device == "cuda" and options.precision is Precision.BF16_AUTOCAST:
        raise ConfigError(
            "a step under autocast cannot be rehearsed for a GPU where there is none; --device cpu is possible, and so "
            'is train.precision = "bf16"'
        )
    # Without data there are no times to measure.
    options = replace(options, measure_lengths=None, compile=False)
    place, parts = replace(RehearsedPlace.of(device, rank), given_cut=batch.given_cut), batch.parts
    meter = place.meter
    with without_values() as mode, meter, meter.guarded(read_by_design):
        pipeline = Pipeline(units, hidden_size, layout, options, place)
        trainer = Trainer(pipeline)
        if device == "cuda" and options.transport != "host":
            meter.reserve(MemoryKind.COMMUNICATORS, _communicator_bytes(pipeline))
        if pipeline.own_layers is not None:
            pipeline.own_layers.prepare_for(batch.data)
        # The batch keeps its values, which the host may read; the mode uses these fakes wherever it meets its tensors.
        fakes = [mode.from_tensor(microbatch[key]) for microbatch in parts.microbatches for key in batch.data.keys]
        meter.claim(MemoryKind.OTHER, fakes)
        loss = BoundLoss(batch.loss_fn, num_loss_tokens, Normalize.GLOBAL)
        feeds = _take_step(trainer, place, parts, loss)
        program, traffic = pipeline.program(len(feeds)), place.traffic
        step = Rehearsal(
            rank=rank,
            place=str(pipeline.grid.place),
            device=device,
            schedule=program.schedule.name,
            num_microbatches=len(feeds),
            units=(),
            timeline=tuple(meter.timeline),
            messages=traffic.messages,
            collectives=traffic.collectives,
            launches=tuple(traffic.launches),
        )
        # Last, because this restarts the meter.
        costs = rehearsed_costs(pipeline.units, pipeline.model.stages, options, feeds[0], place)
    return replace(step, units=costs)


def _communicator_bytes(pipeline: Pipeline) -> int:
    """The memory that NCCL takes for this rank's links and groups."""
    layout, rank = pipeline.layout, pipeline.grid.pp_rank
    num_links = sum(rank in channel[:2] for channel in channels_of(pipeline.placement))
    return communicator_bytes(num_links, layout.num_device_groups)


def claim_state(trainer: Trainer, meter: Meter) -> None:
    """Tell the meter which tensors are parameters, gradients, optimizer state and buffers."""
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    buckets = [bucket for stage_buckets in trainer.buckets.values() for bucket in stage_buckets.buckets]
    states = optimizer.owned_state()
    masters = {name for name in states if name.startswith("optimizer.master.")}
    meter.claim(MemoryKind.OTHER, pipeline.model.buffers().values())
    meter.claim(MemoryKind.OPTIMIZER, [state.values for name, state in states.items() if name not in masters])
    meter.claim(MemoryKind.MASTERS, [states[name].values for name in masters])
    meter.claim(MemoryKind.PARAMETERS, pipeline.model.parameters().values())
    meter.claim(MemoryKind.GRADIENTS, [bucket.gradients for bucket in buckets])


def _take_step(trainer: Trainer, place: RehearsedPlace, parts: Split, loss: BoundLoss) -> list[Feed]:
    """The lines of `Trainer.train_batch` that concern one rank, in their order; returns the feeds."""
    pipeline, optimizer = trainer.pipeline, trainer.optimizer
    microbatches, loss_scale = microbatches_of(pipeline, parts, loss), optimizer.loss_scale
    with explained(pipeline.recorder):
        executor = pipeline.executor(microbatches.num, trainer.start_reduction)
        executor.arena = CountedArena()
        feeds = list(trainer.feeds(microbatches, StepLoss(loss), loss_scale, 1, executor.program))
        if optimizer.may_fail:
            # An optimizer of torch makes its state in the first step; a later one is rehearsed.
            optimizer.update(optimizer.take_edits_and_norm()[0], 1, optimizer.rates.at(1))
        claim_state(trainer, place.meter)
        place.meter.restart()
        place.traffic.restart()
        with place.meter.guarded(never_read):
            trainer.prepare()
            losses = pipeline.run(executor, feeds)
        record = pipeline.recorder.begin(Action(Op.STEP))
        norm, _, aux_notes = trainer.finish_gradients(losses, feeds)
        trainer.step_weights(norm, aux_notes, loss_scale, 1, optimizer.rates.at(1))
        pipeline.recorder.end(record)
    return feeds


def microbatches_of(pipeline: Pipeline, parts: Split, loss: BoundLoss) -> MicrobatchSource:
    """The microbatches on which all ranks would agree if each had this batch."""
    source = MicrobatchList(pipeline, parts.microbatches, loss=loss)
    # Labels have values, which the host may read.
    with _disable_current_modes():
        report = source.divide_and_report(BatchReport(), None)
    reports = [replace(report, weight=float(report.num_tokens))] * pipeline.layout.world_size
    source.begin(report.num_microbatches, reports)
    return source
