"""Tokens per second of one training step: the same modules under Penstock, under torch's pipelining, and alone."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ranks import Turn, in_turns, spread
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import Sequences, UnitSpec, cross_entropy_sum, decoder_units
from penstock.model.linear import TORCH, fastest_matmul
from penstock.settings import (
    Layout,
    LearningRate,
    ModelConfig,
    OptimizerConfig,
    Precision,
    ScheduleConfig,
    WeightDecay,
)

RATE, DECAY, BETAS, EPS = 1e-4, 0.1, (0.9, 0.95), 1e-8
NUM_RANKS = 2


@dataclass(frozen=True)
class Training:
    """The model and its batches: by default 30 million parameters, microbatches of two sequences of 256 tokens.

    `products`, the same on all sides: "torch" computes linear layers as `nn.Linear` does, "fastest" with the fastest
    library available. `precision` and `compile` are the same on all sides too: fp32, or forwards under autocast to
    bf16; each layer as it is, or compiled. `names` are the schedules that Penstock runs with its own cut.
    """

    num_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 1408
    vocab_size: int = 4096
    sequence_tokens: int = 256
    microbatch_sequences: int = 2
    num_microbatches: int = 8
    num_steps: int = 3
    products: str = "torch"
    precision: Precision = Precision.FP32
    compile: bool = False
    names: tuple[str, ...] = ("1f1b",)

    @property
    def microbatch_tokens(self) -> int:
        return self.sequence_tokens * self.microbatch_sequences

    @property
    def step_tokens(self) -> int:
        return self.microbatch_tokens * self.num_microbatches

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.sequence_tokens,) * self.microbatch_sequences

    def units(self) -> tuple[UnitSpec, ...]:
        config = ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // 64,
            max_length=self.sequence_tokens,
        )
        return decoder_units(config, TORCH if self.products == "torch" else fastest_matmul())

    def even_cut(self, num_stages: int) -> tuple[int, ...]:
        """Cut into equally many layers per stage; the embedding goes to the first, the head to the last.

        Raises: ValueError if the layers cannot be divided evenly.
        """
        if self.num_layers % num_stages:
            raise ValueError(f"{self.num_layers} layers cannot be divided among {num_stages} stages evenly")
        halves = 2 * self.num_layers // num_stages
        return (halves + 1, *[halves] * (num_stages - 2), halves + 1)

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.vocab_size, (self.step_tokens,), generator=generator)

    def batch(self) -> PackedBatch:
        """Tokens of a step; each is its own label, so that every token has one."""
        tokens = self.tokens()
        lengths = [list(self.lengths)] * self.num_microbatches
        return PackedBatch.from_data({"tokens": tokens, "labels": tokens}, {"tokens": lengths, "labels": lengths})


Step = Callable[[], object]


class Run(nn.Module):
    """A run of units as one module, for microbatches of equal lengths, as torch's pipelining takes it."""

    def __init__(self, training: Training, units: Sequence[UnitSpec]) -> None:
        super().__init__()
        modules = []
        for unit in units:
            module = unit.build()
            unit.initialise(module, 0)
            if training.compile:
                module.compile()
            modules.append(module)
        self.precision = training.precision
        self.units = nn.ModuleList(modules)
        self.sequences = Sequences.from_lengths(training.lengths)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision is Precision.BF16_AUTOCAST):
            for unit in self.units:
                x = unit(x, self.sequences)
        return x


def _adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


def _alone(training: Training, num_threads: int) -> Step:
    """One process with gradient accumulation over the microbatches."""
    module = Run(training, training.units())
    adamw = _adamw(module)
    microbatches = training.tokens().split(training.microbatch_tokens)

    def step() -> None:
        torch.set_num_threads(num_threads)
        adamw.zero_grad()
        for tokens in microbatches:
            (cross_entropy_sum(module(tokens), tokens) * (1.0 / training.step_tokens)).backward()
        adamw.step()
        torch.set_num_threads(1)

    return step


def _penstock(training: Training, name: str, cut: tuple[int, ...] | None) -> Step:
    optimizer = OptimizerConfig(LearningRate(RATE), *BETAS, EPS, WeightDecay(DECAY), clip_norm=0)
    # Three stages a rank can be cut more evenly than two.
    auto = ScheduleConfig("auto", stages_per_rank=3, search_cut=True, cut=cut)
    choice = auto if name == auto.name else ScheduleConfig(name, cut=cut)
    options = EngineOptions(
        schedule=choice,
        measure_lengths=training.lengths,
        optimizer=optimizer,
        precision=training.precision,
        compile=training.compile,
        device="cpu",
    )
    engine = Engine(training.units(), training.hidden_size, Layout(pp=NUM_RANKS), options)
    batch, spec = training.batch(), MicroBatchSpec(num=training.num_microbatches)

    def step() -> list[int]:
        engine.train_batch(batch, micro_batches=spec)
        return [len(units) for units in engine.pipeline.cut]

    return step


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule of torch.distributed.pipelining, with its usual number of stages a rank, in a loop or a v.

    `splits`: it splits backwards, for which torch walks through autograd's graph. It fails on compiled layers (2.13).
    """

    name: str
    stages_per_rank: int = 1
    v_shape: bool = False
    splits: bool = False

    @property
    def side(self) -> str:
        return f"torch {self.name.removeprefix('Schedule')}"

    def stages_of(self, rank: int) -> list[int]:
        num_stages = NUM_RANKS * self.stages_per_rank
        laps = range(0, num_stages, NUM_RANKS)
        return [lap + (NUM_RANKS - 1 - rank if self.v_shape and lap else rank) for lap in laps]


TORCH_SCHEDULES = (
    TorchSchedule("ScheduleGPipe"),
    TorchSchedule("Schedule1F1B"),
    TorchSchedule("ScheduleInterleaved1F1B", 2),
    TorchSchedule("ScheduleLoopedBFS", 2),
    TorchSchedule("ScheduleInterleavedZeroBubble", 2, splits=True),
    TorchSchedule("ScheduleZBVZeroBubble", 2, v_shape=True, splits=True),
    TorchSchedule("ScheduleDualPipeV", 2, v_shape=True, splits=True),
)


def _torch(rank: int, training: Training, chosen: TorchSchedule) -> Step:
    """One of torch's schedules, with equally many layers in each stage."""
    from torch.distributed import pipelining

    cut, units = training.even_cut(NUM_RANKS * chosen.stages_per_rank), training.units()
    borders = [sum(cut[:number]) for number in range(len(cut) + 1)]
    numbers = chosen.stages_of(rank)
    modules = nn.ModuleList([Run(training, units[borders[n] : borders[n + 1]]) for n in numbers])
    adamw = _adamw(modules)
    stages = [
        pipelining.PipelineStage(module, number, len(cut), torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy_sum(output, target) * (1.0 / training.step_tokens)

    kind: Any = getattr(pipelining.schedules, chosen.name)
    given = stages[0] if chosen.stages_per_rank == 1 else stages
    runner = kind(given, training.num_microbatches, loss_fn=loss_fn, scale_grads=False)
    tokens = training.tokens()
    inputs = (tokens,) if any(stage.is_first for stage in stages) else ()
    ends: dict[str, Any] = {"target": tokens, "losses": []} if any(stage.is_last for stage in stages) else {}

    def step() -> None:
        adamw.zero_grad()
        runner.step(*inputs, **ends)
        adamw.step()

    return step


def _penstock_sides(training: Training) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Penstock's sides: schedule and cut, None for its own cut."""
    sides: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "penstock 1f1b, even cut": ("1f1b", training.even_cut(NUM_RANKS))
    }
    return sides | {f"penstock {name}, own cut": (name, None) for name in training.names}


def _prepare(side: str, rank: int, training: Training) -> Turn:
    """One side's timed step; for a process alone, the second rank does nothing."""
    if side in _ALONE:
        step = _alone(training, _ALONE[side]) if rank == 0 else _nothing
    elif side in _TORCH:
        step = _torch(rank, training, _TORCH[side])
    else:
        step = _penstock(training, *_penstock_sides(training)[side])

    def turn() -> tuple[float, object]:
        start = time.perf_counter()
        cut = step()
        return time.perf_counter() - start, cut

    return turn


def _nothing() -> None:
    pass


_ONE_THREAD, _TWO_THREADS = "one process, one thread", "one process, two threads"
_ALONE = {_ONE_THREAD: 1, _TWO_THREADS: 2}
_TORCH = {chosen.side: chosen for chosen in TORCH_SCHEDULES}


def compare(training: Training) -> dict[str, Any]:
    """Tokens per second of each side, measured in turn in one run, and the ratios that matter.

    Each side has its own processes: threads and memory that another engine leaves behind in a process cost a few
    percent. A ratio is the median over rounds of the ratio within the round, because machines drift. torch's best is
    its schedule with the highest median here.
    """
    torchs = [side for side, chosen in _TORCH.items() if not (training.compile and chosen.splits)]
    sides = (*_ALONE, *torchs, *_penstock_sides(training))
    turns = in_turns(sides, NUM_RANKS, _prepare, training, num_rounds=training.num_steps)
    rates = {
        side: [training.step_tokens / max(seconds for seconds, _ in step) for step in zip(*ranks, strict=True)]
        for side, ranks in turns.items()
    }
    median = {side: statistics.median(found) for side, found in rates.items()}
    best = max(torchs, key=lambda side: median[side])
    m, p = training.num_microbatches, NUM_RANKS

    def over(base: str, factor: float = 1.0) -> dict[str, float]:
        return {
            side: statistics.median(a / (b * factor) for a, b in zip(rates[side], rates[base], strict=True))
            for side in _penstock_sides(training)
        }

    return {
        "products": training.products,
        "precision": str(training.precision),
        "compile": training.compile,
        "tokens_per_s": {side: spread(found) for side, found in rates.items()},
        "units_of_stages": {side: turns[side][0][0][1] for side in _penstock_sides(training)},
        "torch's_best": best,
        "over_torch's_best": over(best),
        "over_torch's_1F1B": over("torch 1F1B"),
        "over_twice_one_thread": over(_ONE_THREAD, p),
        "over_twice_one_thread_less_bubble": over(_ONE_THREAD, p * m / (m + p - 1)),
        "over_two_threads": over(_TWO_THREADS),
    }
