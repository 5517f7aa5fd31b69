"""Traffic that a step hides behind its compute, on a real slow network.

`measure`: the experts' all-to-all under the combined schedule, and what hiding it is worth. `measure_hidden`: the sum
of gradients over dp = 2 at pp = 2, each stage's as soon as its last backward is done; and the keys and values that go
round the ring at cp = 2. Traffic between the two halves of the ranks crosses the link; all other traffic stays at home.
"""

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
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.ranks import Team, spread
from benchmarks.schedules import SleepingMatmul
from benchmarks.slow_network import INTERFACE, Host, SlowNetwork
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.schedule.recording import CollectiveKind, CollectiveTotal, Recording
from penstock.settings import ExpertConfig, Layout, ModelConfig, OptimizerConfig, ScheduleConfig

NUM_RANKS = 2
SHARE = 0.34
"""Share of the plain step's time that the all-to-all is to take."""
LEAST_SHARE, MOST_SHARE = 0.30, 0.40
"""Shares that count: other work on this machine slows compute from round to round, but not the link."""
FASTEST_BITS = 1e9
"""Bits per second of the link at its fastest."""
_NUM_TRIALS = 6
_MOST_LEFT_OUT = 4
_LIMIT_S = 900.0


@dataclass(frozen=True)
class ModelSize:
    """The trained model: layers of attention and experts, each rank with half of the experts and its own batch.

    rate: of the link in bits per second; None for the rate at which the plain step waits for the all-to-all for `SHARE`
    of its time. emulated_flops: matrix products sleep as long as they would take at this many operations per second,
    so that the figures do not depend on free cores; None to compute them.
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
        """Random tokens, four sequences a microbatch, so that experts get about equal numbers of rows."""
        generator = torch.Generator().manual_seed(rank)
        length = self.microbatch_tokens // 4
        documents = torch.randint(0, self.vocab_size, (4 * self.num_microbatches, length), generator=generator)
        return PackedBatch.from_documents(list(documents))


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
    """One step of one rank, in seconds; `idle_share` is the share in which it neither computed nor stepped."""

    step_s: float
    idle_share: float
    all_to_all: CollectiveTotal


@dataclass
class Link:
    """The link, whose rate follows the plain step's waiting time, unless it is fixed."""

    #: the two hosts that it joins
    network: SlowNetwork
    #: in bits per second, and True if it stays
    rate: float
    fixed: bool

    def suits(self, plain: Sequence[Figures]) -> bool:
        """Return whether a plain step waited for a share that counts; if not, set the rate at which it would."""
        share = _share(plain)
        if self.fixed or LEAST_SHARE <= share <= MOST_SHARE:
            return True
        # Exposed time grows as the rate falls; the rest stays.
        suiting = min(FASTEST_BITS, self.rate * share / (1 - share) * (1 - SHARE) / SHARE)
        if suiting == self.rate:
            return True
        self.rate = suiting
        self.network.set_rate(_words(self.rate))
        return False


def measure(size: ModelSize | None = None, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure each side in its own processes, in turn, over one link; medians and ranges over the rounds.

    A round whose plain step waited for a share that does not count is left out and repeated at another rate, a few
    times at most; `rounds_left_out` is their number.

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
    team.call(_meet, network.hosts, NUM_RANKS, str(folder / side.schedule / side.name.replace(" ", "-")))
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
    """The share of a step that it waits for its all-to-all."""
    return _mean(ranks, lambda f: f.all_to_all.exposed) / _mean(ranks, lambda f: f.step_s)


def _words(rate: float) -> str:
    return f"{rate / 1e6:.0f}mbit"


def _summary(rounds: Sequence[tuple[float, dict[Side, list[Figures]]]]) -> dict[str, Any]:
    """Summarise rounds, each with its link's rate and the figures of every side's ranks."""
    found = {side: [figures[side] for _, figures in rounds] for side in rounds[0][1]}
    sides = {side.name: _side_summary(rounds) for side, rounds in found.items()}
    exposed = {
        side: [_mean(ranks, lambda f: f.all_to_all.exposed) for ranks in rounds] for side, rounds in found.items()
    }
    steps = {side: [max(f.step_s for f in ranks) for ranks in rounds] for side, rounds in found.items()}
    pairs = list(zip(exposed[PLAIN], exposed[COMBINED], strict=True))
    return {
        "link_mbit_per_s": spread([rate / 1e6 for rate, _ in rounds]),
        "plain_waits_for_all_to_all": spread([_share(figures[PLAIN]) for _, figures in rounds]),
        **sides,
        "hidden_of_what_plain_waits": spread([1 - after / before for before, after in pairs]),
        "plain_over_combined": spread([a / b for a, b in zip(steps[PLAIN], steps[COMBINED], strict=True)]),
    }


def _side_summary(rounds: Sequence[Sequence[Figures]]) -> dict[str, Any]:
    return {
        "step_s": spread([max(f.step_s for f in ranks) for ranks in rounds]),
        "waits_for_all_to_all": spread([_share(ranks) for ranks in rounds]),
        "hidden_while_under_way": spread([_mean(ranks, lambda f: f.all_to_all.hidden_share) for ranks in rounds]),
        "idle": spread([_mean(ranks, lambda f: f.idle_share) for ranks in rounds]),
    }


def _mean(ranks: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    return statistics.mean(map(of, ranks))


# ---- gradients and the ring's keys and values


@dataclass(frozen=True)
class Traffic:
    """A step, and the kind of its collectives that is measured.

    emulated_flops: matrix products sleep as long as they would take at this many operations per second, so that the
    figures do not depend on free cores; None to compute them (attention is always computed). mbit: the link's rate per
    second. zero: the optimizer's step is sharded.
    """

    layout: Layout
    schedule: ScheduleConfig
    kind: CollectiveKind
    model: ModelConfig
    sequence_length: int
    num_microbatches: int
    emulated_flops: float | None = None
    mbit: float = 1000.0
    zero: bool = False
    num_rounds: int = 3


def reduction(mbit: float, gflops: float, num_rounds: int, zero: bool = False) -> Traffic:
    """Reductions with eight local stages a rank: all but the last have other stages' backwards to hide behind."""
    return Traffic(
        Layout(dp=2, pp=2),
        ScheduleConfig("interleaved", stages_per_rank=8),
        CollectiveKind.GRADIENTS,
        ModelConfig(512, 512, 1408, num_layers=8, num_heads=8, num_kv_heads=2),
        sequence_length=512,
        num_microbatches=8,
        emulated_flops=gflops * 1e9,
        mbit=mbit,
        zero=zero,
        num_rounds=num_rounds,
    )


def ring(mbit: float, num_tokens: int, num_rounds: int) -> Traffic:
    """The ring on long sequences, with eight query heads for two of keys."""
    return Traffic(
        Layout(cp=2),
        ScheduleConfig("1f1b"),
        CollectiveKind.SEND_RECEIVE,
        ModelConfig(512, 512, 1408, num_layers=4, num_heads=8, num_kv_heads=2, max_length=num_tokens),
        sequence_length=num_tokens,
        num_microbatches=2,
        mbit=mbit,
        num_rounds=num_rounds,
    )


@dataclass(frozen=True)
class HiddenTraffic:
    """One rank's step: its seconds, the seconds that it waited for the traffic, and the hidden share of the traffic."""

    step_s: float
    exposed_s: float
    hidden_share: float
    num_bytes: int


def measure_hidden(traffic: Traffic, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure steps over one link; medians and ranges over the rounds.

    Raises: NoSlowNetwork where this machine does not allow one.
    """
    world_size = traffic.layout.world_size
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(f"{traffic.mbit:.0f}mbit"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        team = stack.enter_context(Team(world_size, join=False, limit_s=_LIMIT_S))
        team.call(_meet, network.hosts, world_size, str(folder / "store"))
        team.prepare(_prepare_hidden, traffic)
        rounds: list[list[HiddenTraffic]] = []
        for round_ in range(traffic.num_rounds + 1):
            progress(f"round {round_} of {traffic.num_rounds}")
            rounds.append(team.turn())
    return _summary_of_hidden(traffic, rounds[1:])


def _summary_of_hidden(traffic: Traffic, rounds: Sequence[Sequence[HiddenTraffic]]) -> dict[str, Any]:
    def mean_spread(of: Callable[[HiddenTraffic], float]) -> dict[str, Any]:
        return spread([statistics.mean(map(of, ranks)) for ranks in rounds])

    return {
        "layout": str(traffic.layout),
        "traffic": str(traffic.kind),
        "link_mbit_per_s": traffic.mbit,
        "bytes_a_rank": rounds[0][0].num_bytes,
        "step_s": mean_spread(lambda f: f.step_s),
        "waits_s": mean_spread(lambda f: f.exposed_s),
        "hidden": mean_spread(lambda f: f.hidden_share),
    }


# ---- in the processes


def _meet(rank: int, hosts: Sequence[Host], world_size: int, path: str) -> None:
    """Move to this rank's host, the first half of the ranks to the first, and join the others over the link.

    A file joins hosts that share a disk.
    """
    hosts[rank * len(hosts) // world_size].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    Path(path).parent.mkdir(exist_ok=True)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)


def _engine(
    model: ModelConfig,
    emulated_flops: float | None,
    layout: Layout,
    schedule: ScheduleConfig,
    optimizer: OptimizerConfig | None = None,
) -> Engine:
    products = None if emulated_flops is None else SleepingMatmul(emulated_flops)
    options = EngineOptions(
        schedule=schedule, optimizer=optimizer or OptimizerConfig(), device="cpu", timeout_s=_LIMIT_S
    )
    return Engine(lambda groups: decoder_units(model, products, groups), model.hidden_size, layout, options)


def _timed_step(engine: Engine, batch: PackedBatch, num_microbatches: int) -> tuple[float, Recording]:
    """One step of all ranks together: its seconds, and this rank's recording."""
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(batch, micro_batches=MicroBatchSpec(num=num_microbatches))
    took_s, recording = time.perf_counter() - start, engine.pipeline.recording(of_all=False)
    assert recording is not None
    return took_s, recording


def _prepare(rank: int, side: Side, size: ModelSize) -> Callable[[], Figures]:
    schedule = ScheduleConfig(side.schedule, overlap=side.overlap)
    engine = _engine(size.model(), size.emulated_flops, Layout(dp=NUM_RANKS, ep=NUM_RANKS), schedule)
    batch = size.batch(rank)

    def turn() -> Figures:
        step_s, recording = _timed_step(engine, batch, size.num_microbatches)
        ((spent,), (kinds,)) = recording.spent(), recording.collective_totals()
        in_ms = kinds[CollectiveKind.ALL_TO_ALL]
        in_s = replace(in_ms, exposed=1e-3 * in_ms.exposed, hidden=1e-3 * in_ms.hidden)
        return Figures(step_s, spent.idle / recording.makespan, in_s)

    return turn


def _prepare_hidden(rank: int, traffic: Traffic) -> Callable[[], HiddenTraffic]:
    optimizer = OptimizerConfig(zero=traffic.zero)
    engine = _engine(traffic.model, traffic.emulated_flops, traffic.layout, traffic.schedule, optimizer)
    generator = torch.Generator().manual_seed(engine.grid.dp_rank)
    shape = (traffic.num_microbatches, traffic.sequence_length)
    batch = PackedBatch.from_documents(list(torch.randint(0, traffic.model.vocabulary, shape, generator=generator)))

    def turn() -> HiddenTraffic:
        step_s, recording = _timed_step(engine, batch, traffic.num_microbatches)
        (kinds,) = recording.collective_totals()
        found = kinds[traffic.kind]
        return HiddenTraffic(step_s, 1e-3 * found.exposed, found.hidden_share, found.num_bytes)

    return turn
