"""`penstock train RUN.toml --dry-run`: the plan of a run, computed without starting it."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from penstock import schedule
from penstock.cli.doctor import group_rows, group_table
from penstock.cli.progress import show_log
from penstock.engine.build import cut_units
from penstock.engine.folders.lora import with_adapter
from penstock.engine.folders.run_parts import RunData
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal.memory import costs_of_memory, kept_bytes, rank_state_bytes
from penstock.engine.timed_cut import UnitTimes, stage_costs, timed_cut, times_here
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.config_json import HuggingFaceForm
from penstock.parallel.gradients import StateBytes
from penstock.settings import ConfigError, Layout, RunConfig

_FILE_COLUMNS = 120


@dataclass(frozen=True)
class StagePlan:
    """A planned stage: its units by name, and the size of one rank's share of it.

    share_of_work: of the whole model's. state_bytes: parameters, gradients, optimizer. activation_bytes: kept for
    backwards when the rank's activations peak.
    """

    stage: int
    rank: int
    units: tuple[str, ...]
    num_parameters: int
    share_of_work: float
    state_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class RunPlan:
    """A planned run.

    The schedule's figures assume equal stages whose backward takes twice as long as their forward or, if
    `is_measured`, times measured on this machine. `peak_live_microbatches` counts a microbatch that waits for its W by
    its remaining bytes. `states`: each rank's memory without activations, to the byte.
    """

    world_size: int
    schedule: str
    num_microbatches: int
    bubble_rate: float
    peak_live_microbatches: tuple[float, ...]
    num_parameters: int
    step_tokens: int
    corpus_tokens: int
    epochs: float
    stages: tuple[StagePlan, ...]
    states: tuple[StateBytes, ...]
    is_measured: bool = False

    @property
    def memory_bytes(self) -> dict[int, int]:
        """Bytes of state and activations of each pipeline rank."""
        ranks = sorted({stage.rank for stage in self.stages})
        return {
            rank: sum(stage.state_bytes + stage.activation_bytes for stage in self.stages if stage.rank == rank)
            for rank in ranks
        }


def plan_run(config: RunConfig, data: RunData) -> RunPlan:
    """Plan the run of `config` on `data`.

    Raises:
        ValueError: the model cannot be built or cut like this.
    """
    shape = config.model.whole(data.corpus.vocab_size)
    options = EngineOptions.of(config)
    lengths, num_microbatches = _microbatches(config)
    units, ours = decoder_units(shape), config.parallel
    placement = options.choice.placement(ours.pp)
    times = _measured(units, shape.hidden_size, options, config)
    # As the rank with the largest shards holds them.
    largest = decoder_units(shape, groups=ModelGroups.planned(tp=ours.tp, cp=ours.cp, ep=ours.ep))
    if times:
        cut, choice = timed_cut(units, shape.hidden_size, placement, options, times)
    else:
        cut, choice = cut_units(units, placement, options), options.choice
    costs = costs_of_memory(kept_bytes(units, shape.hidden_size, cut, options, lengths))
    if times:
        found, names = stage_costs(times, cut), ("forward", "backward_input", "backward_weight")
        costs = replace(costs, **{name: getattr(found, name) for name in names})
        options = replace(options, schedule=replace(choice.settings, cut=tuple(map(len, cut))))
    program = choice.checked_program(ours.pp, num_microbatches, whole_backwards=ours.shares_layers)
    timeline = schedule.simulate(program, costs)
    stages = _stage_plans(units, largest, cut, placement)
    source = with_adapter(
        lambda groups: decoder_units(shape, groups=groups), options.adapter, HuggingFaceForm.of(shape), ours
    )
    states = rank_state_bytes(source, ours, options)
    at_peak = {rank: timeline.bytes_at_peak(rank) for rank in range(ours.pp)}
    stages = [_with_bytes(stage, at_peak[stage.rank], ours, states) for stage in stages]
    tied = {name for unit in units for name in unit.tied}
    copies = shape.vocabulary * shape.hidden_size if tied else 0
    step_tokens = config.data.num_sequences * config.data.sequence_length
    corpus_tokens = data.corpus.training.num_tokens
    return RunPlan(
        world_size=config.parallel.world_size,
        schedule=program.schedule.name,
        num_microbatches=program.schedule.num_microbatches,
        bubble_rate=timeline.bubble_rate,
        peak_live_microbatches=timeline.peak_live_microbatches,
        num_parameters=sum(unit.num_parameters for unit in units) - copies,
        step_tokens=step_tokens,
        corpus_tokens=corpus_tokens,
        epochs=config.train.steps * step_tokens / corpus_tokens,
        stages=tuple(stages),
        states=tuple(sum(of_rank.values(), StateBytes(0, 0, 0)) for of_rank in states),
        is_measured=bool(times),
    )


def _stage_plans(
    units: Sequence[UnitSpec], largest: Sequence[UnitSpec], cut: Sequence[range], placement: schedule.Placement
) -> list[StagePlan]:
    """The stages without their bytes; `largest` are the units as held by the rank with the largest shards."""
    all_work = sum(unit.flops_per_token for unit in units)
    return [
        StagePlan(
            stage=number,
            rank=placement.rank_of(number),
            units=tuple(units[i].name for i in members),
            num_parameters=sum(largest[i].num_parameters for i in members),
            share_of_work=sum(units[i].flops_per_token for i in members) / all_work,
        )
        for number in range(placement.num_stages)
        for members in [cut[number % len(cut)]]
    ]


def _with_bytes(
    stage: StagePlan, at_peak: Mapping[int, float], layout: Layout, states: Sequence[Mapping[int, StateBytes]]
) -> StagePlan:
    """The stage with its bytes, given those that each stage of its rank keeps at the peak."""
    return replace(
        stage,
        state_bytes=max(of_rank[stage.stage].total for of_rank in states if stage.stage in of_rank),
        activation_bytes=round(at_peak.get(stage.stage, 0.0) / (layout.cp * layout.tp)),
    )


def _measured(
    units: Sequence[UnitSpec], hidden_size: int, options: EngineOptions, config: RunConfig
) -> list[UnitTimes] | None:
    """The units' times on this machine, if the run would measure them too."""
    if options.measure_lengths is None or config.parallel.pp == 1:
        return None
    torch.set_num_threads(config.parallel.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu")
    return times_here(units, hidden_size, options.measure_lengths, options, device)


def _microbatches(config: RunConfig) -> tuple[tuple[int, ...], int]:
    """The lengths of a full microbatch's sequences, and how many microbatches a step has."""
    data, train = config.data, config.train
    num_sequences = data.num_sequences // config.parallel.dp
    of_one = math.ceil(num_sequences / train.num_microbatches)
    if train.max_microbatch_tokens is not None:
        of_one = min(of_one, max(1, train.max_microbatch_tokens // data.sequence_length))
    return (data.sequence_length,) * of_one, max(train.num_microbatches, math.ceil(num_sequences / of_one))


def show(config: RunConfig, as_json: bool) -> None:
    """Print the plan of a run; start and write nothing."""
    if config.model.native is False:
        raise ConfigError("--dry-run knows native layers alone, but transformers' own run this model; leave it out")
    show_log()
    data = RunData.load(config)
    plan = plan_run(config, data)
    if as_json:
        groups = group_table(config.parallel)
        print(json.dumps({**asdict(plan), "memory_bytes": plan.memory_bytes, "groups": groups}, indent=2))
    else:
        _print(config, plan)


def _print(config: RunConfig, plan: RunPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    # In a file, a table cut to 80 columns helps nobody.
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    facts = Table.grid(padding=(0, 2))
    live = ", ".join(f"{number:g}" for number in plan.peak_live_microbatches)
    memory = ", ".join(f"rank {rank}: {_mib(used)}" for rank, used in plan.memory_bytes.items())
    at_times = "at the times measured here" if plan.is_measured else "if all stages were equal"
    for name, text in (
        ("layout", f"{config.parallel}: {plan.world_size} processes of {config.parallel.num_threads} thread(s)"),
        *group_rows(config.parallel),
        ("schedule", f"{plan.schedule}, {plan.num_microbatches} microbatches: proved"),
        ("", f"bubble {plan.bubble_rate:.1%} {at_times}; microbatches live at once, by rank: {live}"),
        ("parameters", f"{plan.num_parameters:,} in {config.train.precision}"),
        ("data", f"{plan.corpus_tokens:,} tokens of {config.data.corpus}, {plan.step_tokens:,} a step"),
        ("length", f"{config.train.steps:,} steps, {plan.epochs:.2f} epochs"),
        ("state", _largest_state(plan.states)),
        ("memory", f"{memory}, estimated from state and activations"),
        ("output", config.output),
    ):
        facts.add_row(name, text)
    console.print(facts, highlight=False)
    table = Table("stage", "rank", "units", "parameters", "work", "state", "activations", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for stage in plan.stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            _names(stage.units),
            f"{stage.num_parameters:,}",
            f"{stage.share_of_work:.1%}",
            _mib(stage.state_bytes),
            _mib(stage.activation_bytes),
        )
    console.print()
    console.print(table, highlight=False)
    console.print("\nNothing was started; leave out --dry-run to train.", highlight=False)


def _largest_state(states: Sequence[StateBytes]) -> str:
    rank, most = max(enumerate(states), key=lambda numbered: numbered[1].total)
    return (
        f"at most {_mib(most.total)}, on rank {rank}: parameters {_mib(most.parameters)}, gradients "
        f"{_mib(most.gradients)}, optimizer {_mib(most.optimizer)}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _names(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]} ({len(units)})"
