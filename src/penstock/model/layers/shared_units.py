"""A decoder's units for ranks that share each of them: which module takes whose place, and who holds which part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from penstock.model.config import ModelConfig
from penstock.model.groups import ModelGroups
from penstock.model.initialise import Initialise
from penstock.model.layers.attention import AttentionHalf, Embedding, Head, MLPHalf
from penstock.model.layers.moe import ExpertHalf
from penstock.model.layers.multi_token import PredictingHead
from penstock.model.layers.shared_prediction import SharedPredictingHead
from penstock.model.layers.tensor_parallel import (
    Peers,
    SharedAttentionHalf,
    SharedEmbedding,
    SharedHead,
    SharedMLPHalf,
    can_share,
)
from penstock.model.matmul import Products
from penstock.model.units import Shard, UnitSpec

_SHARED: dict[type[nn.Module], Callable[[Peers, Products], nn.Module]] = {
    Embedding: SharedEmbedding,
    AttentionHalf: SharedAttentionHalf,
    MLPHalf: SharedMLPHalf,
    Head: SharedHead,
    PredictingHead: SharedPredictingHead,
}


def share_units(
    specs: Sequence[UnitSpec], config: ModelConfig, groups: ModelGroups, products: Products
) -> tuple[UnitSpec, ...]:
    """A decoder's units for the ranks of `groups.tp`, from its units as they are where nobody shares them.

    Raises:
        ValueError: the ranks can not share the model evenly, or some unit at all.
    """
    _check_shared(config, groups.tp_size)
    # Two units a layer, between embedding and head.
    layers = [config, *(config.of_layer(i // 2) for i in range(2 * config.num_layers)), config]
    return tuple(share(spec, Peers(layer, groups), products) for spec, layer in zip(specs, layers, strict=True))


def share(spec: UnitSpec, peers: Peers, products: Products) -> UnitSpec:
    """The unit for ranks that share it, from the unit as it is where nobody does.

    Parameters keep their names and, put together, their initial values.

    Raises:
        ValueError: it is a unit that ranks can not share.
    """
    with torch.device("meta"):
        whole = spec.build()
        shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        if isinstance(whole, ExpertHalf):
            # All hold it alike, and each routes its own tokens.
            return replace(spec, partial=frozenset(shapes))
        if type(whole) not in _SHARED:
            raise ValueError(f"tp={peers.size}: unit {spec.name} can not be shared by several ranks; tp=1 is possible")
        build = partial(_SHARED[type(whole)], peers, products)
        own = {name: parameter.numel() for name, parameter in build().named_parameters()}
    sharding = _shards(whole, shapes, peers) | dict(spec.sharding)
    assert isinstance(spec.initialise, Initialise), f"{spec.name} is no unit of a decoder"
    return replace(
        spec,
        build=build,
        initialise=replace(spec.initialise, sharding=sharding),
        num_parameters=sum(own.values()),
        sharding=sharding,
        # Several ranks hold these alike, and each has gradients of its own tokens or heads.
        partial=frozenset(name for name in shapes if _is_repeated(sharding.get(name), peers)),
        present=peers.logits if isinstance(whole, Head) else None,
    )


def _shards(whole: nn.Module, shapes: Mapping[str, tuple[int, ...]], peers: Peers) -> dict[str, Shard]:
    """Which parts of a unit's parameters this rank holds, by their names; those that all hold are left out."""
    alike = tuple(f"{name}." for name, part in whole.named_modules() if isinstance(part, ExpertHalf))
    found = {
        name: shard
        for name, shape in shapes.items()
        if not name.startswith(alike) and (shard := peers.shard(name, shape)) is not None
    }
    # Inside of a head it is a part, whose weight bears its name.
    tables = [name for name, part in whole.named_modules() if name and isinstance(part, Embedding)]
    return found | {f"{name}.weight": peers.vocabulary for name in tables}


def _is_repeated(shard: Shard | None, peers: Peers) -> bool:
    """Whether several ranks of the tp group hold the same part."""
    return shard is None or shard.axis != "tp" or shard.count < peers.size


def _check_shared(config: ModelConfig, num_ranks: int) -> None:
    """Refuse ranks that can not share a decoder evenly.

    Raises:
        ValueError: naming the numbers of ranks that can.
    """
    if not can_share(config, num_ranks):
        possible = ", ".join(str(n) for n in range(1, config.num_heads + 1) if can_share(config, n))
        raise ValueError(
            f"tp={num_ranks} can not share {config.num_heads} query heads, {config.num_kv_heads} key heads and an MLP "
            f"of width {config.intermediate_size} evenly; possible are {possible}"
        )
