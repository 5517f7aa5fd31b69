"""Sizes that this machine's memory cannot hold, by lower bounds that take no time: refused before anything starts."""

import os
from pathlib import Path

from penstock.planner.shape import ModelShape
from penstock.settings import ConfigError, Device, PackingKind, Precision, RunConfig

_WEIGHT_BYTES = {Precision.FP64: 8, Precision.FP32: 4, Precision.BF16_AUTOCAST: 4, Precision.BF16: 2, Precision.FP16: 2}
_GRADIENT_BYTES, _TOKEN_BYTES = 4, 8
# What a process has for itself where all that it has imported is shared.
_PROCESS_BYTES = 32 << 20
# A key and a value of the narrowest head, in 16 bits.
_CACHED_BYTES = 2 * 2 * 2


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
    # Frozen weights have no gradients, and transformers' layers may be of another shape.
    if not config.adapter.is_used and model.native is not False:
        # A tokenizer that has not been read yet has at least one token.
        num_parameters = ModelShape.of(model.whole(1)).num_parameters
        each = _WEIGHT_BYTES[config.train.precision or Precision.FP32] + _GRADIENT_BYTES
        _refuse(
            f"model.vocab_size = {model.vocab_size}, model.hidden_size = {model.hidden_size}, "
            f"model.intermediate_size = {model.intermediate_size} and model.num_layers = {model.num_layers}",
            f"weights and gradients on {copies} copies",
            int(num_parameters) * each * copies,
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
        tokens * _TOKEN_BYTES + largest * config.parallel.dp * model.hidden_size * 2,
        there,
    )


def check_rows(num_slots: int, num_rows: int, num_tokens: int, num_units: int, device: Device) -> None:
    """Refuse a KV cache, of rows of at least that many tokens for a model of that many units, that cannot be held.

    Raises: ConfigError with the sizes, what they need at least, and what there is.
    """
    there = memory_bytes(device)
    if there is None:
        return
    num_layers = max(1, (num_units - 2) // 2)
    _refuse(
        f"{num_rows} answers at a time (--rows times --slots {num_slots})",
        "the KV cache",
        num_rows * num_tokens * num_layers * _CACHED_BYTES,
        there,
    )


def check_processes(count: int) -> None:
    """Refuse more processes on this machine than its memory can hold, whatever they do.

    Raises: ConfigError with what they need at least, and what there is.
    """
    there = memory_bytes("cpu")
    assert there is not None
    if count * _PROCESS_BYTES > there:
        raise ConfigError(
            f"{count} processes need at least {count * _PROCESS_BYTES / 2**30:,.0f} GiB, but this machine has "
            f"{there / 2**30:,.1f} GiB of memory; give a smaller layout, or start it on several hosts"
        )


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
