"""What a rank holds of the model and of the optimizer's state, as places in whole tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from penstock.engine.optimizer import Optimizer
from penstock.model import Shard
from penstock.parallel.parts import Box, Held, Part, Shape, hold


def held_parameters(parameters: Mapping[str, nn.Parameter], shards: Mapping[str, Shard]) -> dict[str, Held]:
    """Parameters by full name, as views: whole, or the part that the shard tells."""
    found: dict[str, Held] = {}
    for name, parameter in parameters.items():
        shard, data = shards.get(name), parameter.detach()
        found[name] = data if shard is None else (Part(data, _box(data.shape, shard), shard.full_shape),)
    return found


def held_state(optimizer: Optimizer, shards: Mapping[str, Shard]) -> dict[str, Held]:
    """The optimizer's state by name, as views of what this rank steps."""
    found: dict[str, Held] = {}
    for name, (fragment, flat) in optimizer.owned_state().items():
        shape, shard = tuple(fragment.parameter.shape), shards.get(fragment.name)
        full_shape = shape if shard is None else shard.full_shape
        found[name] = hold(flat, fragment.first, _box(shape, shard), full_shape)
    return found


def _box(shape: Shape, shard: Shard | None) -> Box:
    if shard is None:
        return Box.whole(shape)
    return Box(tuple(shard.start if dim == shard.dim else 0 for dim in range(len(shape))), tuple(shape))
