"""How much of two kinds of traffic a step hides behind its compute, on a real slow network.

The sum of gradients over dp = 2 at pp = 2, each stage's as soon as its last backward is done; and the keys and values
that go round the ring at cp = 2. Traffic between the two halves of the ranks crosses the link, all other stays at home.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.bench.overlap import SleepingMatmul
from penstock.bench.ranks import Team
from penstock.bench.slow_network import INTERFACE, Host, SlowNetwork
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.schedule.recording import CollectiveKind
from penstock.settings import Layout, ModelConfig, OptimizerConfig, ScheduleConfig

_LIMIT_S = 600.0


@dataclass(frozen=True)
class Traffic:
    """A step, and which of its collectives are looked at.

    emulated_flops: matrix products sleep as long as they would take at so many operations a second, so that what is
    measured does not depend on free cores; None to compute them (attention is computed anyway). mbit: the link's rate
    a second. zero: the optimizer's step is shared out.
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
    """Eight local stages a rank: all but the last of their reductions have backwards of others to hide behind."""
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
    """Long sequences with eight query heads for two of keys."""
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
    """Of one rank's step: its seconds, those it waited for the traffic, and what share of the traffic was hidden."""

    step_s: float
    exposed_s: float
    hidden_share: float
    num_bytes: int


def measure(traffic: Traffic, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Steps over one link; medians and ranges over the rounds.

    Raises: NoSlowNetwork where this machine does not allow one.
    """
    world_size = traffic.layout.world_size
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(f"{traffic.mbit:.0f}mbit"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        team = stack.enter_context(Team(world_size, join=False, limit_s=_LIMIT_S))
        team.call(_meet, network.hosts, world_size, str(folder / "store"))
        team.prepare(_prepare, traffic)
        rounds: list[list[HiddenTraffic]] = []
        for round_ in range(traffic.num_rounds + 1):
            progress(f"round {round_} of {traffic.num_rounds}")
            rounds.append(team.turn())
    return _summary(traffic, rounds[1:])


def _summary(traffic: Traffic, rounds: Sequence[Sequence[HiddenTraffic]]) -> dict[str, Any]:
    def spread(of: Callable[[HiddenTraffic], float]) -> dict[str, Any]:
        values = [statistics.mean(map(of, ranks)) for ranks in rounds]
        return {"median": statistics.median(values), "range": [min(values), max(values)]}

    return {
        "layout": str(traffic.layout),
        "traffic": str(traffic.kind),
        "link_mbit_per_s": traffic.mbit,
        "bytes_a_rank": rounds[0][0].num_bytes,
        "step_s": spread(lambda f: f.step_s),
        "waits_s": spread(lambda f: f.exposed_s),
        "hidden": spread(lambda f: f.hidden_share),
    }


# What runs in the processes.


def _meet(rank: int, hosts: Sequence[Host], world_size: int, path: str) -> None:
    """Move to this rank's host, the first half of the ranks to the first, and join the others over the link."""
    hosts[rank * len(hosts) // world_size].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)


def _prepare(rank: int, traffic: Traffic) -> Callable[[], HiddenTraffic]:
    products = None if traffic.emulated_flops is None else SleepingMatmul(traffic.emulated_flops)
    options = EngineOptions(
        schedule=traffic.schedule, optimizer=OptimizerConfig(zero=traffic.zero), device="cpu", timeout_s=_LIMIT_S
    )
    engine = Engine(
        lambda groups: decoder_units(traffic.model, products, groups),
        traffic.model.hidden_size,
        traffic.layout,
        options,
    )
    generator = torch.Generator().manual_seed(engine.grid.dp_rank)
    shape = (traffic.num_microbatches, traffic.sequence_length)
    batch = PackedBatch.from_documents(list(torch.randint(0, traffic.model.vocabulary, shape, generator=generator)))
    spec = MicroBatchSpec(num=traffic.num_microbatches)

    def turn() -> HiddenTraffic:
        dist.barrier()
        start = time.perf_counter()
        engine.train_batch(batch, micro_batches=spec)
        step_s = time.perf_counter() - start
        (kinds,) = engine.pipeline.own_recording().collective_totals()
        found = kinds[traffic.kind]
        return HiddenTraffic(step_s, 1e-3 * found.exposed, found.hidden_share, found.num_bytes)

    return turn
