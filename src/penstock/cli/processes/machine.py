"""This machine: what it can hold, refused before anything starts, and the layout that fits it where none is given.

On CPUs most of a step of generation goes into reading the weights. Threads of one process read them once for all
sequences, copies once each, and stages once for every slot. Measured on two cores (AMD EPYC; 8 prompts, milliseconds
for two threads, two copies, two stages): 28 million parameters in fp32 467, 653, 852; in bf16 354, 522, 757; in int8
317, 416, 940; 330 million in fp32 1,538, 1,703, 2,294. Many cores read no faster than their memory, and wait for each
other at the end of every product; then copies win.

So do the two threads of a small model, whose products are soon over. Their tokens per second over those of one (two
cores of the same kind, medians of 9 to 15 turns, 8 to 64 prompts, fp32): 0.95 to 1.02 with 3 MiB of weights, 1.15 to
1.20 with 13 MiB, 1.13 to 1.19 with 25 MiB, 1.26 to 1.37 with 56 MiB, 1.39 with 97 MiB, 1.50 with 219 MiB. Where other
programs ran on these cores it was 0.1 to 0.4 up to 97 MiB.
"""

import argparse
import math
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import size_in_words
from penstock.planner.shape import GRADIENT_BYTES, ModelShape, value_bytes
from penstock.settings import ConfigError, Device, PackingKind, Precision, RunConfig

if TYPE_CHECKING:
    from penstock.engine.folders.model_folder import ModelFolder


# ---- Sizes that this machine's memory cannot hold, by the planner's lower bounds, which take no time


_TOKEN_BYTES, _LEAST_BYTES = 8, 2  # of a token's number, and of the narrowest value that a layer computes with
# What a process has for itself where all that it has imported is shared.
_PROCESS_BYTES = 32 << 20
# Two stages had 44 files and connections open in training, two copies of two stages 59, and each further process of a
# group adds at least three.
_PROCESS_FILES, _PEER_FILES = 44, 4


def check_training(config: RunConfig) -> None:
    """Refuse a run, all of whose processes are on this machine, that its memory cannot hold.

    Counted are weights and gradients of each copy of the model; and of a step the tokens, with what one microbatch
    passes from layer to layer. Optimizer state and all else come on top.

    Raises: ConfigError with the sizes, what they need at least, and what there is.
    """
    there = memory_bytes(config.parallel.device)
    if there is None:
        return
    # Experts have that many copies, and all other weights more.
    model, copies = config.model, config.parallel.dp * config.parallel.cp // config.parallel.ep
    # A tokenizer that has not been read yet has at least one token.
    shape = ModelShape.of(model.whole(1))
    # Frozen weights have no gradients, and transformers' layers may be of another shape.
    if not config.adapter.is_used and model.native is not False:
        precision = config.train.precision or Precision.FP32
        parameter = value_bytes("fp32" if precision is Precision.BF16_AUTOCAST else precision)
        _refuse(
            f"model.vocab_size = {model.vocab_size}, model.hidden_size = {model.hidden_size}, "
            f"model.intermediate_size = {model.intermediate_size} and model.num_layers = {model.num_layers}",
            f"weights and gradients on {copies} copies",
            int(shape.num_parameters) * (parameter + GRADIENT_BYTES) * copies,
            there,
        )
    data, train = config.data, config.train
    # Only windows have a length that is known before the text is read.
    is_known = data.packing is PackingKind.WINDOW and data.corpus == "stdlib"
    tokens = data.num_sequences * (data.sequence_length if is_known else 1)
    largest = max(1, tokens // (train.num_microbatches * config.parallel.dp))
    largest = min(largest, train.max_microbatch_tokens or largest)
    _refuse(
        f"data.num_sequences = {data.num_sequences} of data.sequence_length = {data.sequence_length}",
        f"the tokens of a step and the activations of one of train.num_microbatches = {train.num_microbatches}",
        tokens * _TOKEN_BYTES + int(shape.stream_bytes(largest * config.parallel.dp, _LEAST_BYTES)),
        there,
    )


def check_rows(num_slots: int, num_rows: int, num_tokens: int, model: "ModelFolder", device: Device) -> None:
    """Refuse answers of that many tokens whose KV cache cannot be held.

    Raises: ConfigError with the sizes, what they need at least, and what there is.
    """
    there = memory_bytes(device)
    if there is None:
        return
    # The caches of other libraries' layers are unknown, but not the tokens.
    cached = ModelShape.of(model.shape).cache_bytes(num_tokens, _LEAST_BYTES) if model.is_native else 0
    _refuse(
        f"{num_rows} answers at a time (--rows times --slots {num_slots})",
        "tokens and KV cache",
        num_rows * (cached + num_tokens * _TOKEN_BYTES),
        there,
    )


def check_open_files(num_processes: int) -> None:
    """Let this process, and those that it starts, open as many files as the system allows; refuse too few of them.

    Each of the processes of a group has connections to all others.

    Raises: ConfigError with what each needs at least, and what there is.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _PROCESS_FILES + _PEER_FILES * num_processes
    if most != resource.RLIM_INFINITY and most < needed:
        raise ConfigError(
            f"each of {num_processes} processes needs at least {needed} open files and connections, but {most} are "
            f"allowed here; allow more (ulimit -n {needed}), or give a smaller layout"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_processes(count: int) -> None:
    """Refuse more processes on this machine than its memory, or the files it may open, can hold, whatever they do.

    Raises: ConfigError with what they need at least, and what there is.
    """
    there = memory_bytes("cpu")
    assert there is not None
    if count * _PROCESS_BYTES > there:
        raise ConfigError(
            f"{count} processes need at least {count * _PROCESS_BYTES / 2**30:,.0f} GiB, but this machine has "
            f"{there / 2**30:,.1f} GiB of memory; give a smaller layout, or start it on several hosts"
        )
    check_open_files(count)


def _refuse(sizes: str, what: str, needed_bytes: int, there_bytes: int) -> None:
    if needed_bytes > there_bytes:
        raise ConfigError(
            f"{sizes} need at least {needed_bytes / 2**30:,.0f} GiB for {what}, but this machine has "
            f"{there_bytes / 2**30:,.1f} GiB of memory; give smaller sizes"
        )


def memory_bytes(device: Device) -> int | None:
    """The memory of this machine or container with its swap space; None where a GPU may hold what is asked for."""
    gpus = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    if device == "cuda" or (device == "auto" and gpus):
        return None
    memory = Path("/proc/meminfo")
    if memory.is_file():
        sizes = dict(line.split(":") for line in memory.read_text().splitlines())
        there, swap = (int(sizes[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
        return min(there + swap, _container_bytes(Path("/sys/fs/cgroup"), swap) or there + swap)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes(groups: Path, swap_bytes: int) -> int | None:
    """The memory that a container's control group allows, with its swap space; None without a limit.

    groups: where the group's files are, of the second version or the first.
    """
    memory = _limit(groups / "memory.max")
    if memory is not None:
        allowed = _limit(groups / "memory.swap.max")
        return memory + (swap_bytes if allowed is None else min(allowed, swap_bytes))
    first = groups / "memory"
    memory, both = _limit(first / "memory.limit_in_bytes"), _limit(first / "memory.memsw.limit_in_bytes")
    return both if both is not None else None if memory is None else memory + swap_bytes


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# ---- The layout of a command where none is given: stages, copies and threads, and the reason


# Rough figures of today's processors, which only have to tell layouts apart that are far from each other.
_BYTES_PER_S = 15e9  # that one core reads; `_SHARED` cores read half as fast each
_SHARED = 32
_STEP_S, _ROW_S = 2e-3, 1e-4  # a step beside its products
_JOIN_S = 2e-4  # threads wait for each other, for each doubling of their number
_START_S = 4.0  # of processes beside the first
_KEPT = 1.2  # bytes of a model in use, over those of its weights
_MOST_ROWS = 64
_SMALL_BYTES = 24 * 2**20  # of weights: up to there a second thread gains a fifth at most


@dataclass(frozen=True)
class Machine:
    """Processor cores, host memory, and GPUs of this many bytes each."""

    num_cores: int
    memory_bytes: int
    num_gpus: int = 0
    gpu_bytes: int = 0

    @classmethod
    def here(cls, device: Device) -> "Machine":
        """This machine; of its cores those that this process may use, or as many as OMP_NUM_THREADS says."""
        asked = os.environ.get("OMP_NUM_THREADS", "")
        cores, memory = int(asked) if asked.isdecimal() and int(asked) else usable_cores(), memory_bytes("cpu")
        assert memory is not None
        if device == "cpu":
            return cls(cores, memory)
        import torch

        count = torch.cuda.device_count()
        size = min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=0)
        return cls(cores, memory, count, size)


@dataclass(frozen=True)
class GenerationWork:
    """Bytes of the weights as they are used, sequences, and tokens of each."""

    weight_bytes: int
    num_sequences: int
    num_tokens: int
    #: the largest number of stages, and of copies, that the command takes
    max_stages: int
    max_copies: int

    @property
    def is_small(self) -> bool:
        """True if a step reads so little that threads gain next to nothing."""
        return self.weight_bytes <= _SMALL_BYTES


@dataclass(frozen=True)
class Fitted:
    """A layout: stages, copies, and threads of each process."""

    pp: int
    dp: int
    num_threads: int
    because: str

    @property
    def options(self) -> list[str]:
        """The words that ask for it."""
        copies = [] if self.dp == 1 else ["--dp", str(self.dp)]
        return ["--pp", str(self.pp), *copies, "--threads", str(self.num_threads)]

    def __str__(self) -> str:
        parts = [(self.dp, "copies"), (self.pp, "stages"), (self.num_threads, "threads")]
        return ", ".join(f"{count} {what}" for count, what in parts if count > 1) or "one thread"


def fitted(work: GenerationWork, machine: Machine) -> Fitted:
    """The layout in which the work is expected to end first.

    Raises:
        ValueError: the model does not fit; the message says what would.
    """
    return _on_gpus(work, machine) if machine.num_gpus else _on_cpus(work, machine)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))


def say_shared_cores(num_processes: int, device: Device) -> None:
    """Say on standard error that processes of this machine are more than its cores, where it is these that compute."""
    cores = usable_cores()
    if num_processes > cores and not _has_gpus(num_processes, device):
        print(f"penstock: {num_processes} processes share {cores} core(s), so each waits for others", file=sys.stderr)


def _has_gpus(count: int, device: Device) -> bool:
    if device != "auto":
        return device == "cuda"
    import torch

    return torch.cuda.device_count() >= count


def is_free(given: argparse.Namespace, names: Sequence[str]) -> bool:
    """True if none of these options has been given."""
    return all(getattr(given, name) is None for name in names)


def options_here(model: "ModelFolder", num_answers: int, num_tokens: int, max_copies: int, device: Device) -> list[str]:
    """The options of the layout that fits this machine and work; said on standard error where others are possible.

    Raises: ValueError for a model that does not fit.
    """
    work = GenerationWork(model.weight_bytes(), num_answers, num_tokens, model.num_units, max_copies)
    machine = Machine.here(device)
    chosen = fitted(work, machine)
    if (machine.num_gpus or machine.num_cores) > 1:
        print(f"penstock: {chosen}, for {chosen.because}; other options choose otherwise", file=sys.stderr)
    return chosen.options


def _on_gpus(work: GenerationWork, machine: Machine) -> Fitted:
    needed = _KEPT * work.weight_bytes
    least = max(1, math.ceil(needed / machine.gpu_bytes))
    if least > min(machine.num_gpus, work.max_stages):
        raise ValueError(
            f"the model takes {size_in_words(needed)}, more than {machine.num_gpus} GPU(s) of "
            f"{size_in_words(machine.gpu_bytes)} hold; "
            "--quantize int8 on the CPU takes less, and torchrun starts it on several hosts"
        )
    copies = min(machine.num_gpus // least, work.max_copies, max(1, work.num_sequences // _MOST_ROWS))
    why = f"the model takes {size_in_words(needed)}, and a GPU has {size_in_words(machine.gpu_bytes)}"
    return Fitted(least, copies, 1, why)


def _on_cpus(work: GenerationWork, machine: Machine) -> Fitted:
    needed = _KEPT * work.weight_bytes
    if needed > machine.memory_bytes:
        raise ValueError(
            f"the model takes {size_in_words(needed)}, but this machine has {size_in_words(machine.memory_bytes)} of "
            "memory; --quantize int8 or int4 takes less, and torchrun starts it on several hosts with a part on each"
        )
    most = min(machine.num_cores, work.num_sequences, work.max_copies, int(machine.memory_bytes / needed))
    counts = [count for count in range(1, most + 1) if machine.num_cores % count == 0]
    best = min(counts, key=lambda count: _seconds(work, machine, count))
    weights = f"the weights ({size_in_words(work.weight_bytes)})"
    if best > 1:
        because = f"each reads {weights}, but none waits for the others"
    elif work.is_small:
        because = f"{weights} are few: more would gain little, and lose much where other programs run"
    else:
        because = f"they read {weights} once for all answers"
    return Fitted(1, best, _threads(work, machine, best), because)


def _threads(work: GenerationWork, machine: Machine, copies: int) -> int:
    """Threads of each copy."""
    return 1 if work.is_small else machine.num_cores // copies


def _seconds(work: GenerationWork, machine: Machine, copies: int) -> float:
    """The time that so many copies need on all cores together."""
    threads, cores = _threads(work, machine, copies), machine.num_cores
    together = cores * _BYTES_PER_S / (1 + cores / _SHARED)
    reading = work.weight_bytes / min(threads * _BYTES_PER_S, together / copies)
    own = math.ceil(work.num_sequences / copies)
    rows = min(own, _MOST_ROWS)
    step = _STEP_S + _ROW_S * rows + _JOIN_S * math.log2(threads) + reading
    return math.ceil(own / rows) * work.num_tokens * step + (_START_S if copies > 1 else 0)
