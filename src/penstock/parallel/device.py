"""The device of each rank: a GPU of its own for every rank, or the CPU for all."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.parallel.host import Members, gather_json
from penstock.settings import ConfigError, Device, TransportKind

_View = Mapping[str, Any]
"""What a rank shows the others: the device it was given, its host, and its GPU's number and uuid (None without one)."""


def agree_on_device(wanted: Device, group: Members, rank: int, transport: TransportKind = "auto") -> torch.device:
    """The device of this rank, which becomes its current one; all ranks call it, and agree on the kind of device.

    A process that has made another GPU than its first the current one keeps it. Else it takes the one that LOCAL_RANK
    names among those that it sees, or Slurm's SLURM_LOCALID. Where "auto" finds no GPU of its own for every rank, all
    take the CPU, and rank 0 says why on standard error. Where tensors travel through host memory, ranks may share one.

    Args:
        wanted: the setting, which may be another on each rank.
        group: the ranks that call it.
        rank: this one among those.
        transport: the setting, the same on all ranks.

    Raises: ConfigError on all ranks alike where a rank was given "cuda", and two ranks are on one GPU, or one has none;
        and for transports that differ.
    """
    views: Sequence[_View] = gather_json(_own_view(wanted, transport), group)
    if other := next((number for number, view in enumerate(views) if view["transport"] != views[0]["transport"]), None):
        transports = f'"{views[0]["transport"]}", but rank {other} "{views[other]["transport"]}"'
        raise ConfigError(f"rank 0 was given transport = {transports}; give all the same")
    lack = _lack(views)
    if lack is None:
        device = torch.device("cuda", views[rank]["gpu"])
        torch.cuda.set_device(device)
        return device
    demanding = next((number for number, view in enumerate(views) if view["wanted"] == "cuda"), None)
    if demanding is not None:
        raise ConfigError(
            f'device = "cuda" on {_place(demanding, views)}, but {lack}; start as many ranks on each host as it has '
            'GPUs, each with a LOCAL_RANK or torch.cuda.set_device() of its own, set device to "cpu" on all, or share '
            'GPUs with transport = "host"'
        )
    # A torch that was built for CPUs alone was chosen for them.
    if rank == 0 and any(view["wanted"] == "auto" and view["built"] for view in views):
        sys.stderr.write(f"penstock: all ranks compute on the CPU, since {lack}\n")
    return torch.device("cpu")


def _own_view(wanted: Device, transport: TransportKind) -> _View:
    gpu = None if wanted == "cpu" else _own_gpu()
    uuid = None if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid)
    built = torch.backends.cuda.is_built()
    place = {"host": platform.node(), "gpu": gpu, "uuid": uuid}
    return {"wanted": wanted, "transport": transport, "built": built, **place}


def _own_gpu() -> int | None:
    """The number of this process's GPU among those that it sees; None if it sees none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    # The first is current in every process that has not chosen.
    return torch.cuda.current_device() or int(local_rank) % count


def _lack(views: Sequence[_View]) -> str | None:
    """The reason, in words, for which not every rank has a GPU of its own; None if all do."""
    seen: dict[tuple[str, str], int] = {}
    for rank, view in enumerate(views):
        if view["wanted"] == "cpu":
            return f'{_place(rank, views)} was given device = "cpu"'
        if view["gpu"] is None:
            return f"{_place(rank, views)} finds no GPU"
        other = seen.setdefault((view["host"], view["uuid"]), rank)
        if other != rank and view["transport"] != "host":
            return f"{_place(rank, views)} has the same GPU as {_place(other, views)} (uuid {view['uuid']})"
    return None


def _place(rank: int, views: Sequence[_View]) -> str:
    view = views[rank]
    return f"rank {rank} on {view['host']}" + ("" if view["gpu"] is None else f" with cuda:{view['gpu']}")
