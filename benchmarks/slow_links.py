"""Steps of which traffic crosses a slow link: what `overlap`, `reduction` and `ring` share.

Traffic between the two halves of the ranks crosses the link; all other traffic stays at home.
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
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.common import progress, spread
from benchmarks.ranks import Team
from benchmarks.slow_network import INTERFACE, Host, SlowNetwork
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.model.linear import TORCH, Matmul
from penstock.schedule.recording import CollectiveKind, Recording
from penstock.settings import Layout, ModelConfig, OptimizerConfig, ScheduleConfig

LIMIT_S = 900.0


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
    mbit: float
    num_rounds: int
    emulated_flops: float | None = None
    zero: bool = False


@dataclass(frozen=True)
class HiddenTraffic:
    """One rank's step: its seconds, the seconds that it waited for the traffic, and the hidden share of the traffic."""

    step_s: float
    exposed_s: float
    hidden_share: float
    num_bytes: int


def measure_hidden(traffic: Traffic) -> dict[str, Any]:
    """Measure steps over one link; medians and ranges over the rounds.

    Raises: NoSlowNetwork where this machine does not allow one.
    """
    world_size = traffic.layout.world_size
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(f"{traffic.mbit:.0f}mbit"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        team = stack.enter_context(Team(world_size, join=False, limit_s=LIMIT_S))
        team.call(meet, network.hosts, world_size, str(folder / "store"))
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


@dataclass(frozen=True)
class SleepingMatmul(Matmul):
    """Matrix products that sleep for their time and return zeros; a router's are computed, so that tokens find experts.

    flops: emulated speed. smallest: with fewer outputs a product is computed.
    """

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

    def _after(self, num_products: int, result: Tensor) -> Tensor:
        time.sleep(2 * num_products / self.flops)
        return result


def meet(rank: int, hosts: Sequence[Host], world_size: int, path: str) -> None:
    """Move to this rank's host, the first half of the ranks to the first, and join the others over the link.

    A file joins hosts that share a disk.
    """
    hosts[rank * len(hosts) // world_size].enter()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    Path(path).parent.mkdir(exist_ok=True)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=FileStore(path, world_size), rank=rank, world_size=world_size, timeout=limit)


def new_engine(
    model: ModelConfig,
    emulated_flops: float | None,
    layout: Layout,
    schedule: ScheduleConfig,
    optimizer: OptimizerConfig | None = None,
) -> Engine:
    products = None if emulated_flops is None else SleepingMatmul(emulated_flops)
    options = EngineOptions(
        schedule=schedule, optimizer=optimizer or OptimizerConfig(), device="cpu", timeout_s=LIMIT_S
    )
    return Engine(lambda groups: decoder_units(model, products, groups), model.hidden_size, layout, options)


def timed_step(engine: Engine, batch: PackedBatch, num_microbatches: int) -> tuple[float, Recording]:
    """One step of all ranks together: its seconds, and this rank's recording."""
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(batch, micro_batches=MicroBatchSpec(num=num_microbatches))
    took_s, recording = time.perf_counter() - start, engine.pipeline.recording(of_all=False)
    assert recording is not None
    return took_s, recording


def _prepare_hidden(rank: int, traffic: Traffic) -> Callable[[], HiddenTraffic]:
    optimizer = OptimizerConfig(zero=traffic.zero)
    engine = new_engine(traffic.model, traffic.emulated_flops, traffic.layout, traffic.schedule, optimizer)
    generator = torch.Generator().manual_seed(engine.grid.dp_rank)
    shape = (traffic.num_microbatches, traffic.sequence_length)
    batch = PackedBatch.from_documents(list(torch.randint(0, traffic.model.vocabulary, shape, generator=generator)))

    def turn() -> HiddenTraffic:
        step_s, recording = timed_step(engine, batch, traffic.num_microbatches)
        (kinds,) = recording.collective_totals()
        found = kinds[traffic.kind]
        return HiddenTraffic(step_s, 1e-3 * found.exposed, found.hidden_share, found.num_bytes)

    return turn
