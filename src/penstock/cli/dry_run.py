"""`penstock train RUN.toml --dry-run`: the plan of a run, computed without starting it."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from penstock import schedule
from penstock.cli.doctor import group_rows, group_table
from penstock.cli.output import print_json, print_table, show_log, size_in_words, waiting
from penstock.data import DataShard
from penstock.engine.cut import cut_units, timed_cut, times_here
from penstock.engine.rehearsal.step import RehearsedRun
from penstock.engine.run_data import RunData
from penstock.model import ModelGroups, decoder_units
from penstock.parallel.gradients import StateBytes
from penstock.schedule import Costs, Op
from penstock.schedule.rehearsal import STATE, MemoryKind, MemoryPoint, Rehearsal
from penstock.settings import ConfigError, Precision, RunConfig


@dataclass(frozen=True)
class StagePlan:
    """A planned stage: its units by name, and the size of one rank's share of it.

    share_of_work: of the whole model's. microbatch_bytes: kept of a microbatch from its F to its backward.
    for_weights_bytes: from its I to its W.
    """

    stage: int
    rank: int
    units: tuple[str, ...]
    num_parameters: int
    share_of_work: float
    microbatch_bytes: int
    for_weights_bytes: int


@dataclass(frozen=True)
class RunPlan:
    """A planned run.

    The schedule's figures assume equal stages whose backward takes twice as long as their forward or, if
    `is_measured`, times measured on this machine. `peak_live_microbatches` counts a microbatch that waits for its W by
    its remaining bytes. step_tokens: of a step, on average over the items. Memory is that of each rank of the layout as
    a rehearsal for `device` finds it: `memory` in the action with the highest peak, `states` throughout. `peers`: for
    each rank the first one that takes the same bytes.
    """

    world_size: int
    schedule: str
    num_microbatches: int
    bubble_rate: float
    peak_live_microbatches: tuple[float, ...]
    num_parameters: int
    step_tokens: int
    corpus_tokens: int
    num_items: int
    epochs: float
    stages: tuple[StagePlan, ...]
    device: str
    memory: tuple[MemoryPoint, ...]
    states: tuple[StateBytes, ...]
    peers: tuple[int, ...]
    is_measured: bool = False

    @property
    def memory_bytes(self) -> dict[int, int]:
        """The most bytes of each rank at once."""
        return {rank: point.peak_bytes for rank, point in enumerate(self.memory)}


def plan_run(config: RunConfig, data: RunData) -> RunPlan:
    """Plan the run of `config` on `data`.

    Raises:
        ValueError: the model cannot be built or cut like this.
        RehearsalError: its step would fail.
    """
    ours, shape = config.parallel, config.model.whole(data.corpus.vocab_size)
    # Autocast casts for no GPU that is not there.
    device = "cpu" if config.train.precision is Precision.BF16_AUTOCAST else None
    run = RehearsedRun.of(config, device, data.corpus.vocab_size, data.fullest_lengths())
    options, units = run.arguments.options, decoder_units(shape)
    placement, times = options.choice.placement(ours.pp), _measured(run, config)
    if times is not None:
        cut, choice = timed_cut(units, placement, options, times)
        run = replace(run, batch=replace(run.batch, given_cut=(cut, choice)))
    else:
        cut, choice = cut_units(units, placement, options), options.choice
    num_microbatches = len(run.batch.parts.microbatches)
    program = choice.checked_program(ours.pp, num_microbatches, whole_backwards=ours.shares_layers)
    peers = run.peers()
    with waiting("rehearsing the ranks", sys.stderr):
        rehearsals = {rank: run.rehearse(rank) for rank in sorted(set(peers))}
    stages = _stage_plans(run, cut, placement, list(rehearsals.values()))
    costs, of_cut = Costs() if times is None else schedule.costs_of_cut(times, cut), stages[: len(cut)]
    costs = replace(
        costs,
        microbatch_bytes=[stage.microbatch_bytes for stage in of_cut],
        weight_memory_share=[stage.for_weights_bytes / (stage.microbatch_bytes or 1) for stage in of_cut],
    )
    timeline = schedule.simulate(program, costs)
    copies = shape.vocabulary * shape.hidden_size if any(unit.tied for unit in units) else 0
    packing, num_sequences = data.loader(DataShard(), with_data=False).packing, config.data.num_sequences
    return RunPlan(
        world_size=ours.world_size,
        schedule=program.schedule.name,
        num_microbatches=program.schedule.num_microbatches,
        bubble_rate=timeline.bubble_rate,
        peak_live_microbatches=timeline.peak_live_microbatches,
        num_parameters=sum(unit.num_parameters for unit in units) - copies,
        step_tokens=round(num_sequences * packing.num_tokens / packing.num_items),
        corpus_tokens=data.corpus.training.num_tokens,
        num_items=packing.num_items,
        epochs=config.train.steps * num_sequences / packing.num_items,
        stages=tuple(stages),
        device=options.device,
        memory=tuple(rehearsals[first].fullest for first in peers),
        states=tuple(_state(rehearsals[first]) for first in peers),
        peers=tuple(peers),
        is_measured=times is not None,
    )


def _state(rehearsal: Rehearsal) -> StateBytes:
    state = rehearsal.state_bytes
    optimizer = state[MemoryKind.MASTERS] + state[MemoryKind.OPTIMIZER]
    return StateBytes(state[MemoryKind.PARAMETERS], state[MemoryKind.GRADIENTS], optimizer)


def _stage_plans(
    run: RehearsedRun, cut: Sequence[range], placement: schedule.Placement, rehearsals: Sequence[Rehearsal]
) -> list[StagePlan]:
    """The stages, each with what the first rank that holds it keeps."""
    layout = run.arguments.layout
    units = run.arguments.units(ModelGroups())
    # As the rank with the largest shards holds them.
    largest = run.arguments.units(ModelGroups.planned(tp=layout.tp, cp=layout.cp, ep=layout.ep))
    work = [unit.work(run.arguments.options.label_share) for unit in units]
    plans = []
    for number in range(placement.num_stages):
        members = cut[placement.original_of(number)]
        # Each rank that holds it has the same; none for a stage without units.
        held = ([unit for unit in one.units if unit.stage == number] for one in rehearsals)
        costs = next(filter(None, held), [])
        plan = StagePlan(
            stage=number,
            rank=placement.rank_of(number),
            units=tuple(units[i].name for i in members),
            num_parameters=sum(largest[i].num_parameters for i in members),
            share_of_work=sum(work[i] for i in members) / sum(work),
            microbatch_bytes=sum(unit.of(Op.F).kept_bytes for unit in costs),
            for_weights_bytes=sum(unit.of(Op.I).kept_bytes for unit in costs),
        )
        plans.append(plan)
    return plans


def _measured(run: RehearsedRun, config: RunConfig) -> Costs | None:
    """The units' times on this machine, if the run would measure them too."""
    options = run.arguments.options
    if options.measure_lengths is None or config.parallel.pp == 1:
        return None
    torch.set_num_threads(config.parallel.num_threads)
    device = torch.device("cuda" if torch.cuda.is_available() and config.parallel.device != "cpu" else "cpu")
    return times_here(
        run.arguments.units(ModelGroups()), run.arguments.hidden_size, options.measure_lengths, options, device
    )


def show_dry_run(config: RunConfig, as_json: bool) -> None:
    """Print the plan of a run; start and write nothing."""
    if config.model.native is False:
        raise ConfigError("--dry-run knows native layers alone, but transformers' own run this model; leave it out")
    show_log()
    data = RunData.load(config)
    plan = plan_run(config, data)
    if as_json:
        print_json({**asdict(plan), "memory_bytes": plan.memory_bytes, "groups": group_table(config.parallel)})
    else:
        _print(config, plan)


def _print(config: RunConfig, plan: RunPlan) -> None:
    live = ", ".join(f"{number:g}" for number in plan.peak_live_microbatches)
    at_times = "at the times measured here" if plan.is_measured else "if all stages were equal"
    # Windows are all alike.
    is_mean = plan.step_tokens != config.data.num_sequences * config.data.sequence_length
    mean = f" on average, in {plan.num_items:,} items" if is_mean else ""
    rank, most = max(enumerate(plan.states), key=lambda numbered: numbered[1].total)
    facts = (
        ("layout", f"{config.parallel}: {plan.world_size} processes of {config.parallel.num_threads} thread(s)"),
        *group_rows(config.parallel),
        ("schedule", f"{plan.schedule}, {plan.num_microbatches} microbatches: proved"),
        ("", f"bubble {plan.bubble_rate:.1%} {at_times}; microbatches live at once, by rank: {live}"),
        ("parameters", f"{plan.num_parameters:,} in {config.train.precision}"),
        ("data", f"{plan.corpus_tokens:,} tokens of {config.data.corpus}, {plan.step_tokens:,} a step{mean}"),
        ("length", f"{config.train.steps:,} steps, {plan.epochs:.2f} epochs"),
        (
            "state",
            f"at most {size_in_words(most.total)}, on rank {rank}: parameters {size_in_words(most.parameters)}, "
            f"gradients {size_in_words(most.gradients)}, optimizer {size_in_words(most.optimizer)}",
        ),
        ("memory", f"as rehearsed for {plan.device}{' with the fullest batch' * is_mean}, rank by rank below"),
        ("output", config.output),
    )
    width = max(len(name) for name, _ in facts)
    print("\n".join(f"{name:{width}}  {text}" for name, text in facts), end="\n\n")
    stages = [("stage", "rank", "units", "parameters", "work", "a microbatch")]
    for stage in plan.stages:
        size = f"{stage.num_parameters:,}", f"{stage.share_of_work:.1%}", size_in_words(stage.microbatch_bytes)
        first, *others = stage.units or ("none: it hands on",)
        names = f"{first} ... {others[-1]} ({len(stage.units)})" if others else first
        stages.append((str(stage.stage), str(stage.rank), names, *size))
    print_table(stages, num_texts=3)
    memory: list[tuple[str, ...]] = [("rank", "fullest in", "peak", "state", "tape", "other")]
    for rank in sorted(set(plan.peers)):
        point, more = plan.memory[rank], plan.peers.count(rank) - 1
        state, tape = sum(point.at_peak.get(kind, 0) for kind in STATE), point.at_peak.get(MemoryKind.TAPE, 0)
        sizes = map(size_in_words, (point.peak_bytes, state, tape, point.peak_bytes - state - tape))
        memory.append((f"{rank} and {more} like it" if more else str(rank), point.action, *sizes))
    print()
    print_table(memory, num_texts=2)
    print("\nNothing was started; leave out --dry-run to train.")
