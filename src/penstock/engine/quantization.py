"""Weights as whole numbers: which of them an engine packs, and their size."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.engine.agreement import build_on_all_ranks
from penstock.engine.options import EngineOptions
from penstock.engine.precision import parameter_dtype
from penstock.model.cpu.quantized import measured_seconds, quantizer, seconds_of_all, times_as_slow
from penstock.model.linear import Pack
from penstock.parallel import Grid
from penstock.parallel.host import gather_json
from penstock.settings import ConfigError, Precision, Quantize


def bytes_of_weight(precision: Precision, quantize: Quantize) -> float:
    """Bytes of a weight on the device; a quantized one includes its share of scales and of unquantized weights."""
    quantized = {Quantize.INT8: 1.05, Quantize.INT8_WEIGHTS: 1.05, Quantize.INT4: 0.65}
    return quantized.get(quantize, parameter_dtype(precision).itemsize)


def with_quantization(options: EngineOptions, device: torch.device, grid: Grid) -> tuple[EngineOptions, Pack | None]:
    """The options with `quantize = auto` decided, and the packer of quantized weights; all ranks decide alike.

    Raises: ConfigError for quantized weights on a device other than a CPU.
    """
    kind = options.quantize
    if device.type != "cpu":
        if kind not in (Quantize.NONE, Quantize.AUTO):
            raise ConfigError(f"quantize = {kind}: products of whole numbers are for CPUs; give device = cpu")
        return replace(options, quantize=Quantize.NONE), None
    if kind not in (Quantize.INT8, Quantize.AUTO):
        return options, None if kind is Quantize.NONE else quantizer(kind)
    dtype = parameter_dtype(options.precision)
    seconds = build_on_all_ranks(lambda: measured_seconds(dtype, kind), grid.control)
    seconds = seconds_of_all(gather_json(seconds, grid.control))
    if kind is Quantize.AUTO and times_as_slow(kind, dtype, seconds) >= 1:
        return replace(options, quantize=Quantize.NONE), None
    return replace(options, quantize=Quantize.INT8), quantizer(Quantize.INT8, seconds)
