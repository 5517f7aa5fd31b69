"""A cut for generation: stages that take equally long to decode what a slot holds, instead of to train.

A step of decoding reads every weight once, multiplies it for each row, and reads the keys and values of all earlier
tokens of each row. With many rows, or long ones, attention takes far longer beside the other units than in training.

Ranks on several hosts may differ in speed and memory, and then get as much as each can do and hold.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from penstock import schedule
from penstock.engine.build import EngineArguments, bytes_of_weight, parameter_dtype
from penstock.engine.options import EngineOptions
from penstock.model import CachedUnit, CacheSize, KVCache, ModelGroups, UnitSpec, cache_dtype
from penstock.model.layers.dense import Embedding

# Of a device: the rows for which multiplying by the weights takes as long as reading them; and in the time of reading a
# byte of weights, attention to an element of a key or value, and the small operations around it, whatever its size.
# Measured on one core (AMD EPYC; 512 and 2,048 wide, 1 to 64 rows, 80 to 528 tokens) it is 13 to 16 rows in fp32, bf16
# and int8 alike, 0.15 to 0.3 ns an element of fp32 for one or two queries each, and 0.2 ms, where a byte of weights
# takes 0.03 ns.
_CPU = (15.0, 7.0, 6e6)
# From specification sheets: some hundred operations in the time of a byte, and attention that keeps up with memory.
_GPU = (250.0, 2.0, 0.0)
_KEPT = 1.2  # bytes of a model in use, over those of its weights
_EQUAL = 0.85  # of the fastest rank's speed: two measurements of one machine differ by less


def cut_to_decode(
    arguments: EngineArguments,
    num_rows: int,
    num_tokens: float,
    num_cached: int = 0,
    speeds: Sequence[float] = (),
    rooms: Sequence[float] = (),
) -> EngineArguments:
    """Cut the stages anew, to decode `num_rows` rows of `num_tokens` tokens on average equally fast.

    speeds, rooms: of the stages' ranks where these may differ, the bytes of weights that each reads in a second, and
    those that it has for weights and caches; then caches of `num_cached` tokens have to fit, too. A cut by hand stays.
    No token depends on the cut.

    Raises: ValueError where the ranks have too little memory.
    """
    options, num_ranks = arguments.options, arguments.layout.pp
    settings = options.choice.settings
    if num_ranks == 1 or settings.cut is not None:
        return arguments
    units = arguments.units(ModelGroups())
    # Nearly the same is the same, so that equal machines get the cut that they get on one host.
    fastest = max(speeds, default=0.0)
    cut = schedule.balanced_cut(
        decode_times(units, options, num_rows, num_tokens),
        options.choice.placement(num_ranks),
        speeds=[speed if speed < _EQUAL * fastest else fastest for speed in speeds],
        sizes=_sizes(units, options, num_cached),
        rooms=rooms,
    )
    return arguments._replace(options=replace(options, schedule=replace(settings, cut=tuple(map(len, cut)))))


def decode_times(units: Sequence[UnitSpec], options: EngineOptions, num_rows: int, num_tokens: float) -> list[float]:
    """The time of each unit for a slot's step, in that of reading a byte of weights."""
    rows_per_reading, cached_element, small_operations = _CPU if options.device == "cpu" else _GPU
    num_bytes = bytes_of_weight(options.precision, options.quantize)
    times: list[float] = []
    for unit in units:
        module = _on_meta(unit)
        looked_up = sum(part.weight.numel() for part in module.modules() if isinstance(part, Embedding | nn.Embedding))
        multiplied = unit.num_parameters - looked_up
        # Of experts, each row multiplies by some.
        of_one_row = min(multiplied, unit.flops_per_token / 2)
        reading = min(multiplied, num_rows * of_one_row)
        multiplying = num_rows * of_one_row / rows_per_reading
        attending = 0.0
        if token_bytes := _cached_bytes(module, options):
            elements = num_rows * num_tokens * token_bytes / _cached_dtype(options).itemsize
            attending = elements * cached_element + small_operations
        times.append((reading + multiplying) * num_bytes + attending)
    return times


def _sizes(units: Sequence[UnitSpec], options: EngineOptions, num_cached: int) -> list[float]:
    """The bytes of each unit's weights in use, and of its cache of so many tokens."""
    num_bytes = _KEPT * bytes_of_weight(options.precision, options.quantize)
    return [unit.num_parameters * num_bytes + num_cached * _cached_bytes(_on_meta(unit), options) for unit in units]


def _on_meta(unit: UnitSpec) -> nn.Module:
    with torch.device("meta"):
        return unit.build()


def _cached_dtype(options: EngineOptions) -> torch.dtype:
    return cache_dtype(parameter_dtype(options.precision), options.device)


def _cached_bytes(module: nn.Module, options: EngineOptions) -> int:
    """The bytes of a token in a unit's cache; 0 for other libraries' caches, which grow and do not say how."""
    size = CacheSize(1, 1, _cached_dtype(options), torch.device("meta"))
    cache = module.new_cache(size) if isinstance(module, CachedUnit) else None
    return cache.num_bytes if isinstance(cache, KVCache) else 0
