"""Folders whose weights are 8-bit numbers: written and read in the form of compressed-tensors, "int-quantized".

Beside each such weight [O, I] lies one scale for each output [O, 1], named as the weight with "_scale" behind.
"""

from collections.abc import Mapping
from typing import Any

KEY = "quantization_config"
INT8 = "I8"
_FORMAT = "int-quantized"


def scale_name(weight: str) -> str:
    """The name of a weight's scales."""
    return f"{weight}_scale"


def description(ignored: tuple[str, ...]) -> dict[str, Any]:
    """The `quantization_config` of a folder of 8-bit weights, but for the modules named."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, activations = number | {"strategy": "channel"}, number | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def is_quantized(content: Mapping[str, Any]) -> bool:
    """True if a config.json describes 8-bit weights in this form.

    Raises: ValueError for any other form of quantized weights.
    """
    found = content.get(KEY)
    if found is None:
        return False
    given = found if isinstance(found, Mapping) else {}
    if given.get("format") != _FORMAT:
        form = given.get("format") or given.get("quant_method") or found
        raise ValueError(
            f"its weights are quantized as {str(form)[:60]!r}, which is not read; 8-bit weights with a scale for each "
            f'output are ("{_FORMAT}" of compressed-tensors), and penstock convert --quantize int8 writes them'
        )
    return True
