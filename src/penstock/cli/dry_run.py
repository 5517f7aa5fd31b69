"""`penstock train RUN.toml --dry-run`: what a run would be, worked out without starting it."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock import schedule
from penstock.cli.layout_groups import group_rows, group_table
from penstock.engine.build import cut_units
from penstock.engine.config import RunConfig
from penstock.engine.options import Precision
from penstock.engine.run_parts import RunData, engine_options, layout, model_config
from penstock.model import ModelGroups, Sequences, UnitSpec, cross_entropy_sum, decoder_units

_FILE_COLUMNS = 120


@dataclass(frozen=True)
class StagePlan:
    """A stage as it would be: its units by name, and what one rank's share of it weighs; `share_of_work` is of the
    whole model's.

    `state_bytes`: parameters, fp32 gradients, optimizer. `activation_bytes`: what backward keeps of all microbatches
    that are under way at once.
    """

    stage: int
    rank: int
    units: tuple[str, ...]
    num_parameters: int
    share_of_work: float
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class RunPlan:
    """A run as it would be; the schedule's figures are those of equal stages with backward twice as long as forward."""

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

    @property
    def memory_bytes(self) -> dict[int, int]:
        """State and activations of each pipeline rank."""
        ranks = sorted({stage.rank for stage in self.stages})
        return {
            rank: sum(stage.state_bytes + stage.activation_bytes for stage in self.stages if stage.rank == rank)
            for rank in ranks
        }


def plan_run(config: RunConfig, data: RunData) -> RunPlan:
    """Work out what `config` would run on `data`.

    Raises:
        ValueError: the model can not be built or cut so.
    """
    shape = model_config(config, data.corpus.vocab_size)
    options = engine_options(config)
    program = options.choice.program(config.parallel.pp, config.train.num_microbatches)
    placement, timeline = program.placement, schedule.simulate(program)
    units, ours = decoder_units(shape), config.parallel
    # What the rank with the largest parts holds.
    held = decoder_units(shape, groups=ModelGroups.planned(tp=ours.tp, cp=ours.cp, ep=ours.ep))
    kept = kept_bytes_per_token(units, config)
    tokens = math.ceil(_rank_tokens(config) / config.train.num_microbatches)
    stages = []
    all_work = sum(unit.flops_per_token for unit in units)
    for number, members in enumerate(cut_units(units, placement, options)):
        rank = placement.rank_of(number)
        live = timeline.peak_live_microbatches[rank]
        count = sum(held[i].num_parameters for i in members)
        stages.append(
            StagePlan(
                stage=number,
                rank=rank,
                units=tuple(units[i].name for i in members),
                num_parameters=count,
                share_of_work=sum(units[i].flops_per_token for i in members) / all_work,
                state_bytes=count * _state_bytes(options.precision),
                activation_bytes=round(live * tokens * sum(kept[i] for i in members) / (ours.cp * ours.tp)),
            )
        )
    tied = {name for unit in units for name in unit.tied}
    copies = shape.vocab_size * shape.hidden_size if tied else 0
    step_tokens = config.data.num_sequences * config.data.sequence_length
    corpus_tokens = data.corpus.training.num_tokens
    return RunPlan(
        world_size=config.world_size,
        schedule=program.schedule.name,
        num_microbatches=program.schedule.num_microbatches,
        bubble_rate=timeline.bubble_rate,
        peak_live_microbatches=timeline.peak_live_microbatches,
        num_parameters=sum(unit.num_parameters for unit in units) - copies,
        step_tokens=step_tokens,
        corpus_tokens=corpus_tokens,
        epochs=config.train.steps * step_tokens / corpus_tokens,
        stages=tuple(stages),
    )


def kept_bytes_per_token(units: Sequence[UnitSpec], config: RunConfig) -> list[float]:
    """How many bytes backward keeps for each token in each unit, by running the units on tensors without data."""
    num_tokens = config.data.sequence_length
    kept: list[float] = []
    with FakeTensorMode(), _parameter_dtype(config), _autocast(config):
        sequences = Sequences.from_lengths((num_tokens,), torch.device("cpu"))
        x = torch.zeros(num_tokens, dtype=torch.int64)
        for unit in units:
            module = unit.build()
            counted = _Kept(module)
            with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda tensor: tensor):
                y = module(x.detach().requires_grad_() if x.is_floating_point() else x, sequences)
                if unit is units[-1]:
                    cross_entropy_sum(y, torch.zeros(num_tokens, dtype=torch.int64))
            if _is_recomputed(unit, config):
                kept.append(x.nbytes / num_tokens)
            else:
                kept.append(counted.num_bytes / num_tokens)
            x = y.detach()
    return kept


class _Kept:
    """Counts the bytes of saved tensors, each storage once and parameters never."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._seen = {p.untyped_storage()._cdata: p for p in module.parameters()}
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            # Kept alive here, so that no other storage takes its place in memory.
            self._seen[storage._cdata] = tensor  # pyright: ignore[reportArgumentType]
            self.num_bytes += storage.nbytes()
        return tensor


def show(config: RunConfig, as_json: bool) -> None:
    """Print the plan of a run; start and write nothing."""
    data = RunData.load(config)
    plan = plan_run(config, data)
    if as_json:
        groups = group_table(layout(config))
        print(json.dumps({**asdict(plan), "memory_bytes": plan.memory_bytes, "groups": groups}, indent=2))
    else:
        _print(config, plan)


def _print(config: RunConfig, plan: RunPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    # A table cut to 80 columns helps nobody who reads it in a file.
    console = Console(width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    facts = Table.grid(padding=(0, 2))
    live = ", ".join(f"{number:g}" for number in plan.peak_live_microbatches)
    memory = ", ".join(f"rank {rank}: {_mib(used)}" for rank, used in plan.memory_bytes.items())
    for name, text in (
        ("layout", f"{layout(config)}: {plan.world_size} processes of {config.parallel.num_threads} thread(s)"),
        *group_rows(layout(config)),
        ("schedule", f"{plan.schedule}, {plan.num_microbatches} microbatches: proved"),
        ("", f"bubble {plan.bubble_rate:.1%} if all stages were equal; microbatches live at once, by rank: {live}"),
        ("parameters", f"{plan.num_parameters:,} in {config.train.precision}"),
        ("data", f"{plan.corpus_tokens:,} tokens of {config.data.corpus}, {plan.step_tokens:,} a step"),
        ("length", f"{config.train.steps:,} steps, {plan.epochs:.2f} epochs"),
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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _names(units: Sequence[str]) -> str:
    return units[0] if len(units) == 1 else f"{units[0]} ... {units[-1]} ({len(units)})"


def _rank_tokens(config: RunConfig) -> int:
    return config.data.num_sequences // config.parallel.dp * config.data.sequence_length


def _state_bytes(precision: Precision) -> int:
    """Bytes of a parameter, its fp32 gradient, two fp32 means and, of 16-bit parameters, the fp32 master."""
    size = precision.parameter_dtype.itemsize
    return size + 4 + 8 + (4 if size == 2 else 0)


def _is_recomputed(unit: UnitSpec, config: RunConfig) -> bool:
    layers = config.train.recompute
    if isinstance(layers, str):
        return layers == "full"
    return any(unit.name.startswith(f"layers.{layer}.") for layer in layers)


@contextlib.contextmanager
def _parameter_dtype(config: RunConfig) -> Iterator[None]:
    """Modules are built in the run's dtype: those without data can not be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(Precision(config.train.precision).parameter_dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast(config: RunConfig) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=config.train.precision == "bf16-autocast")
