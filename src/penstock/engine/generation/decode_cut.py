"""A cut for generation: stages that take equally long to decode what a slot holds, instead of to train.

A step of decoding reads every weight once, multiplies it for each row, and reads the keys and values of all earlier
tokens of each row. With many rows, or long ones, attention takes far longer beside the other units than in training.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from penstock import schedule
from penstock.engine.options import EngineArguments, EngineOptions
from penstock.engine.precision import parameter_dtype
from penstock.engine.quantization import bytes_of_weight
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


def cut_to_decode(arguments: EngineArguments, num_rows: int, num_tokens: float) -> EngineArguments:
    """The arguments with a cut whose stages decode `num_rows` rows of `num_tokens` tokens on average equally fast.

    A cut by hand stays. No token depends on the cut.
    """
    options, num_ranks = arguments.options, arguments.layout.pp
    settings = options.choice.settings
    if num_ranks == 1 or settings.cut is not None:
        return arguments
    times = decode_times(arguments.units(ModelGroups()), options, num_rows, num_tokens)
    cut = schedule.balanced_cut(times, options.choice.placement(num_ranks))
    return arguments._replace(options=replace(options, schedule=replace(settings, cut=tuple(map(len, cut)))))


def decode_times(units: Sequence[UnitSpec], options: EngineOptions, num_rows: int, num_tokens: float) -> list[float]:
    """The time of each unit for one token of a slot's rows; one is the time of reading a byte of weights."""
    rows_per_reading, cached_element, small_operations = _CPU if options.device == "cpu" else _GPU
    num_bytes = bytes_of_weight(options.precision, options.quantize)
    times: list[float] = []
    for unit in units:
        with torch.device("meta"):
            module = unit.build()
        looked_up = sum(part.weight.numel() for part in module.modules() if isinstance(part, Embedding | nn.Embedding))
        multiplied = unit.num_parameters - looked_up
        # A row multiplies by the weights of some experts only.
        weights_per_row = min(multiplied, unit.flops_per_token / 2)
        reading = min(multiplied, num_rows * weights_per_row)
        multiplying = num_rows * weights_per_row / rows_per_reading
        attending = 0.0
        if elements := _cached_elements(module, options):
            attending = num_rows * num_tokens * elements * cached_element + small_operations
        times.append((reading + multiplying) * num_bytes + attending)
    return times


def _cached_elements(module: nn.Module, options: EngineOptions) -> int:
    """Elements that a token takes in a unit's cache; 0 for other libraries' caches, whose size is not known."""
    dtype = cache_dtype(parameter_dtype(options.precision), options.device)
    size = CacheSize(1, 1, dtype, torch.device("meta"))
    cache = module.new_cache(size) if isinstance(module, CachedUnit) else None
    return cache.num_bytes // dtype.itemsize if isinstance(cache, KVCache) else 0
