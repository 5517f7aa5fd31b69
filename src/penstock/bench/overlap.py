"""How much of the experts' all-to-all the combined schedule hides on a real slow network, and what that is worth."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.bench.ranks import Team
from penstock.bench.slow_network import INTERFACE, Host, SlowNetwork
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.model.matmul import TORCH
from penstock.schedule.recording import CollectiveKind, CollectiveTotal
from penstock.settings import ExpertConfig, Layout, ModelConfig, ScheduleConfig

NUM_RANKS = 2
SHARE = 0.34
"""Of the plain step's time, what the all-to-all is to take."""
LEAST_SHARE, MOST_SHARE = 0.30, 0.40
"""What counts: other work on this machine slows compute from round to round, and the link not at all."""
FASTEST_BITS = 1e9
"""Of the link, in a second."""
_NUM_TRIALS = 6
_MOST_LEFT_OUT = 4
_LIMIT_S = 900.0


@dataclass(frozen=True)
class ModelSize:
    """What is trained: layers of attention and experts, every rank with half of the experts and a batch of its own.

    rate: of the link in bits a second; None for that at which the plain step spends `SHARE` of its time waiting for
    the all-to-all. emulated_flops: matrix products sleep as long as they would take at so many operations a second,
    so that what is measured does not depend on free cores; None to compute them.
    """

    num_layers: int = 3
    hidden_size: int = 768
    expert_size: int = 768
    num_experts: int = 8
    num_active: int = 2
    vocab_size: int = 512
    microbatch_tokens: int = 512
    num_microbatches: int = 48
    num_rounds: int = 3
    rate: float | None = None
    emulated_flops: float | None = None

    def model(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.expert_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // 64,
            experts=ExpertConfig(self.num_experts, self.num_active, self.expert_size, bias_step=0.01),
        )

    def batch(self, rank: int) -> PackedBatch:
        """Random tokens, four sequences a microbatch, so that experts get about as many rows each."""
        generator = torch.Generator().manual_seed(rank)
        length = self.microbatch_tokens // 4
        documents = torch.randint(0, self.vocab_size, (4 * self.num_microbatches, length), generator=generator)
        return PackedBatch.from_documents(list(documents))


@dataclass(frozen=True)
class SleepingMatmul:
    """Matmul that take their time and give zeros; those of a router are computed, for tokens to find experts."""

    flops: float
    smallest: int = 64

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if len(weight_OI) < self.smallest:
            return TORCH.output(x, weight_OI, bias_O)
        return self._after(x.numel() * len(weight_OI), x.new_zeros(*x.shape[:-1], len(weight_OI)))

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return self._after(len(grad_TO) * weight_OI.numel(), grad_TO.new_zeros(len(grad_TO), weight_OI.shape[1]))

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        num_products = grad_TO.numel() * x_TI.shape[1]
        return self._after(num_products, grad_TO.new_zeros(grad_TO.shape[1], x_TI.shape[1]))

    def packed(self, weights_OI: Sequence[Tensor], dtype: torch.dtype) -> None:
        """No order is faster than another where nothing is read."""

    def _after(self, num_products: int, result: Tensor) -> Tensor:
        time.sleep(2 * num_products / self.flops)
        return result


@dataclass(frozen=True)
class Side:
    """One way to run the same step."""

    name: str
    schedule: str
    overlap: bool = True


PLAIN = Side("plain 1F1B", "1f1b")
COMBINED = Side("combined", "combined")
IN_TURN = Side("combined, halves in turn", "combined", overlap=False)


@dataclass(frozen=True)
class Figures:
    """One step of one rank, in seconds; `idle_share` is that of the step's time in which it neither computed nor
    stepped."""

    step_s: float
    idle_share: float
    all_to_all: CollectiveTotal


@dataclass
class Link:
    """The link, whose rate follows what the plain step waits for, unless it is fixed."""

    network: SlowNetwork
    rate: float
    fixed: bool

    def suits(self, plain: Sequence[Figures]) -> bool:
        """Whether a plain step waited for a share that counts; if not, the link gets the rate at which it would."""
        share = _share(plain)
        if self.fixed or LEAST_SHARE <= share <= MOST_SHARE:
            return True
        # What is exposed grows as the rate falls, and the rest stays.
        suiting = min(FASTEST_BITS, self.rate * share / (1 - share) * (1 - SHARE) / SHARE)
        if suiting == self.rate:
            return True
        self.rate = suiting
        self.network.set_rate(_words(self.rate))
        return False


def measure(size: ModelSize | None = None, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Each side in processes of its own, in turn, over one link; medians and ranges over the rounds.

    A round whose plain step waited for less or more than what counts is left out, and followed by another one at
    another rate, a few times at most; how often is told.

    Raises: NoSlowNetwork where this machine does not allow one.
    """
    size = size or ModelSize()
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(_words(size.rate or FASTEST_BITS)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        teams = {side: stack.enter_context(_team(side, size, network, folder)) for side in (PLAIN, COMBINED, IN_TURN)}
        link = Link(network, size.rate or FASTEST_BITS, fixed=size.rate is not None)
        for team in teams.values():
            _turn(team)  # a first step does more
        for _ in range(_NUM_TRIALS):
            plain = _turn(teams[PLAIN])
            progress(f"at {network.rate} the plain step waits {_share(plain):.0%} for its all-to-all")
            if link.suits(plain):
                break
        rounds, num_left_out = [], 0
        while len(rounds) < size.num_rounds:
            rate, round_ = link.rate, {}
            for side, team in teams.items():
                round_[side] = _turn(team)
                progress(f"round {len(rounds) + 1} of {size.num_rounds}, {side.name}: {_share(round_[side]):.0%}")
            if link.suits(round_[PLAIN]) or num_left_out == _MOST_LEFT_OUT:
                rounds.append((rate, round_))
            else:
                num_left_out += 1
    return _summary(rounds) | {"rounds_left_out": num_left_out}


def _team(side: Side, size: ModelSize, network: SlowNetwork, folder: Path) -> Team:
    team = Team(NUM_RANKS, join=False, limit_s=_LIMIT_S)
    team.call(_meet, network.hosts, str(folder / side.schedule / side.name.replace(" ", "-")))
    team.prepare(_prepare, side, size)
    team.sleep()
    return team


def _turn(team: Team) -> list[Figures]:
    team.wake()
    try:
        return team.turn()
    finally:
        team.sleep()


def _share(ranks: Sequence[Figures]) -> float:
    """What a step spends waiting for its all-to-all."""
    return _mean(ranks, lambda f: f.all_to_all.exposed) / _mean(ranks, lambda f: f.step_s)


def _words(rate: float) -> str:
    return f"{rate / 1e6:.0f}mbit"


def _summary(rounds: Sequence[tuple[float, dict[Side, list[Figures]]]]) -> dict[str, Any]:
    """Of rounds, each with its link's rate and the figures of every side's ranks."""
    found = {side: [figures[side] for _, figures in rounds] for side in rounds[0][1]}
    sides = {side.name: _side_summary(rounds) for side, rounds in found.items()}
    exposed = {
        side: [_mean(ranks, lambda f: f.all_to_all.exposed) for ranks in rounds] for side, rounds in found.items()
    }
    steps = {side: [max(f.step_s for f in ranks) for ranks in rounds] for side, rounds in found.items()}
    pairs = list(zip(exposed[PLAIN], exposed[COMBINED], strict=True))
    return {
        "link_mbit_per_s": _spread([rate / 1e6 for rate, _ in rounds]),
        "plain_waits_for_all_to_all": _spread([_share(figures[PLAIN]) for _, figures in rounds]),
        **sides,
        "hidden_of_what_plain_waits": _spread([1 - after / before for before, after in pairs]),
        "plain_over_combined": _spread([a / b for a, b in zip(steps[PLAIN], steps[COMBINED], strict=True)]),
    }


def _side_summary(rounds: Sequence[Sequence[Figures]]) -> dict[str, Any]:
    return {
        "step_s": _spread([max(f.step_s for f in ranks) for ranks in rounds]),
        "waits_for_all_to_all": _spread([_share(ranks) for ranks in rounds]),
        "hidden_while_under_way": _spread([_mean(ranks, lambda f: f.all_to_all.hidden_share) for ranks in rounds]),
        "idle": _spread([_mean(ranks, lambda f: f.idle_share) for ranks in rounds]),
    }


def _mean(ranks: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    return statistics.mean(map(of, ranks))


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


# What runs in the processes.


def _meet(rank: int, hosts: Sequence[Host], path: str) -> None:
    """Move to this rank's host and join the others over the link; a file joins hosts that share a disk."""
    hosts[rank].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    Path(path).parent.mkdir(exist_ok=True)
    store = FileStore(path, NUM_RANKS)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=limit)


def _prepare(rank: int, side: Side, size: ModelSize) -> Callable[[], Figures]:
    model = size.model()
    options = EngineOptions(
        schedule=ScheduleConfig(side.schedule, overlap=side.overlap), device="cpu", timeout_s=_LIMIT_S
    )
    products = None if size.emulated_flops is None else SleepingMatmul(size.emulated_flops)
    engine = Engine(
        lambda groups: decoder_units(model, products, groups),
        model.hidden_size,
        Layout(dp=NUM_RANKS, ep=NUM_RANKS),
        options,
    )
    batch, spec = size.batch(rank), MicroBatchSpec(num=size.num_microbatches)

    def turn() -> Figures:
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(batch, micro_batches=spec)
        step_s = time.perf_counter() - start
        recording = engine.pipeline.own_recording()
        ((spent,), (kinds,)) = recording.spent(), recording.collective_totals()
        in_ms = kinds[CollectiveKind.ALL_TO_ALL]
        in_s = replace(in_ms, exposed=1e-3 * in_ms.exposed, hidden=1e-3 * in_ms.hidden)
        return Figures(step_s, spent.idle / recording.makespan, in_s)

    return turn
