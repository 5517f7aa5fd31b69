"""This machine: what it can hold, refused before anything starts, and the layout that fits it where none is given.

On CPUs most of a step of generation goes into reading the weights. Threads of one process read them once for all
sequences, copies once each, and stages once for every slot. Many cores wait for each other at the end of every product;
then copies win. Of a small model a second thread gains a fifth at most, and loses much where other programs run.
"""

import math
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.output import size_in_words
from penstock.planner.shape import GRADIENT_BYTES, ModelShape
from penstock.settings import ConfigError, Device, RunConfig

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

    Counted are weights and gradients of each copy of the model; and of a step a token of each sequence, with what one
    microbatch passes from layer to layer. Optimizer state and all else come on top.

    Raises: ConfigError with the sizes, what they need at least, and what there is.
    """
    model, data, parallel, train = config.model, config.data, config.parallel, config.train
    # A tokenizer that has not been read yet has at least one token.
    shape = ModelShape.of(model.whole(1))
    # Frozen weights have no gradients, and transformers' layers may be of another shape.
    is_known = not config.adapter.is_used and model.native is not False
    # Experts have that many copies, and all other weights more.
    copies = parallel.dp * parallel.cp // parallel.ep
    weights = int(shape.num_parameters) * (_LEAST_BYTES + GRADIENT_BYTES) * copies if is_known else 0
    largest = max(1, data.num_sequences // (train.num_microbatches * parallel.dp))
    largest = min(largest, train.max_microbatch_tokens or largest)
    activations = int(shape.stream_bytes(largest * parallel.dp, _LEAST_BYTES))
    _refuse(
        parallel.device,
        f"model.vocab_size = {model.vocab_size}, model.hidden_size = {model.hidden_size}, model.intermediate_size = "
        f"{model.intermediate_size} and model.num_layers = {model.num_layers}, and data.num_sequences = "
        f"{data.num_sequences} of data.sequence_length = {data.sequence_length},",
        f"weights and gradients on {copies} copies, and tokens and activations",
        weights + data.num_sequences * _TOKEN_BYTES + activations,
    )


def check_rows(num_slots: int, num_rows: int, num_tokens: int, model: "ModelFolder", device: Device) -> None:
    """Refuse answers of that many tokens whose KV cache cannot be held. Raises: ConfigError with the sizes."""
    # The caches of other libraries' layers are unknown, but not the tokens.
    cached = ModelShape.of(model.shape).cache_bytes(num_tokens, _LEAST_BYTES) if model.is_native else 0
    _refuse(
        device,
        f"{num_rows} answers at a time (--rows times --slots {num_slots})",
        "tokens and KV cache",
        num_rows * (cached + num_tokens * _TOKEN_BYTES),
    )


def check_open_files(num_processes: int) -> None:
    """Let this process, and those that it starts, open as many files as the system allows.

    Raises: ConfigError where these are too few for the connections of a group's processes to all others.
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
    """Refuse more processes than this machine's memory, or the files it may open, can hold. Raises: ConfigError."""
    _refuse("cpu", f"{count} processes", "themselves", count * _PROCESS_BYTES)
    check_open_files(count)


def _refuse(device: Device, sizes: str, what: str, needed_bytes: int) -> None:
    """Refuse what needs more memory than this machine has, unless GPUs may hold it."""
    gpus = (*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"))
    there_bytes = memory_bytes()
    if needed_bytes > there_bytes and device != "cuda" and not (device == "auto" and gpus):
        raise ConfigError(
            f"{sizes} need at least {needed_bytes / 2**30:,.0f} GiB for {what}, but this machine has "
            f"{there_bytes / 2**30:,.1f} GiB of memory; give smaller sizes"
        )


def memory_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The memory of this machine, or of its container, whose control group has files in `groups`; swap not counted."""
    limits = (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes")
    texts = [limit.read_text().strip() for limit in limits if limit.is_file()]
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([there, *(int(text) for text in texts if text.isdigit())])


# ---- The layout of a command where none is given: stages, copies and threads


_IN_USE = 1.2  # bytes of a model in use, over those of its weights
_COPY_ROWS, _COPY_CORES = 64, 8  # of sequences and cores, that make a further copy of the model worth its start
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
        cores, memory = int(asked) if asked.isdecimal() and int(asked) else usable_cores(), memory_bytes()
        if device == "cpu":
            return cls(cores, memory)
        import torch

        count = torch.cuda.device_count()
        size = min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=0)
        return cls(cores, memory, count, size)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))


def options_here(model: "ModelFolder", num_answers: int, max_copies: int, device: Device) -> list[str]:
    """The options of the layout that fits this machine, said on standard error where others are possible.

    Raises: ValueError for a model that does not fit.
    """
    machine = Machine.here(device)
    pp, dp, num_threads = fitted(model.weight_bytes(), num_answers, model.config.num_units, max_copies, machine)
    options = ["--pp", str(pp), *(["--dp", str(dp)] if dp > 1 else []), "--threads", str(num_threads)]
    if (machine.num_gpus or machine.num_cores) > 1:
        print(f"penstock: {' '.join(options)} fits this machine; other options choose otherwise", file=sys.stderr)
    return options


def fitted(
    weight_bytes: int, num_sequences: int, max_stages: int, max_copies: int, machine: Machine
) -> tuple[int, int, int]:
    """Stages, copies, and threads of each process, for so many sequences and weights of these bytes as they are used.

    A GPU holds a stage, and some cores of a processor a whole copy.

    Raises: ValueError for a model that does not fit; the message says what would.
    """
    needed, num_stages, places = _IN_USE * weight_bytes, 1, max(1, machine.num_cores // _COPY_CORES)
    held, where, less = machine.memory_bytes, "this machine's memory", "int8 or int4"
    if machine.num_gpus:
        num_stages, places = max(1, math.ceil(needed / machine.gpu_bytes)), machine.num_gpus
        held, where = min(places, max_stages) * machine.gpu_bytes, f"{places} GPU(s)"
        less = "int8 on the CPU"
    if needed > held:
        raise ValueError(
            f"the model takes {size_in_words(needed)}, more than the {size_in_words(held)} of {where}; "
            f"--quantize {less} takes less, and torchrun starts it on several hosts with a part on each"
        )
    if not machine.num_gpus:
        places = min(places, int(held / needed))
    copies = max(1, min(places // num_stages, max_copies, num_sequences // _COPY_ROWS))
    is_small = machine.num_gpus or weight_bytes <= _SMALL_BYTES
    return num_stages, copies, 1 if is_small else machine.num_cores // copies
