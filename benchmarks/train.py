"""Tokens per second of training: the same modules under Penstock, under torch's pipelining, and alone.

Two ranks; all sides take turns in one run, each in processes of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import main, new_parser, options_of, progress, spread
from benchmarks.ranks import Turn, in_turns
from penstock.cli.options import Parser
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import Sequences, UnitSpec, cross_entropy_sum, decoder_units
from penstock.model.cpu.onednn import fastest_matmul
from penstock.model.linear import TORCH
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
    """The model, its batches and its numbers, the same on all sides.

    `products`: "torch" computes linear layers as `nn.Linear` does, "fastest" with the fastest library available.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    sequence_tokens: int
    microbatch_sequences: int
    num_microbatches: int
    products: str
    precision: Precision
    compile: bool

    @classmethod
    def of(cls, *words: str) -> Training:
        """The training that these options ask for; without any, of 30 million parameters."""
        return options_of(cls, parser().parse_args(words))

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
    auto = ScheduleConfig("auto", stages_per_rank=3, cut=cut)
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


Cuts = dict[str, tuple[str, tuple[int, ...] | None]]


def _prepare(side: str, rank: int, training: Training, ours: Cuts) -> Turn:
    """One side's timed step; for a process alone, the second rank does nothing."""
    if side in ours:
        step = _penstock(training, *ours[side])
    elif side in _TORCH:
        step = _torch(rank, training, _TORCH[side])
    else:
        step = _alone(training, _ALONE[side]) if rank == 0 else lambda: None

    def turn() -> tuple[float, object]:
        start = time.perf_counter()
        cut = step()
        return time.perf_counter() - start, cut

    return turn


_ONE_THREAD, _TWO_THREADS = "one process, one thread", "one process, two threads"
_ALONE = {_ONE_THREAD: 1, _TWO_THREADS: 2}
_TORCH = {chosen.side: chosen for chosen in TORCH_SCHEDULES}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each side, and the ratios that matter.

    Each side has its own processes: threads and memory that another engine leaves behind in a process cost a few
    percent. A ratio is the median over rounds of the ratio within the round, because machines drift. torch's best is
    its schedule with the highest median here.
    """
    training = options_of(Training, given)
    progress(str(training))
    # Schedule and cut of each side of ours; without a cut it finds its own.
    ours: Cuts = {"penstock 1f1b, even cut": ("1f1b", training.even_cut(NUM_RANKS))}
    ours |= {f"penstock {name}, own cut": (name, None) for name in given.schedules}
    torchs = [side for side, chosen in _TORCH.items() if not (training.compile and chosen.splits)]
    sides = (*_ALONE, *torchs, *ours)
    turns = in_turns(sides, NUM_RANKS, _prepare, training, ours, num_rounds=given.steps)
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
            for side in ours
        }

    return {
        "products": training.products,
        "precision": str(training.precision),
        "compile": training.compile,
        "tokens_per_s": {side: spread(found) for side, found in rates.items()},
        "units_of_stages": {side: turns[side][0][0][1] for side in ours},
        "torch's_best": best,
        "over_torch's_best": over(best),
        "over_torch's_1F1B": over("torch 1F1B"),
        "over_twice_one_thread": over(_ONE_THREAD, p),
        "over_twice_one_thread_less_bubble": over(_ONE_THREAD, p * m / (m + p - 1)),
        "over_two_threads": over(_TWO_THREADS),
    }


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("train", __doc__, "--schedules zb-v auto --steps 5", "--precision bf16-autocast --compile")
    parser.add_argument("--against", choices=["torch"], default="torch", help="torch.distributed.pipelining")
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"], metavar="NAME", help="run with Penstock's own cut"
    )
    parser.add_argument(
        "--products", choices=["torch", "fastest"], default="torch", help="matrix products, on all sides"
    )
    precisions = [Precision.FP32, Precision.BF16_AUTOCAST]
    parser.add_argument(
        "--precision", choices=precisions, type=Precision, default=Precision.FP32, help="of forwards, on all sides"
    )
    parser.add_argument("--compile", action="store_true", help="compile each layer with torch.compile, on all sides")
    sizes = parser.add_argument_group("the model and its batches")
    sizes.add_argument("--layers", type=int, default=8, dest="num_layers", help="layers of the model")
    sizes.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    sizes.add_argument("--intermediate-size", type=int, default=1408, help="width of its MLPs")
    sizes.add_argument("--vocab-size", type=int, default=4096, help="tokens of its vocabulary")
    sizes.add_argument("--sequence-tokens", type=int, default=256, help="tokens of a sequence")
    sizes.add_argument("--microbatch-sequences", type=int, default=2, help="sequences of a microbatch")
    sizes.add_argument("--microbatches", type=int, default=8, dest="num_microbatches", help="microbatches of a step")
    parser.add_argument("--steps", type=int, default=3, help="steps of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("train"))
