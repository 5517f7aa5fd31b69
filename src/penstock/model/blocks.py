"""Rows of logits worked on block by block, so that no fp32 copy of all of them is ever made.

Shapes: T tokens, V vocabulary.
"""

import torch
from torch import Tensor

_CPU_BLOCK_ELEMENTS = 1 << 18
"""Logits worked on at a time: 1 MiB of fp32, so that they stay in a core's cache from one operation to the next."""

_GPU_BLOCK_ELEMENTS = 1 << 26
"""The same where launching costs more than memory traffic: 256 MiB of fp32."""


def rows_of_block(logits_TV: Tensor) -> int:
    """How many tokens' logits are worked on at a time; at least one."""
    num_elements = _CPU_BLOCK_ELEMENTS if logits_TV.device.type == "cpu" else _GPU_BLOCK_ELEMENTS
    return max(1, num_elements // logits_TV.shape[1])


def at_least_fp32(logits_TV: Tensor) -> torch.dtype:
    """The dtype that a softmax of these logits is computed in."""
    return torch.promote_types(logits_TV.dtype, torch.float32)
