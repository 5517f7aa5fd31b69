"""Trains and generates for long, and sees whether processes grow: memory, tensors, objects, files and threads.

    make endurance ARGS="--steps 2000 --minutes 60"

First a training run of two ranks, as a command; its processes are looked at from outside while it goes on. Then one
process trains and generates over and over, and counts what it holds. Prints tables, and exits 1 where anything grew.
"""

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.e2e.training import Started, last_step, write_run

from penstock import Engine, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine.folders.runs import METRICS_FILE

# The allocator takes memory in pieces, and keeps some; a tensor lost in each of 2000 steps would be many times this.
MAX_GROWTH_BYTES = 12 * 2**20
# Caches of Python itself fill up slowly; an object lost a step would be hundreds.
MAX_GROWTH_OBJECTS = 50


@dataclass(frozen=True)
class Held:
    """What a process holds after a number of steps or calls; tensors and objects are 0 where seen from outside."""

    after: int
    resident_bytes: int
    descriptors: int
    threads: int
    tensors: int = 0
    objects: int = 0


def held_by(pid: int, after: int) -> Held:
    """Look at a process from outside."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(folder / name)) for name in ("fd", "task"))
    return Held(after, pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads)


def held_here(after: int) -> Held:
    """Count what this process holds."""
    gc.collect()
    objects = gc.get_objects()
    # Not isinstance, which asks some objects for attributes that warn.
    tensors = sum(issubclass(type(one), torch.Tensor) for one in objects)
    number = len(objects)
    del objects
    seen = held_by(os.getpid(), after)
    return Held(after, seen.resident_bytes, seen.descriptors, seen.threads, tensors, number)


def growth(samples: Sequence[Held]) -> str | None:
    """What grew from the first third of the samples to the end, in words; None if nothing did.

    The first third is left out, in which caches and pools fill up.
    """
    settled = samples[len(samples) // 3 :]
    assert len(settled) >= 3, f"{len(samples)} samples are too few"
    for name, allowed in (
        ("tensors", 0),
        ("threads", 0),
        ("descriptors", 0),
        ("objects", MAX_GROWTH_OBJECTS),
        ("resident_bytes", MAX_GROWTH_BYTES),
    ):
        values = [getattr(one, name) for one in settled]
        # Some come and go, such as the thread that writes a checkpoint: the least of each half tells.
        first, last = min(values[: len(values) // 2]), min(values[len(values) // 2 :])
        if last > first + allowed:
            return f"{name} grew from {first:,} to {last:,} between {settled[0].after} and {settled[-1].after}"
    return None


def over(act: Callable[[int], object], goes_on: Callable[[int], bool], every: int) -> list[Held]:
    """Act again and again; what is held after every so many times."""
    samples, number = [], 0
    while goes_on(number):
        act(number)
        number += 1
        if number % every == 0:
            found = held_here(number)
            # Of what it has kept itself it says nothing.
            samples.append(replace(found, objects=found.objects - len(samples)))
    return samples


def command_of_two_ranks(folder: Path, steps: int) -> Iterator[tuple[str, list[Held]]]:
    """Train as a command; each of its processes by name."""
    samples: dict[int, list[Held]] = {}
    output, every = folder / "run", max(1, steps // 60)
    words = ["--checkpoint.every", str(every), "--checkpoint.keep", "2", "--validation.every", str(2 * every)]
    with Started([str(write_run(folder, "run", steps)), *words]) as started:
        while started.process.poll() is None:
            step = last_step(output) if (output / METRICS_FILE).exists() else 0
            for pid in [started.process.pid, *started.workers()] if step else []:
                mine = samples.setdefault(pid, [])
                try:
                    if not mine or step >= mine[-1].after + every:
                        mine.append(held_by(pid, step))
                except OSError:  # it has just ended
                    continue
            time.sleep(0.02)
        ended = started.end()
    assert ended.exit_code == 0, ended.err
    assert last_step(output) == steps
    # At its end a process draws the last step, which takes memory once.
    for number, mine in enumerate(samples.values()):
        yield ("launcher" if number == 0 else f"rank {number - 1}"), [one for one in mine if one.after < 0.95 * steps]


def small_engine(folder: Path) -> Engine:
    """An engine of one process, with a vocabulary of bytes."""
    file = write_run(folder, "engine", 10**6)
    file.write_text(file.read_text().replace("pp = 2", "pp = 1") + "model.vocab_size = 256\n")
    return Engine.from_config(file)


def trains(engine: Engine) -> Callable[[int], object]:
    """A step on sequences whose lengths change from step to step."""

    def act(number: int) -> None:
        documents = [[1 + place % 200 for place in range(3 + (number + row) % 9)] for row in range(8)]
        engine.train_batch(PackedBatch.from_documents(documents), micro_batches=MicroBatchSpec(num=4))

    return act


def generates(engine: Engine) -> Callable[[int], object]:
    """A call whose prompts, numbers of tokens and seed change from call to call."""

    def act(number: int) -> None:
        prompts = [[1 + (number + row) % 200, *range(2, 3 + (number + row) % 7)] for row in range(1 + number % 4)]
        engine.generate(prompts, SamplingParams(max_new_tokens=2 + number % 6, seed=number))

    return act


def campaign(folder: Path, steps: int, seconds: float) -> Iterator[tuple[str, list[Held]]]:
    """All parts, each with what a process held on the way."""
    yield from command_of_two_ranks(folder, steps)
    engine = small_engine(folder)
    yield "training", over(trains(engine), lambda number: number < steps, max(1, steps // 60))
    deadline = time.monotonic() + seconds
    # At least as many as there must be to judge by.
    yield "generation", over(generates(engine), lambda number: number < 600 or time.monotonic() < deadline, 20)
    engine.close()


def table(samples: Sequence[Held]) -> str:
    names = [field.name.replace("_", " ") for field in fields(Held)]
    shown = [samples[place * (len(samples) - 1) // 4] for place in range(5)]
    return "\n".join(
        ["".join(f"{name:>16}" for name in names)]
        + ["".join(f"{value:>16,}" for value in astuple(one)) for one in shown]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Train and generate for long, and see whether processes grow.")
    parser.add_argument("--steps", type=int, default=2000, help="of each training")
    parser.add_argument("--minutes", type=float, default=60.0, help="of generation")
    options = parser.parse_args()
    grew = False
    with tempfile.TemporaryDirectory(prefix="penstock-endurance-") as folder:
        for name, samples in campaign(Path(folder), options.steps, 60 * options.minutes):
            found = growth(samples)
            grew |= found is not None
            print(f"{name}: {found or 'nothing grew'}\n{table(samples)}\n", flush=True)
    return int(grew)


if __name__ == "__main__":
    sys.exit(main())
