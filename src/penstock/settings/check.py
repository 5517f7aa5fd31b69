"""Refusals of settings in several sections that cannot go together.

Each refusal is one sentence: the offending values, and what would be possible.
"""

import itertools

from penstock.settings.declare import ConfigError
from penstock.settings.parallel import Layout
from penstock.settings.run import Normalize, RunConfig


def check_sections(config: RunConfig) -> None:
    """Refuse settings of different sections that cannot go together.

    Raises:
        ConfigError: the message names the settings and what would be possible.
    """
    config.model.check_shape()
    for check in (_lengths, _experts, _tensor_parallel, _recompute, _batch, _elastic):
        check(config)


def check_world(config: RunConfig, world_size: int, origin: str) -> None:
    """Refuse a group of processes of another size than the layout's; `origin` says who made the group.

    Raises:
        ConfigError: the message names the nearest layouts that would fit.
    """
    ours = config.parallel
    if world_size == ours.world_size:
        return
    product = " x ".join(f"parallel.{axis} = {size}" for axis, size in ours.sizes.items())
    nearest = ", or ".join(str(other) for other in itertools.islice(ours.fitting(world_size), 3))
    raise ConfigError(
        f"{origin} has {world_size} processes, but {product} is {ours.world_size}; "
        f"start {ours.world_size} processes, or set {nearest}"
    )


def _lengths(config: RunConfig) -> None:
    tokens, cp, longest = config.data.sequence_length, config.parallel.cp, config.model.max_length
    if tokens < cp:
        raise ConfigError(
            f"data.sequence_length = {tokens} tokens can not be shared by parallel.cp = {cp} "
            f"ranks; at most parallel.cp = {tokens} is possible"
        )
    if tokens > longest:
        raise ConfigError(
            f"data.sequence_length = {tokens} is longer than model.max_length = "
            f"{longest}; shorten the one or raise the other"
        )


def _experts(config: RunConfig) -> None:
    num_experts, ep = config.model.experts.num_experts, config.parallel.ep
    if not num_experts and ep > 1:
        raise ConfigError(f"parallel.ep = {ep}, but the model has no experts to share; set experts.num_experts")
    if num_experts and ep > num_experts:
        raise ConfigError(
            f"parallel.ep = {ep} is more than experts.num_experts = {num_experts}; "
            f"at most {num_experts} ranks can share them"
        )


def _tensor_parallel(config: RunConfig) -> None:
    model, layout = config.model, config.parallel
    if model.can_share(layout.tp):
        return
    possible = ", ".join(str(n) for n in range(1, model.num_heads + 1) if model.can_share(n))
    fitting: list[Layout] = [other for other in layout.fitting(layout.world_size) if model.can_share(other.tp)]
    raise ConfigError(
        f"parallel.tp = {layout.tp} can not share {model.num_heads} query heads, {model.key_heads} key heads and an "
        f"MLP of model.intermediate_size = {model.intermediate_size} evenly; possible are {possible}, such as the "
        f"layout {', or '.join(map(str, fitting[:2]))} for {layout.world_size} processes"
    )


def _recompute(config: RunConfig) -> None:
    layers, num_layers = config.train.recompute, config.model.num_layers
    wrong = [] if isinstance(layers, str) else [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong:
        raise ConfigError(
            f"train.recompute names layer {wrong[0]}, but the model's {num_layers} layers are 0 to {num_layers - 1}"
        )


def _batch(config: RunConfig) -> None:
    sequences, dp, parts = config.data.num_sequences, config.parallel.dp, config.train.num_microbatches
    if sequences % dp:
        low = sequences // dp * dp
        neighbours = f"{low} or {low + dp}" if low else str(dp)
        raise ConfigError(
            f"data.num_sequences = {sequences} can not be shared evenly by parallel.dp = {dp}; {neighbours} can"
        )
    if parts > sequences // dp:
        raise ConfigError(
            f"train.num_microbatches = {parts} is more than the {sequences // dp} sequences of a data-parallel rank; "
            f"at most {sequences // dp} are possible, or raise data.num_sequences"
        )
    budget = config.train.max_microbatch_tokens
    if budget is not None and budget < config.data.sequence_length:
        raise ConfigError(
            f"train.max_microbatch_tokens = {budget} is less than one sequence of data.sequence_length = "
            f"{config.data.sequence_length}; no sequence is cut, so give at least that"
        )


def _elastic(config: RunConfig) -> None:
    if config.parallel.elastic and config.train.normalize is not Normalize.GLOBAL:
        raise ConfigError(
            f"parallel.elastic with train.normalize = {config.train.normalize.value!r} would learn other things from "
            'fewer processes; "global" is possible'
        )


def check_rates(config: RunConfig) -> None:
    """Refuse a warm-up that is as long as the run.

    Raises:
        ConfigError: the message says how long it may be.
    """
    end = config.optimizer.num_decay_steps(config.train.steps)
    warmup = config.optimizer.learning_rate.num_warmup_steps
    if end is not None and warmup >= end:
        raise ConfigError(
            f"optimizer.num_warmup_steps = {warmup} leaves nothing of the {end} steps over which "
            f"the learning rate falls; less than {end} are possible"
        )
