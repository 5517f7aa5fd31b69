"""A model cut into stages over a grid of processes, and what every job on it shares: training, scoring, generation.

Shapes: T tokens of a whole microbatch, R of this rank's part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from penstock.data import PackedBatch, labelled_part, part_of, rows_with_label
from penstock.engine.agreement import build_on_all_ranks, check_alike, check_whole_model
from penstock.engine.build import build_stages
from penstock.engine.cut import cut_units, measure_units, timed_cut
from penstock.engine.extra_state import ExtraState
from penstock.engine.optimizer.groups import ParameterGroups, freeze
from penstock.engine.options import EngineOptions, UnitSource, units_for
from penstock.engine.own_layers import OwnLayers
from penstock.engine.precision import deterministic_if, slow_precision_warning, stream_dtype
from penstock.engine.quantization import with_quantization
from penstock.engine.sharding import SECOND_COPY, Sharding, Ties, check_ties, stepped_whole
from penstock.model import (
    FutureTokens,
    Given,
    Logits,
    ModelGroups,
    Numbers,
    Randomness,
    Sequences,
    ShardedLogits,
    Spread,
    UnitSpec,
    WeightCasts,
    cut_sequences,
    kept_random_state,
    share_casts,
)
from penstock.model.cpu.host_memory import keep_freed_memory
from penstock.model.cpu.reproducible import check_reproducible
from penstock.model.layers.dense import read_sampled_alone
from penstock.model.linear import Pack
from penstock.parallel import GradientBuckets, Grid, connect, gather_uneven
from penstock.parallel.collectives import Collectives
from penstock.parallel.host import gather_json
from penstock.parallel.staging import in_one_copy
from penstock.runtime import (
    Boundary,
    DistributedTransport,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Line,
    Pairs,
    Recorder,
    Recovery,
    Stage,
    Transport,
)
from penstock.runtime.device_trace import DeviceRecorder
from penstock.runtime.recovery import StepState
from penstock.schedule import Pair, Placement, Program
from penstock.schedule.choice import ScheduleChoice
from penstock.schedule.placement import check_count
from penstock.schedule.recording import Recording
from penstock.settings import ConfigError, Groups, Layout

OutputFn = Callable[[Any, PackedBatch, Numbers], Tensor]
"""From the last stage's output, its microbatch and numbers to a result: in training the scaled loss."""

_logger = logging.getLogger(__name__)

_MAX_EXECUTORS = 64
"""Programs that are kept, each for one number of microbatches; a budget of tokens may lead to any number."""


def _numbers_by_row(part: PackedBatch) -> dict[str, Tensor]:
    """The keys with one number for each row, such as labels, which a loss on a device finds there."""
    return {key: x for key, x in (part.data or {}).items() if x.dim() == 1}


@dataclass(frozen=True, eq=False)
class ContextShards:
    """This rank's part of every microbatch under context parallelism."""

    #: the ranks that share every sequence, for device tensors
    group: dist.ProcessGroup

    def shard(self, microbatch: PackedBatch) -> tuple[PackedBatch, Sequences]:
        """This rank's part, cut alike for all keys, and the sequences that units see."""
        spread = self.spread(microbatch)
        return part_of(microbatch, spread.pieces[spread.rank]), Sequences.of_spread(spread)

    def spread(self, microbatch: PackedBatch) -> Spread:
        """The tokens of every rank; some may have none."""
        pieces = cut_sequences(microbatch.sequence_lengths("tokens"), self.group.size())
        return Spread(self.group.rank(), pieces)

    def whole_on(self, device: torch.device, microbatch: PackedBatch) -> PackedBatch:
        """The whole microbatch, as a hook finds it on a device."""
        [read] = in_one_copy([_numbers_by_row(microbatch)], device)
        return microbatch.on_device(read)

    def whole_logits(self, logits: Logits, microbatch: PackedBatch) -> Logits:
        """The logits of all of the microbatch's tokens; where ranks share the vocabulary, they still do."""
        if isinstance(logits, ShardedLogits):
            return replace(logits, own=self.whole(logits.own, microbatch))
        return self.whole(logits, microbatch)

    def whole(self, x: Tensor, microbatch: PackedBatch) -> Tensor:
        """Gather all ranks' rows [R, ...] in the order of the microbatch's tokens, [T, ...]; all ranks call it."""
        spread = self.spread(microbatch)
        rows = torch.cat(gather_uneven(x, spread.num_tokens, self.group))
        order = torch.cat([spread.rows(rank) for rank in range(spread.num_ranks)])
        return torch.empty_like(rows).index_copy_(0, order.to(x.device), rows)


@dataclass(frozen=True, eq=False)
class LocalModel:
    """The part of a model that this rank holds."""

    #: stage -> its modules
    stages: dict[int, Stage]
    #: casts of the weights, kept while no weight changes
    casts: WeightCasts
    #: parameters of the model that are copies of others
    ties: Ties
    #: tied copies on this rank -> the original beside them, whose storage they use
    loans: dict[str, str]
    #: the part of each parameter that this rank has, and the ranks over which its gradient is summed
    sharding: Sharding
    #: the optimizer's groups of parameters
    parameter_groups: ParameterGroups

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by full name, once values that other ranks step have arrived."""
        for stage in self.stages.values():
            stage.wait_for_weights()
        return {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}

    def lend_weights(self) -> None:
        """Let tied copies use the storage of the original beside them; called again when originals have moved."""
        parameters = self.parameters()
        for copy, original in self.loans.items():
            parameters[copy].data = parameters[original].data

    def buffers(self) -> dict[str, Tensor]:
        """This rank's persistent buffers by full name."""
        return {name: buffer for stage in self.stages.values() for name, buffer in stage.named_buffers()}

    def set_training(self, training: bool) -> None:
        """Put all modules into training or evaluation mode, whatever was done to them before."""
        for stage in self.stages.values():
            stage.set_training(training)


class Surroundings:
    """The other ranks of a rank: processes that torch.distributed connects.

    In a rehearsal they are missing (engine/rehearsal/place.py), in the check they are threads of this process
    (engine/check/ranks_in_turn.py).
    """

    #: True if tensors have values, which all ranks' can be compared by
    hold_values: bool = True
    #: makes the rank's stages
    stages = staticmethod(build_stages)
    #: the cut and the schedule for measured times; None for those of the options
    given_cut: tuple[tuple[range, ...], ScheduleChoice] | None = None

    def grid(self, layout: Layout, options: EngineOptions) -> Grid:
        grid = connect(layout, options.device, timedelta(seconds=options.timeout_s), options.transport)
        if grid.device.type == "cpu":
            keep_freed_memory()
        return grid

    def failure_group(self, grid: Grid) -> dist.ProcessGroup | None:
        """The ranks that end a step together when one of them fails."""
        return grid.control

    def recorder(self, grid: Grid, coordinates: str | None) -> Recorder:
        """The recorder of the rank; `coordinates` name its pipeline where there are several."""
        recorder = DeviceRecorder if grid.device.type == "cuda" else Recorder
        return recorder(grid.pp_rank, coordinates=coordinates)

    def transport(self, pipeline: Pipeline, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        """A transport among the ranks of the pipeline, which a failed step does not outlast."""
        if (group := pipeline.grid.pp_control) is None:
            return InProcessTransport(InProcessHub(), 0)
        is_staged = pipeline.grid.is_staged and device == pipeline.device
        is_open = pipeline.boundary.is_open and isinstance(lines, Placement)
        transport = DistributedTransport(lines, group, device, pipeline.options.timeout_s, is_staged, is_open)
        pipeline.recovery.covers(transport)
        return transport


class Pipeline:
    """This rank's part of a model that is cut into stages, with all that running a program on it takes.

    Every process of the layout constructs it at the same point and calls its methods in the same order. Arguments and
    errors are those of `Engine`.
    """

    #: the caller's options, with `quantize = auto` decided
    options: EngineOptions
    #: packs quantized weights; None if none are
    pack: Pack | None

    # -- the grid
    #: this rank's other ranks, or what stands in their place
    surroundings: Surroundings
    #: sizes of the grid's axes
    layout: Layout
    #: the device on which this rank computes
    device: torch.device
    #: this rank's place in the layout, and its process groups
    grid: Grid
    #: for each place on the dp axis, the rank that sees labels and losses
    output_ranks: tuple[int, ...]
    #: the ranks that are given the same batch, for each batch
    ranks_by_batch: Groups
    #: this rank's shard of each microbatch's tokens; None without context parallelism
    context: ContextShards | None

    # -- the model
    #: all units of the model, in order
    units: tuple[UnitSpec, ...]
    #: stage -> the rank that holds it
    placement: Placement
    #: stage -> its units, as positions in `units`; stages of a second copy are not listed
    cut: tuple[range, ...]
    #: the schedule, with the stages' times where an order is searched for
    choice: ScheduleChoice
    #: shape and dtype of the messages between stages
    boundary: Boundary
    #: the part of the model that this rank holds
    model: LocalModel
    #: state of this rank's layers beside parameters and buffers
    extra_state: ExtraState
    #: True if this rank holds that end of the model
    holds_first_stage: bool
    holds_last_stage: bool
    #: True on the rank of its pipeline that gets the results of `forward`
    gives_results: bool
    #: the context in which layers compute: that of deterministic kernels, or nothing
    kernels: Callable[[], AbstractContextManager[Any]]

    # -- running
    #: records this rank's actions and collectives, and says where it is
    recorder: Recorder
    #: carries messages between the ranks of the pipeline
    transport: Transport
    #: lets a failure on one rank end the step on all, and undoes it
    recovery: Recovery
    #: number of the last step, skipped ones included; 0 before the first
    step: int
    #: True if this rank has callbacks, which see steps and evaluations
    has_callbacks: bool
    #: True if any rank had them at the last step or evaluation
    has_callbacks_anywhere: bool
    #: (what reduces gradients, number of microbatches) -> executor of the proved program, least recently used first
    _executors: dict[tuple[Callable[[int], None] | None, int], Executor]

    def __init__(
        self,
        units: UnitSource,
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.layout, self.surroundings = layout or Layout(), surroundings or Surroundings()
        check_count("hidden_size", int(hidden_size))
        options = options or EngineOptions()
        self.grid = self.surroundings.grid(self.layout, options)
        self.device = self.grid.device
        self.kernels = deterministic_if(options.deterministic, self.device)
        if self.grid.rank == 0 and (warning := slow_precision_warning(options.precision, self.device)):
            _logger.warning(warning)
        self.context = ContextShards(self.grid.cp_group) if self.grid.cp_group is not None else None
        model_groups = ModelGroups(self.grid.tp_group, self.grid.cp_group, self.grid.ep_group, options.attention)
        self.units = build_on_all_ranks(lambda: units_for(units, model_groups, self.layout), self.grid.control)
        is_open = all(unit.is_own for unit in self.units)
        self.boundary = Boundary(hidden_size, stream_dtype(self.units, options.precision), self.layout.tp, is_open)
        # Of a user's own layers; those of the package may be sharded.
        facts = {f"the parameters of {unit.name}": unit.num_parameters for unit in self.units if unit.is_own}
        facts |= {"the message between stages": self.boundary}
        check_alike(options, facts, self.grid.control)
        self.options, self.pack = with_quantization(options, self.device, self.grid)
        self.placement = options.choice.placement(self.layout.pp)
        self.cut, self.choice = self.surroundings.given_cut or self._choose_cut(units, hidden_size)
        check_ties(self.units, self.cut, self.placement)
        self.step, self._executors = 0, {}
        self.has_callbacks = self.has_callbacks_anywhere = False
        place = "" if self.layout.world_size == self.layout.pp else str(self.grid.place)
        self.recorder = self.surroundings.recorder(self.grid, place or None)
        self.model = build_on_all_ranks(self._build_model, self.grid.control)
        self.holds_first_stage = any(map(self.placement.is_first, self.model.stages))
        self.holds_last_stage = any(map(self.placement.is_last, self.model.stages))
        output_rank = self.placement.output_rank
        self.gives_results = self.grid.pp_rank == output_rank
        self.output_ranks = tuple(self.layout.rank_of(dp=dp, pp=output_rank) for dp in range(self.layout.dp))
        self.ranks_by_batch = self.layout.groups("pp", "cp", "tp")
        self.extra_state = ExtraState(self.model.stages.values())
        if self.surroundings.hold_values:
            self._check_whole_model()
        # Only now: the check computes the last layer for all tokens.
        for stage in self.model.stages.values():
            read_sampled_alone([module for _, module in stage.units])
        step_state = StepState(self.model.stages.values(), self.device)
        self.recovery = Recovery(self.surroundings.failure_group(self.grid), self.recorder, step_state, place)
        for process_group in self.grid.renewable():
            self.recovery.covers(process_group)
        self.transport = self.surroundings.transport(self, self.placement, self.device)

    def _build_model(self) -> LocalModel:
        """Build this rank's stages, and find their parameters' ties and shards."""
        placement, grid, options, casts = self.placement, self.grid, self.options, WeightCasts()
        own = {index: self.cut[placement.original_of(index)] for index in placement.stages_of(grid.pp_rank)}
        stages = self.surroundings.stages(self.units, own, self.boundary, options, self.device, self.pack)
        for index, stage in stages.items():
            stage.suffix = SECOND_COPY if placement.route_of(index) else stage.suffix
            for _, module in stage.units:
                share_casts(module, casts)
                attributes = [value for part in module.modules() for value in vars(part).values()]
                for collectives in (value for value in attributes if isinstance(value, Collectives)):
                    collectives.observer = self.recorder
        parameters = dict(pair for stage in stages.values() for pair in stage.named_parameters())
        ties = Ties.of(self.units, parameters, placement.num_routes)
        loans = ties.loans(parameters)
        sharding = Sharding.of(self.units, parameters, grid).lending(loans)
        parameter_groups = ParameterGroups(options.optimizer, ties.originals)
        if options.learns:
            freeze(parameters, parameter_groups)
            whole = stepped_whole(parameters, parameter_groups, sharding.shards)
            if options.optimizer.zero:
                sharding = sharding.with_zero(ties.originals, grid, whole)
        model = LocalModel(stages, casts, ties, loans, sharding, parameter_groups)
        model.lend_weights()
        return model

    def _choose_cut(self, units: UnitSource, hidden_size: int) -> tuple[tuple[range, ...], ScheduleChoice]:
        """The units of each stage, and the schedule, which may depend on the units' measured times."""
        lengths, choice = self.options.measure_lengths, self.options.choice
        if lengths is not None and any(unit.is_own for unit in self.units):
            raise ConfigError(
                "measure_lengths: to measure layers is to run them, and your own run on a batch's data alone; leave it "
                "out, and the cut follows their parameters, or give schedule.cut"
            )
        if lengths is None or self.layout.pp == 1 or (choice.settings.cut is not None and not choice.is_searched):
            return cut_units(self.units, self.placement, self.options), choice
        # One rank measures, so the units are not sharded: only the proportions of their times count.
        whole_units = units_for(units, ModelGroups(), Layout())
        times = measure_units(whole_units, hidden_size, lengths, self.options, self.grid)
        return timed_cut(whole_units, self.placement, self.options, times)

    def _check_whole_model(self) -> None:
        model = self.model
        tensors = {name: x for name, x in (model.parameters() | model.buffers()).items() if name not in model.loans}
        parameter_groups = self.options.optimizer.groups if self.options.learns else ()
        check_whole_model(tensors, model.sharding.shards, self.grid, parameter_groups)
        if self.options.reproducible:
            units = [unit for stage in model.stages.values() for unit in stage.units]
            build_on_all_ranks(
                lambda: check_reproducible(units, self.boundary.hidden_size, model.casts), self.grid.control
            )

    def run(self, executor: Executor, feeds: Iterable[Feed]) -> list[Tensor]:
        """Run a program. Layers draw from seeds of their own, so torch's generators are restored afterwards."""
        with self.kernels(), kept_random_state(self.device):
            return executor.run(feeds)

    # ---- the model on this rank

    @cached_property
    def own_layers(self) -> OwnLayers | None:
        """This rank's layers that are called by the names of their parameters; None if all take the plain stream."""
        own_layers = OwnLayers(self.units[0].name, self.model.stages)
        return None if own_layers.are_plain else own_layers

    def gradient_buckets(self, num_missed: Mapping[str, int]) -> dict[int, GradientBuckets]:
        """Gradient buckets by stage, into which the stages' parameters move; empty for an engine that does not learn.

        num_missed: see `Optimizer.num_missed`.
        """
        if not self.options.learns:
            return {}
        model, reductions = self.model, dict(self.model.sharding.reductions)
        for name in reductions.keys() & num_missed.keys():
            # Parameters with another number of updates have buckets of their own.
            reductions[name] = replace(reductions[name], alone=f"{reductions[name].alone} {num_missed[name]}")
        buckets_by_stage = {
            index: GradientBuckets(
                stage.named_parameters(),
                self.grid.dp_cp_group,
                reductions=reductions,
                observer=self.recorder,
                group_of=model.parameter_groups.number,
            )
            for index, stage in model.stages.items()
        }

        def settle_all() -> None:
            for buckets in buckets_by_stage.values():
                buckets.settle()

        for index, buckets in buckets_by_stage.items():
            # The original of a lent weight may lie in any stage of this rank.
            if model.loans or any(bucket.reduction.sharded for bucket in buckets.buckets):
                model.stages[index].wait_for_weights = settle_all if model.loans else buckets.settle
        return buckets_by_stage

    # ---- running a program

    def feed(
        self,
        microbatch: PackedBatch,
        numbers: Numbers,
        output_fn: OutputFn,
        training: bool = False,
        labelled: bool = False,
    ) -> Feed:
        """A microbatch for the executor: tokens on the rank of the first stage, `output_fn` on that of the last.

        The microbatch is reduced to this rank's part under context parallelism, and with `labelled` to tokens with a
        label. `output_fn` gets that part and its logits, which are `ShardedLogits` where ranks share the vocabulary.
        All that is needed of it on the device goes there in one copy.
        Random numbers of layers depend on `numbers`, so that a step has the same ones whenever it is taken.
        """
        part, sequences = self._part(microbatch)
        data_rank = self.grid.dp_rank * self.layout.cp + self.grid.cp_rank
        # In training `numbers.step` is the step being taken, elsewhere the last one taken.
        num_steps_taken = numbers.step - 1 if training else numbers.step
        randomness = Randomness(self.options.seed, num_steps_taken, data_rank, numbers.microbatch, self.device)
        to_output, loss_part = self.units[-1].to_output, part
        # A user's own last layer computes all tokens.
        if labelled and self.holds_last_stage and self.units[-1].flops_if_read:
            loss_part, rows = labelled_part(part)
            sequences = sequences.with_read_rows(rows)
        if training and self.holds_last_stage:
            sequences = replace(sequences, ahead=self._ahead(microbatch))
        entering = {"tokens": part["tokens"]} if self.holds_first_stage else {}
        named = {} if self.own_layers is None else self.own_layers.inputs(part)
        loss_keys = _numbers_by_row(loss_part) if self.holds_last_stage else {}
        tables = in_one_copy([entering, named, loss_keys, *sequences.tables()], self.device)
        (entering, named, loss_keys), sequences = tables[:3], sequences.with_tables(tables[3:])
        loss_part = loss_part.on_device(loss_keys)

        def result(output: Any) -> Tensor:
            return output_fn(output if to_output is None else to_output(output), loss_part, numbers)

        return Feed(
            num_tokens=sequences.num_tokens,
            sequences=sequences,
            tokens=entering.get("tokens"),
            result_fn=result if self.holds_last_stage else None,
            given=Given(named, randomness, {} if self.own_layers is None else numbers._asdict()),
        )

    def _part(self, microbatch: PackedBatch) -> tuple[PackedBatch, Sequences]:
        """This rank's part of a microbatch, and its sequences, on the host."""
        if self.context is None:
            part, sequences = microbatch, Sequences.from_lengths(microbatch.sequence_lengths("tokens"))
        else:
            part, sequences = self.context.shard(microbatch)
        # Positions of another form than a whole number for each token are for a user's own layers.
        if (
            "positions" in part
            and part.lengths["positions"] == part.lengths["tokens"]
            and not part.trailing_shapes["positions"]
            and not part.dtypes["positions"].is_floating_point
        ):
            sequences = sequences.with_positions(part["positions"])
        return part, sequences

    def _ahead(self, microbatch: PackedBatch) -> tuple[FutureTokens, ...]:
        """Tokens and labels further ahead, of this rank's part of the microbatch, for multi-token prediction."""
        if not (num_ahead := self.units[-1].num_ahead):
            return ()
        tokens, labels, lengths = microbatch["tokens"], microbatch["labels"], microbatch.sequence_lengths("tokens")
        # The batch has values where a rehearsal's tensors have none.
        with _disable_current_modes():
            ahead = [FutureTokens.of(tokens, labels, lengths, distance + 1) for distance in range(num_ahead)]
            if self.context is not None:
                spread = self.context.spread(microbatch)
                rows = spread.rows(spread.rank).to(tokens.device)
                ahead = [targets.rows(rows) for targets in ahead]
        return tuple(targets.reading(rows_with_label(targets.labels_T)) for targets in ahead)

    def program(self, num_microbatches: int, training: bool = True) -> Program:
        """The program of a training step, or of the forwards alone."""
        if training:
            shared = self.layout.shares_layers
            return self.choice.program(self.layout.pp, num_microbatches, whole_backwards=shared)
        return self.choice.forwards(self.placement, num_microbatches)

    def executor(self, num_microbatches: int, reduce: Callable[[int], None] | None) -> Executor:
        """The executor of `program`, proved once and kept while in use.

        reduce: starts summing the gradients of a local stage, given by index, over ranks, without waiting; None for the
        forwards alone.
        """
        key = (reduce, num_microbatches)
        executor = self._executors.pop(key, None)
        if executor is None:
            program = self.program(num_microbatches, training=reduce is not None)
            executor = Executor(
                program,
                {index: stage for index, stage in self.model.stages.items() if index < program.placement.num_stages},
                self.transport,
                self.recorder,
                reduce,
                Pairs(self.choice.settings.overlap, early_release=self.choice.settings.early_release),
                self.recovery.alarm,
            )
        self._executors[key] = executor
        if len(self._executors) > _MAX_EXECUTORS:
            del self._executors[next(iter(self._executors))]
        return executor

    def continue_from(self, step: int) -> None:
        """Go on as if this number of optimizer steps had been taken."""
        self.step = step
        self.recovery.uncertain = None

    def sum_over_ranks(self, what: str, *values: float) -> list[float]:
        """The sums of all ranks' values, on every rank. what: names the collective in the record."""
        if self.grid.control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.recorder.collective(what):
            dist.all_reduce(tensor, group=self.grid.control)
        return tensor.tolist()

    def close(self) -> None:
        """Stop helper threads; process groups belong to torch.distributed."""
        self.recovery.close()
        self.transport.close()

    # ---- looking at a step

    def recording(self, of_all: bool = True) -> Recording | None:
        """The record of the last step, in ms: of pipeline 0 on rank 0 (None elsewhere), or of this rank alone.

        of_all: gathers the records of all ranks, which all call it.
        """
        actions = [record.row() for record in self.recorder.records() if record.end_ns]
        rows = [actions, self.recorder.collective_rows()]
        by_rank = gather_json(rows, self.grid.pp_control) if of_all else [rows]
        if of_all and self.grid.rank:
            return None
        ranks = f"{self.layout.pp} rank{'s' * (self.layout.pp != 1)}"
        return Recording.gathered(
            *zip(*by_rank, strict=True),
            title=f"{self.options.choice.name}, {ranks}, measured in step {self.step}",
            step=self.step,
            stages_per_rank=self.placement.stages_per_microbatch,
        )

    def useless_overlap_warning(self, num_microbatches: int) -> str | None:
        """A warning if the schedule overlaps exchanges within layers but no layer has any; else None."""
        program = self.program(num_microbatches)
        fused = any(isinstance(entry, Pair) for order in program.schedule.orders for entry in order)
        exchanges = self.context is not None or any(unit.sharding for unit in self.units)
        if exchanges or not (fused and self.choice.settings.overlap):
            return None
        return (
            f"{program.schedule.name} fuses forwards with backwards, so that one computes while the other's exchange "
            "with its peers is under way; here no layer exchanges anything, so overlap gains nothing"
        )
