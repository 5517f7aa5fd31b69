"""Checks of the whole model at construction, in one exchange: replicas begin alike, and each group has parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.build import SECOND_COPY
from penstock.parallel import Grid, gather_json
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ConfigError, ParameterGroup

_NUM_NAMED = 4
_ADDED_AT_ONCE = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WholeModel:
    """All tensors of the model, as the ranks between them have them."""

    #: by rank: full name -> which part of the tensor, its number of dimensions (None for a buffer), a sum of its bits
    by_rank: Sequence[Mapping[str, tuple[str, int | None, int]]]

    @classmethod
    def gathered(
        cls, own: Mapping[str, Tensor], shards: Mapping[str, Shard], loans: Mapping[str, str], grid: Grid
    ) -> WholeModel:
        """Gather them over all ranks, which all call it. loans: names of tensors that use another's values."""
        own = {name: tensor for name, tensor in own.items() if name not in loans}
        view = {
            name: (_part(shards.get(name), grid), tensor.ndim if isinstance(tensor, nn.Parameter) else None, total)
            for (name, tensor), total in zip(own.items(), _sums(list(own.values())), strict=True)
        }
        return cls(gather_json(view, grid.control))

    def check_replicas(self) -> None:
        """Refuse ranks that begin with other values of the same tensor.

        Raises:
            ValueError: naming the first such tensor; on all ranks alike.
        """
        seen: dict[tuple[str, str], tuple[int, int]] = {}
        for rank, view in enumerate(self.by_rank):
            for name, (part, _, total) in view.items():
                first, known = seen.setdefault((name.removesuffix(SECOND_COPY), part), (rank, total))
                if known != total:
                    raise ValueError(
                        f"{name} begins with other values on rank {rank} than on rank {first}, though both hold the "
                        "same part of the model; build the layers from one seed on every rank (torch.manual_seed), or "
                        "give them the same weights"
                    )

    def check_groups(self, groups: Sequence[ParameterGroup]) -> None:
        """Refuse a group of the optimizer that no parameter belongs to, on any rank.

        Raises:
            ConfigError: with its pattern and some parameters' names; on all ranks alike.
        """
        dims = {
            name.removesuffix(SECOND_COPY): dims
            for view in self.by_rank
            for name, (_, dims, _) in view.items()
            if dims is not None
        }
        for group in groups:
            if any(group.matches(name, dims[name]) for name in dims):
                continue
            some = ", ".join(islice(dims, _NUM_NAMED))
            raise ConfigError(
                f"optimizer.groups: the pattern {group.pattern!r} matches no "
                f"{'matrix' if group.matrices else 'parameter'} of the model; among its {len(dims)} are {some}"
            )


def _part(shard: Shard | None, grid: Grid) -> str:
    """The part of a tensor that this rank holds, in words; ranks with the same words hold the same one."""
    if shard is None:
        return ""
    group = grid.tp_group if shard.axis == "tp" else grid.ep_group
    return f"{shard.axis} {group.rank() if group is not None else 0}"


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """The sum of each tensor's bits, read as whole numbers; 0 without values."""
    found: list[Any] = [_sum(tensor.detach()).cpu() for tensor in tensors]
    return torch.stack(found).tolist() if found else []


def _sum(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device="cpu" if tensor.is_meta else tensor.device)
    if not tensor.is_meta:
        # PyTorch widens all that it adds up at once to 64 bits.
        for part in tensor.contiguous().view(-1).view(_BITS[tensor.element_size()]).split(_ADDED_AT_ONCE):
            total += part.sum(dtype=torch.int64)
    return total
