"""Generation: against other libraries with two threads, with and without refilling, and the load of emulated stages."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.generation_task import Generation
from benchmarks.peers import ctranslate2_sides, transformers_sides
from benchmarks.ranks import Turn, in_turns, spread
from penstock.cli.processor import processor_name
from penstock.engine import Engine, EngineOptions
from penstock.engine.build import parameter_dtype
from penstock.engine.generation.answers import GenerateOptions
from penstock.model import CachedRows, CacheSize, UnitSpec
from penstock.schedule import Batch, Scheduler, Sequence, Token
from penstock.settings import Layout, SamplingParams

NUM_RANKS = 2
TRANSFORMERS, CTRANSLATE2, PENSTOCK = "transformers", "ctranslate2", "penstock"
PEERS = (TRANSFORMERS, CTRANSLATE2)


LAYOUTS = {
    "two threads": Layout(ranks=(0,)),
    "two stages": Layout(pp=NUM_RANKS),
    "two copies": Layout(dp=NUM_RANKS),
}


def _penstock(generation: Generation, rank: int) -> Turn:
    greedy, turns = SamplingParams(max_new_tokens=generation.new_tokens, temperature=0), {}
    for name, layout in LAYOUTS.items():
        prompts = generation.prompts(generation.num_prompts)
        turns[name] = generation.engine(layout), prompts[rank :: layout.dp] if layout.dp > 1 else prompts

    def turn() -> dict[str, float]:
        found = {}
        for name, (engine, prompts) in turns.items():
            dist.barrier()
            torch.set_num_threads(NUM_RANKS // LAYOUTS[name].world_size)
            start = time.perf_counter()
            if engine.is_here:
                engine.generate(prompts, greedy)
            dist.barrier()
            found[name] = time.perf_counter() - start
            torch.set_num_threads(1)
        return found

    return turn


def _peer(peer: str, generation: Generation, rank: int) -> Turn:
    """Run another library on the first rank, with two threads, in each of its forms; the second rank waits."""
    if rank > 0:
        return dict
    if peer == TRANSFORMERS:
        sides = transformers_sides(generation, dtype=parameter_dtype(generation.precision))
    else:
        sides = ctranslate2_sides(generation, generation.compute_type)

    def turn() -> dict[str, float]:
        torch.set_num_threads(2)
        found = {}
        for name, generate in sides.items():
            start = time.perf_counter()
            generate()
            found[name] = time.perf_counter() - start
        torch.set_num_threads(1)
        return found

    return turn


def _prepare(side: str, rank: int, generation: Generation) -> Turn:
    return _penstock(generation, rank) if side == PENSTOCK else _peer(side, generation, rank)


def against(generation: Generation, peers: tuple[str, ...]) -> dict[str, Any]:
    """Compare tokens per second of all sides, in turn in one run; a ratio is over the better of a peer's forms."""
    sides = in_turns((*peers, PENSTOCK), NUM_RANKS, _prepare, generation, num_rounds=generation.num_rounds)
    num_tokens = generation.num_prompts * generation.new_tokens
    rates: dict[str, list[float]] = {}
    for side, ranks in sides.items():
        for found in ranks[0]:
            for name, wall_s in found.items():
                rates.setdefault(f"{side}, {name}", []).append(num_tokens / wall_s)
    median = {name: statistics.median(found) for name, found in rates.items()}

    def best(side: str) -> float:
        return max(rate for name, rate in median.items() if name.startswith(f"{side}, "))

    ratios = {f"over_{peer}": best(PENSTOCK) / best(peer) for peer in peers}
    per_s = {name: spread(found) for name, found in rates.items()}
    return {"processor": processor_name(), "tokens_per_s": per_s} | ratios


# ---- refilling

REFILLED, NOT_REFILLED = "refilled", "not refilled"
REFILLS = {
    REFILLED: {},
    "refilled, in the order given": {"longest_first": False},
    NOT_REFILLED: {"refill": False, "longest_first": False},
}
"""Settings that make the same answers; without refilling, sequences are taken in the order given."""


@dataclass(frozen=True)
class Refills:
    """Many prompts for few rows; answer lengths are log-uniform, from an eighth of `new_tokens` to all."""

    generation: Generation
    num_prompts: int = 64
    rows_per_slot: int = 8

    @property
    def lengths(self) -> list[int]:
        draw, longest = random.Random(0), self.generation.new_tokens
        return [round(longest * 8 ** -draw.random()) for _ in range(self.num_prompts)]

    def options(self, name: str) -> GenerateOptions:
        prefill_tokens = self.rows_per_slot // 2 * self.generation.prompt_tokens
        return GenerateOptions(rows_per_slot=self.rows_per_slot, prefill_tokens=prefill_tokens, **REFILLS[name])

    def num_batches(self, name: str) -> int:
        """Batches that every stage computes."""
        options, num_batches = self.options(name), 0
        prompt = range(self.generation.prompt_tokens)
        sequences = [Sequence(i, i, 0, prompt, SamplingParams(length)) for i, length in enumerate(self.lengths)]
        shape = options.shape(len(sequences), NUM_RANKS)
        scheduler = Scheduler(sequences, shape, options.refill, options.longest_first)
        in_flight: dict[int, Batch] = {}
        while (slot := scheduler.next_slot()) is not None:
            if slot in in_flight:
                last = in_flight.pop(slot)
                scheduler.update(last, [Token(0)] * len(last.sampled))
            batch = scheduler.schedule()
            assert batch is not None
            if batch.items:
                in_flight[slot] = batch
                num_batches += 1
        return num_batches


def _prepare_refill(side: str, rank: int, refills: Refills) -> Turn:
    engine = refills.generation.engine(Layout(pp=NUM_RANKS))
    prompts = refills.generation.prompts(refills.num_prompts)
    params = [SamplingParams(max_new_tokens=length, seed=i) for i, length in enumerate(refills.lengths)]

    def turn() -> dict[str, float]:
        found = {}
        for name in REFILLS:
            dist.barrier()
            found[name] = engine.generate(prompts, params, refills.options(name)).wall_s
        return found

    return turn


def refilling(generation: Generation) -> dict[str, Any]:
    """Compare rows refilled at once with rows refilled when all of a slot are free, on the same engine.

    `ideal` is the gain if no row were ever free and a batch took equally long for any number of rows.
    """
    refills = Refills(generation)
    found = in_turns((PENSTOCK,), NUM_RANKS, _prepare_refill, refills, num_rounds=generation.num_rounds)
    num_tokens, visits = sum(refills.lengths), {name: refills.num_batches(name) for name in REFILLS}
    rates = {name: [num_tokens / turn[name] for turn in found[PENSTOCK][0]] for name in REFILLS}
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    return {
        "tokens_per_s": {name: spread(rate) for name, rate in rates.items()},
        "visits": visits,
        "over_not_refilled": {name: rate / median[NOT_REFILLED] for name, rate in median.items()},
        "ideal_over_not_refilled": visits[NOT_REFILLED] * refills.rows_per_slot / num_tokens,
    }


# ---- emulated stages


class SleepingUnit(nn.Module):
    """Reads tokens or passes its input on, and sleeps for its time; the last one returns logits."""

    def __init__(self, place: int, num_units: int, forward_s: float, size: int) -> None:
        super().__init__()
        self.first, self.last = place == 0, place == num_units - 1
        self.forward_s, self.size = forward_s, size
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, sequences: object) -> Tensor:
        time.sleep(self.forward_s)
        return x.new_zeros(len(x), self.size, dtype=torch.float32) if self.first else x

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        y = self(x, rows)
        return y[rows.sampled_S] if self.last else y


@dataclass(frozen=True)
class EmulatedRing:
    """Stages that sleep for `forward_s` per batch, and the number of slots that go round them."""

    num_ranks: int = 4
    num_slots: int = 8
    forward_s: float = 0.020
    new_tokens: int = 24
    num_rounds: int = 3

    def units(self) -> tuple[UnitSpec, ...]:
        count = self.num_ranks
        return tuple(
            UnitSpec(
                f"sleep.{i}",
                partial(SleepingUnit, i, count, self.forward_s, 128),
                lambda module, seed: module.to_empty(device="cpu") and None,
                1,
                1.0,
            )
            for i in range(count)
        )


def _prepare_emulated(side: str, rank: int, ring: EmulatedRing) -> Turn:
    engine = Engine(ring.units(), 128, Layout(pp=ring.num_ranks), EngineOptions(device="cpu"))
    prompts = [[i + 1] for i in range(ring.num_slots)]
    params = SamplingParams(max_new_tokens=ring.new_tokens)
    options = GenerateOptions(num_slots=ring.num_slots, rows_per_slot=1)

    def turn() -> float:
        dist.barrier()
        engine.generate(prompts, params, options)
        # The ring is full when a stage's first batch arrives, since all slots start in the first round.
        events = engine.recorder.events()
        return sum(e.end - e.start for e in events) / (events[-1].end - events[0].start)

    return turn


def emulated(ring: EmulatedRing) -> dict[str, Any]:
    """Measure the share of time that each stage computes, from its first batch to its last."""
    found = in_turns((PENSTOCK,), ring.num_ranks, _prepare_emulated, ring, num_rounds=ring.num_rounds)
    shares = [statistics.median(rounds) for rounds in found[PENSTOCK]]
    return {"ranks": ring.num_ranks, "slots": ring.num_slots, "busy_shares": shares, "least_busy_share": min(shares)}


def measure(generation: Generation, parts: tuple[str, ...], peers: tuple[str, ...]) -> dict[str, Any]:
    """Run the comparisons of these names."""
    measured: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "peers": (f"against {' and '.join(peers)}", lambda: against(generation, peers)),
        "refill": ("refilling", lambda: refilling(replace(generation, prompt_tokens=16))),
        "emulated": ("emulated stages", lambda: emulated(EmulatedRing(num_rounds=generation.num_rounds))),
    }
    return {name: run() for part, (name, run) in measured.items() if part in parts}
