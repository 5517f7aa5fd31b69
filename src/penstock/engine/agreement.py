"""The agreement of all ranks when an engine is made: one set of options, one model, one set of initial values.

What one rank cannot make, all ranks raise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.options import EngineOptions
from penstock.engine.sharding import SECOND_COPY
from penstock.parallel import Grid
from penstock.parallel.gradients import as_real
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Shard, laid_out
from penstock.runtime import PipelineError
from penstock.settings import ConfigError, ParameterGroup, ScheduleConfig, differences

T = TypeVar("T")

_NUM_NAMED = 4
# A host's own affair; an adapter's files may lie elsewhere, and its values are compared as the model's.
_MAY_DIFFER = {"device", "timeout_s", "adapter"}
_ADDED_AT_ONCE = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(options: EngineOptions, model: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuse ranks with different models, optimizer settings or schedules.

    Replicas would silently drift apart, a layer might be on no rank, and ranks would wait for each other. model: facts
    about the model that must agree, by name.

    Raises: ConfigError on all ranks alike, with the first setting that differs.
    """
    names = {field.name for field in fields(options)} - _MAY_DIFFER - {"schedule", "optimizer"}
    settings, schedule = {name: getattr(options, name) for name in sorted(names)}, options.schedule
    settings |= {
        f"optimizer.{field.name}": getattr(options.optimizer, field.name) for field in fields(options.optimizer)
    }
    if isinstance(schedule, ScheduleConfig):
        settings |= {f"schedule.{field.name}": getattr(schedule, field.name) for field in fields(schedule)}
    else:
        # Whole orders of actions may be long.
        settings["schedule"] = (
            schedule if isinstance(schedule, str) else f"{options.choice.name} ({_digest(_as_text(schedule))})"
        )
    # One path, or one name, may be another order elsewhere, which fits the stages and is proved there.
    settings["schedule, by its text"] = _digest(options.choice.text)
    views = gather_json({name: _as_text(value) for name, value in (settings | {**model}).items()}, group)
    for rank, view in enumerate(views):
        if view != views[0]:
            different = differences(views[0], view, "on rank 0", f"on rank {rank}")
            raise ConfigError(f"ranks were given different settings: {different[0]}; give all the same")


def _digest(text: str) -> str:
    return f"{crc32(text.encode()):08x}"


def _as_text(value: Any) -> str:
    """A value as text that is the same in every process: functions are compared by name."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_whole_model(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], grid: Grid, parameter_groups: Sequence[ParameterGroup]
) -> None:
    """Refuse ranks with different initial values of one tensor, and parameter groups without a parameter.

    All ranks call it with their tensors by full name, and make one exchange.

    Raises:
        ValueError: naming the first such tensor; on all ranks alike.
        ConfigError: with the group's pattern and some parameters' names; on all ranks alike.
    """
    # A rank that is alone need not read its weights.
    bit_sums = [0] * len(tensors) if grid.control is None else _bit_sums(list(tensors.values()))
    parts = {}
    for name, shard in shards.items():
        process_group = grid.tp_group if shard.axis == "tp" else grid.ep_group
        parts[name] = f"{shard.axis} {process_group.rank() if process_group is not None else 0}"
    view = {
        name: (parts.get(name, ""), tensor.ndim if isinstance(tensor, nn.Parameter) else None, bit_sum)
        for (name, tensor), bit_sum in zip(tensors.items(), bit_sums, strict=True)
    }
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    dims: dict[str, int] = {}
    for rank, rank_view in enumerate(gather_json(view, grid.control)):
        for name, (part, num_dims, bit_sum) in rank_view.items():
            first_name = name.removesuffix(SECOND_COPY)
            first_rank, first_sum = seen.setdefault((first_name, part), (rank, bit_sum))
            if first_sum != bit_sum:
                raise ValueError(
                    f"{name} begins with other values on rank {rank} than on rank {first_rank}, though both hold the "
                    "same part of the model; build the layers from one seed on every rank (torch.manual_seed), or give "
                    "them the same weights"
                )
            if num_dims is not None:
                dims[first_name] = num_dims
    for group in parameter_groups:
        if not any(group.matches(name, num_dims) for name, num_dims in dims.items()):
            some = ", ".join(islice(dims, _NUM_NAMED))
            raise ConfigError(
                f"optimizer.groups: the pattern {group.pattern!r} matches no "
                f"{'matrix' if group.matrices else 'parameter'} of the model; among its {len(dims)} are {some}"
            )


@torch.no_grad()
def _bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's bits, read as whole numbers; 0 without values."""
    totals: list[Any] = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
        if not tensor.is_meta:
            # PyTorch widens all that it adds up at once to 64 bits.
            values = as_real(laid_out(tensor.detach())).view(-1)
            bits = values.view(_BITS[values.element_size()])
            for part in bits.split(_ADDED_AT_ONCE):
                total += part.sum(dtype=torch.int64)
        totals.append(total.cpu())
    return torch.stack(totals).tolist() if totals else []


def build_on_all_ranks(build: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Build this rank's part of something; all ranks of `group`, which carries host memory, call it at one point.

    Raises: the error itself on the rank that cannot; on all others a FileNotFoundError, ValueError or PipelineError,
    whichever is nearest, that names rank, kind and message.
    """
    return on_all_ranks(
        build,
        group,
        *(FileNotFoundError, ValueError),
        otherwise=PipelineError,
        message="rank {rank} could not make its part of the engine: {kind}: {error}",
    )
