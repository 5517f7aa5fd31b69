"""The decoder of the Llama, Qwen, Mistral and Mixtral families, dense or with experts, as a list of units.

`layers` has what the units compute, in the form that the process groups need.

Each unit comes with an estimate of its work, good enough to cut a model into balanced stages before anything is
measured. Work is counted per token of a forward, in floating point operations of matrix products. Other operations
count by their time: a third of the time of forward and backward together, in operations of matrix products. The weights
were measured on one CPU core in fp32 (`python -m benchmarks.units`). Sequences are assumed to be as long as the model
allows.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from penstock.model.cpu.onednn import fastest_matmul
from penstock.model.layers.dense import AttentionBlock, Embedding, Head, MLPBlock
from penstock.model.layers.experts import ExpertBlock, check_expert_parallel, expert_shards
from penstock.model.layers.multi_token import multi_token_head
from penstock.model.layers.tensor_parallel import TensorParallelSplit, check_tensor_parallel, unit_in_groups
from penstock.model.linear import Matmul
from penstock.model.loss import ShardedLogits
from penstock.model.units import Initial, Initialise, Limits, ModelGroups, UnitSpec
from penstock.parallel.collectives import Collectives
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ModelConfig

_EMBEDDING_STD = 0.5
"""For an untied embedding: of 0.02, 0.1, 0.5 and 1, a small model learned fastest with this one."""


def decoder_units(
    config: ModelConfig, matmul: Matmul | None = None, groups: ModelGroups | None = None
) -> tuple[UnitSpec, ...]:
    """The decoder's units in order: embedding, attention and MLP of each layer, head.

    Args:
        config: the decoder's shape.
        matmul: computes the linear layers' matrix products; by default the fastest library that is available.
        groups: the ranks that share the units; by default this rank has whole units.

    Raises:
        ValueError: the groups cannot share this decoder; names the sizes that could.
    """
    groups, matmul = groups or ModelGroups(), matmul or fastest_matmul()
    if groups.ep is not None:
        check_expert_parallel(config, groups.ep_size)
    if groups.tp is not None:
        check_tensor_parallel(config, groups.tp_size)
    first = _spec("embedding", config, groups, partial(unit_in_groups, Embedding, (config,)), of_embedding(config))
    specs = [replace(first, limits=Limits(config.vocabulary, config.max_length))]
    for i in range(config.num_layers):
        layer = config.of_layer(i)
        attention = partial(unit_in_groups, AttentionBlock, (layer, matmul))
        specs.append(_spec(f"layers.{i}.attention", config, groups, attention, of_attention(layer)))
        mlp, flops = partial(unit_in_groups, MLPBlock, (config, matmul)), of_mlp(config)
        if config.is_sparse(i):
            mlp, flops = partial(ExpertBlock, config, matmul), of_experts(config)
        specs.append(_spec(f"layers.{i}.mlp", config, groups, mlp, flops))
    return (*specs, _head(config, groups, matmul))


def _head(config: ModelConfig, groups: ModelGroups, matmul: Matmul) -> UnitSpec:
    tied = {"projection.weight": "embedding.weight"} if config.tie_embeddings else {}
    if not config.num_predictions:
        spec = _spec("head", config, groups, partial(unit_in_groups, Head, (config, matmul)), of_head(config), tied)
        return replace(spec, flops_if_read=of_head(config))
    tied["embedding.weight"] = "embedding.weight"
    flops = of_head(config) + of_predictions(config)
    spec = _spec("head", config, groups, partial(multi_token_head, config, matmul), flops, tied)
    read = (1 + config.num_predictions) * of_head(config)
    return replace(spec, has_aux_losses=True, num_ahead=config.num_predictions, flops_if_read=read)


def _spec(
    name: str,
    config: ModelConfig,
    groups: ModelGroups,
    build: Callable[[ModelGroups], nn.Module],
    flops: float,
    tied: Mapping[str, str] | None = None,
) -> UnitSpec:
    """Describe the unit that `build` makes; a parameter has the same name and initial values for any groups."""
    with torch.device("meta"):
        own = build(groups)
        whole = own if groups.tp is None and groups.ep is None else build(ModelGroups())
    shapes = {parameter: value.shape for parameter, value in whole.named_parameters()}
    tied, sharding = tied or {}, _sharding(whole, config, groups)
    full_names = {parameter: tied.get(parameter, f"{name}.{parameter}") for parameter in shapes}
    rules = {parameter: _rule(full_name, shapes[parameter], config) for parameter, full_name in full_names.items()}
    split, to_output = None if groups.tp is None else TensorParallelSplit(config, groups), None
    if split is not None and isinstance(whole, Head):
        # The head's output is this rank's part of the logits.
        to_output = partial(ShardedLogits, part=split.vocabulary, collectives=Collectives(groups.tp))
    return UnitSpec(
        name,
        partial(build, groups),
        Initialise(rules, full_names, sharding),
        sum(parameter.numel() for parameter in own.parameters()),
        flops,
        tied,
        sharding,
        # Several ranks hold these, and each computes gradients only of its own tokens or heads.
        frozenset(parameter for parameter in shapes if split and split.is_repeated(sharding.get(parameter))),
        has_aux_losses=any("router" in parameter for parameter in shapes),
        to_output=to_output,
    )


def _sharding(whole: nn.Module, config: ModelConfig, groups: ModelGroups) -> dict[str, Shard]:
    """This rank's part of a unit's parameters, by name in the module; without those that all ranks hold whole."""
    blocks = [f"{path}." if path else "" for path, part in whole.named_modules() if isinstance(part, ExpertBlock)]
    found = {block + name: shard for block in blocks for name, shard in expert_shards(config, groups).items()}
    if groups.tp is not None:
        split = TensorParallelSplit(config, groups)
        for name, parameter in whole.named_parameters():
            # Ranks of a tensor-parallel group hold the same experts: each routes its own tokens.
            in_experts = any(name.startswith(block) for block in blocks)
            if not in_experts and (shard := split.shard(name, tuple(parameter.shape))) is not None:
                found[name] = shard
    return found


def _rule(full_name: str, shape: torch.Size, config: ModelConfig) -> Initial:
    """Choose the initial values by the kind of parameter.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for weights whose output is added to the residual stream.
    """
    *_, owner, kind = full_name.split(".")
    if kind == "bias":
        return Initial(0.0)
    if kind == "load" or owner.endswith("norm"):
        return Initial(1.0)
    if owner == "embedding" and not config.tie_embeddings:
        return Initial(std=_EMBEDDING_STD)
    std = shape[-1] ** -0.5
    return Initial(std=std * (2 * config.num_layers) ** -0.5 if owner in ("output", "down") else std)


_NORM = 200.0
_ROTARY = 120.0
_GATE = 200.0
_RESIDUAL = 35.0
_EMBED = 40.0
_LOSS = 240.0
_MOVED = 80.0
"""Operations for one element of the normalised, rotated, ... tensor; for the loss, one logit."""

_DENSE_GRADIENT = 130.0
"""Operations for one element of the embedding's weight, once per microbatch: a full gradient is added to the last."""

_ATTENTION_KERNEL = 6.0
"""The time of an operation in the attention kernel, relative to one in a matrix product."""


def of_embedding(config: ModelConfig) -> float:
    """Count a lookup, and its share of a gradient as large as the weight, for microbatches of one sequence."""
    return config.hidden_size * (_EMBED + _DENSE_GRADIENT * config.vocabulary / config.max_length)


def of_attention(config: ModelConfig) -> float:
    """Count the projections, and attention over the average number of tokens that a token sees."""
    rotated = config.query_size + config.kv_size
    products = 2.0 * config.hidden_size * (2 * config.query_size + 2 * config.kv_size)
    seen = min(config.sliding_window or config.max_length, config.max_length)
    mean_seen = seen * (1 - seen / (2 * config.max_length))
    kernel = 4.0 * mean_seen * config.query_size * _ATTENTION_KERNEL
    normalised = config.hidden_size + (rotated if config.qk_norm else 0)
    return products + kernel + _NORM * normalised + _ROTARY * rotated + _RESIDUAL * config.hidden_size


def of_mlp(config: ModelConfig) -> float:
    """Count three matrix products and the gate."""
    products = 6.0 * config.hidden_size * config.intermediate_size
    return products + _GATE * config.intermediate_size + (_NORM + _RESIDUAL) * config.hidden_size


def of_experts(config: ModelConfig) -> float:
    """Count the active experts, the shared expert, the router, and the permutation of rows there and back."""
    experts = config.experts
    inner = experts.num_active * experts.intermediate_size + experts.shared_size
    products = 6.0 * config.hidden_size * inner + 2.0 * config.hidden_size * experts.num_experts
    moved = _MOVED * experts.num_active * config.hidden_size
    return products + _GATE * inner + moved + (_NORM + _RESIDUAL) * config.hidden_size


def of_head(config: ModelConfig) -> float:
    """Count the projection, and the softmax of the loss."""
    return config.vocabulary * (2.0 * config.hidden_size + _LOSS) + _NORM * config.hidden_size


def of_predictions(config: ModelConfig) -> float:
    """Count, for each further token, a join, a layer like the last one, and logits."""
    last = config.num_layers - 1
    mlp = of_experts(config) if config.is_sparse(last) else of_mlp(config)
    join = 4.0 * config.hidden_size**2 + 2 * _NORM * config.hidden_size
    return config.num_predictions * (join + of_attention(config.of_layer(last)) + mlp + of_head(config))
