"""What can not go together in a run's settings, found before anything starts.

Each refusal is one sentence: the offending values, and what would be possible.
"""

import itertools
import math

from penstock import schedule
from penstock.engine.config import RunConfig
from penstock.engine.config_file import ConfigError
from penstock.engine.elastic import check_elastic
from penstock.engine.schedule_check import check_options, check_pairs, check_search

_NOT_NEGATIVE = frozenset(
    {
        "train.seed",
        "data.validation_fraction",
        "optimizer.num_warmup_steps",
        "optimizer.final_learning_rate",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.final_weight_decay",
        "optimizer.clip_norm",
        "checkpoint.every",
        "validation.every",
        "schedule.receives_ahead",
        "model.num_predictions",
        "model.num_full_layers",
        "experts.num_experts",
        "experts.bias_step",
        "experts.microbatch_loss",
        "experts.sequence_loss",
        "experts.global_loss",
        "experts.z_loss",
        "experts.shared_size",
        "experts.num_dense_first",
    }
)


def check(config: RunConfig) -> RunConfig:
    """Return `config` if all its settings can go together.

    Raises:
        ConfigError: they can not; the message names the settings and what would be possible.
    """
    for part in (
        _ranges,
        _layout,
        _model,
        _experts,
        _tensor_parallel,
        _recompute,
        _batch,
        check_elastic,
        _schedule,
        _stages,
        _optimizer,
    ):
        part(config)
    return config


def check_world(config: RunConfig, world_size: int, origin: str) -> None:
    """Refuse a group of processes of another size than the layout's; `origin` says who made the group."""
    if world_size == config.world_size:
        return
    # Only now, since it loads PyTorch.
    from penstock.engine.run_parts import layout

    nearest = ", or ".join(str(other) for other in itertools.islice(layout(config).fitting(world_size), 3))
    raise ConfigError(
        f"{origin} has {world_size} processes, but {_product(config)} is {config.world_size}; "
        f"start {config.world_size} processes, or set {nearest}"
    )


def _product(config: RunConfig) -> str:
    return " x ".join(f"parallel.{axis} = {size}" for axis, size in config.parallel.sizes.items())


def _layout(config: RunConfig) -> None:
    ours = config.parallel
    if sorted(ours.axes) != sorted(ours.sizes):
        raise ConfigError(
            f"parallel.order = {ours.order!r} must name each of dp, pp, cp and tp once, such as dp-pp-cp-tp"
        )
    if config.data.sequence_length < ours.cp:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length} tokens can not be shared by parallel.cp = {ours.cp} "
            f"ranks; at most parallel.cp = {config.data.sequence_length} is possible"
        )
    if ours.dp * ours.cp % ours.ep:
        _refuse_divisor("parallel.ep", ours.ep, "parallel.dp x parallel.cp", ours.dp * ours.cp)


def _tensor_parallel(config: RunConfig) -> None:
    """Every rank of a tp group has equally many query heads and columns of the MLP, and whole key heads."""
    model, tp = config.model, config.parallel.tp
    if _can_share(config, tp):
        return
    possible = ", ".join(str(n) for n in range(1, model.num_heads + 1) if _can_share(config, n))
    from penstock.engine.run_parts import layout

    fitting = (other for other in layout(config).fitting(config.world_size) if _can_share(config, other.tp))
    raise ConfigError(
        f"parallel.tp = {tp} can not share {model.num_heads} query heads, {_num_kv_heads(config)} key heads and an MLP "
        f"of model.intermediate_size = {model.intermediate_size} evenly; possible are {possible}, such as the layout "
        f"{', or '.join(str(other) for other in itertools.islice(fitting, 2))} for {config.world_size} processes"
    )


def _can_share(config: RunConfig, tp: int) -> bool:
    model, kv = config.model, _num_kv_heads(config)
    return not (model.num_heads % tp or model.intermediate_size % tp or max(kv, tp) % min(kv, tp))


def _num_kv_heads(config: RunConfig) -> int:
    return config.model.num_kv_heads or config.model.num_heads


def _ranges(config: RunConfig) -> None:
    """Every number is positive (or at least not negative), and finite."""
    for name, value in config.flat().items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{name} = {value} is no finite number")
        if name in _NOT_NEGATIVE:
            if value < 0:
                raise ConfigError(f"{name} = {value} is negative; 0 or more is possible")
        elif value <= 0:
            raise ConfigError(f"{name} = {value} is not possible; it must be more than 0")
    if config.data.validation_fraction >= 1:
        raise ConfigError(
            f"data.validation_fraction = {config.data.validation_fraction} leaves no text; give less than 1"
        )


def _model(config: RunConfig) -> None:
    model = config.model
    if model.head_dim is None and model.hidden_size % model.num_heads:
        _refuse_divisor("model.num_heads", model.num_heads, "model.hidden_size", model.hidden_size)
    kv_heads = model.num_kv_heads or model.num_heads
    if model.num_heads % kv_heads:
        _refuse_divisor("model.num_kv_heads", kv_heads, "model.num_heads", model.num_heads)
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    if head_dim % 2:
        raise ConfigError(f"a head's width of {head_dim} is odd; rotary positions turn pairs, so it must be even")
    if config.data.sequence_length > model.max_length:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length} is longer than model.max_length = "
            f"{model.max_length}; shorten the one or raise the other"
        )


def _experts(config: RunConfig) -> None:
    experts, ep = config.experts, config.parallel.ep
    if not experts.num_experts:
        if ep > 1:
            raise ConfigError(f"parallel.ep = {ep}, but the model has no experts to share; set experts.num_experts")
        return
    if ep > experts.num_experts:
        raise ConfigError(
            f"parallel.ep = {ep} is more than experts.num_experts = {experts.num_experts}; "
            f"at most {experts.num_experts} ranks can share them"
        )
    if experts.num_experts % experts.num_groups:
        _refuse_divisor("experts.num_groups", experts.num_groups, "experts.num_experts", experts.num_experts)
    if experts.num_active_groups > experts.num_groups:
        raise ConfigError(
            f"experts.num_active_groups = {experts.num_active_groups} is more than experts.num_groups = "
            f"{experts.num_groups}; at most that is possible"
        )
    reachable = experts.num_experts // experts.num_groups * experts.num_active_groups
    if experts.num_active > reachable:
        raise ConfigError(
            f"experts.num_active = {experts.num_active} is more than the {reachable} experts that a token can reach; "
            f"at most {reachable} are possible"
        )
    if experts.shared_gate and not experts.shared_size:
        raise ConfigError("experts.shared_gate needs a shared expert; give experts.shared_size its width")


def _recompute(config: RunConfig) -> None:
    layers = config.train.recompute
    if isinstance(layers, str):
        return
    wrong = [layer for layer in layers if not 0 <= layer < config.model.num_layers]
    if wrong:
        raise ConfigError(
            f"train.recompute names layer {wrong[0]}, but the model's {config.model.num_layers} layers are "
            f"0 to {config.model.num_layers - 1}"
        )


def _batch(config: RunConfig) -> None:
    sequences, dp, parts = config.data.num_sequences, config.parallel.dp, config.train.num_microbatches
    if sequences % dp:
        raise ConfigError(
            f"data.num_sequences = {sequences} can not be shared evenly by parallel.dp = {dp}; "
            f"{_neighbours(sequences, dp)} can"
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


def _stages(config: RunConfig) -> None:
    units, stages = config.num_units, config.num_stages
    if stages > units:
        raise ConfigError(
            f"parallel.pp = {config.parallel.pp} with schedule.name = {config.schedule.name!r} asks for {stages} "
            f"stages, but a model of {config.model.num_layers} layers has {units} units to cut from "
            f"(embedding, 2 a layer, head), so at most {units} are possible"
        )
    cut = config.schedule.cut
    if cut is not None and (len(cut) != stages or sum(cut) != units or min(cut) < 1):
        raise ConfigError(
            f"schedule.cut = {list(cut)} must give {stages} stages at least one unit each, {units} in all; "
            f"it gives {len(cut)} stages {sum(cut)} units"
        )


def _schedule(config: RunConfig) -> None:
    """Build and prove the schedule: a name or an option it does not know, or one that can not train, ends here."""
    name, choice = config.schedule.name, config.schedule.choice
    known = schedule.names(with_aliases=True)
    if name not in known and not choice.is_file:
        raise ConfigError(f"schedule.name = {name!r} is none of {', '.join(known)}, nor a file ending in .csv or .txt")
    check_options(config)
    check_search(config)
    program = choice.program(config.parallel.pp, config.train.num_microbatches)
    if not program.schedule.training:
        raise ConfigError(f"schedule.name = {name!r} has no backward and can not train; 1f1b can")
    check_pairs(config, program)
    schedule.verify(program)


def _optimizer(config: RunConfig) -> None:
    optimizer, end = config.optimizer, config.num_decay_steps
    if end is not None and optimizer.num_warmup_steps >= end:
        raise ConfigError(
            f"optimizer.num_warmup_steps = {optimizer.num_warmup_steps} leaves nothing of the {end} steps over which "
            f"the learning rate falls; less than {end} are possible"
        )
    if optimizer.final_learning_rate > optimizer.learning_rate:
        raise ConfigError(
            f"optimizer.final_learning_rate = {optimizer.final_learning_rate} is above optimizer.learning_rate = "
            f"{optimizer.learning_rate}; the rate can only fall"
        )
    for name, value in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        if value >= 1:
            raise ConfigError(f"optimizer.{name} = {value} never forgets; give less than 1")


def _refuse_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    possible = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
    raise ConfigError(f"{name} = {value} does not divide {whole_name} = {whole}; possible are {possible}")


def _neighbours(value: int, step: int) -> str:
    low = value // step * step
    return f"{low} or {low + step}" if low else str(low + step)
