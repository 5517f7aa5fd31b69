"""The ranks of a pipeline over several hosts, measured for a cut by what each of them can do and hold."""

import sys
from collections.abc import Sequence

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.group import Group, agree
from penstock.cli.host_memory import memory_bytes
from penstock.cli.measured_cluster import best_s
from penstock.engine.decode_cut import DecodingRank
from penstock.settings import Device

_WIDTH, _NUM_ROWS = 4096, 8


def measured_ranks(store: Store, group: Group, num_stages: int, device: Device) -> Sequence[DecodingRank]:
    """The ranks of the stages, all measured at the same time; none where the stages are on one host, or are shared.

    The first rank says on standard error what was found.
    """
    if group.is_on_one_host or num_stages != group.world_size:
        return ()
    agree(store, group, "measuring", {})
    place = torch.device(device, group.local_rank) if device == "cuda" else torch.device("cpu")
    weight = torch.randn(_WIDTH, _WIDTH, device=place)
    rows = torch.randn(_NUM_ROWS, _WIDTH, device=place)
    seconds = best_s(lambda: torch.nn.functional.linear(rows, weight), place)
    if device == "cuda":
        room = torch.cuda.mem_get_info(place)[0]
    else:
        room = (memory_bytes("cpu") or 0) / (group.num_local or 1)
    own = DecodingRank(weight.numel() * weight.element_size() / seconds, room)
    ranks = [DecodingRank(**theirs) for theirs in agree(store, group, "measured", own._asdict())]
    if group.rank == 0:
        found = ", ".join(f"{rank.bytes_per_s / 1e9:.1f}" for rank in ranks)
        print(
            f"penstock: the ranks read {found} GB of weights a second; each stage gets as much as its rank can do and "
            "hold",
            file=sys.stderr,
        )
    return ranks
