"""Compilation of units with torch.compile: once per kind of layer, for any number of tokens.

Linear layers stay outside of the compiled code, so that their weight gradients can be deferred and are the same bits
whether they are or not. Compiled is what lies between them.
"""

from typing import Any

import torch
from torch import nn

from penstock.model.linear import Deferring
from penstock.settings import CompileMode

_MANY_KINDS = 1024
"""Kinds of layers that may share code; beyond torch's own limit of 8 some layers of a long stage would not be compiled,
and the bits would depend on the cut."""


def compile_unit(module: nn.Module, mode: CompileMode) -> None:
    """Compile a unit's forward; units with collectives, and those that say so by `compiles = None`, stay as they are.

    `compiles` names the part of a unit to compile; left out, it is the whole.
    """
    name = getattr(module, "compiles", "")
    if name is None or hasattr(module, "forward_lane"):
        return
    part = module.get_submodule(name)
    keep_linears_eager(part)
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, _MANY_KINDS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MANY_KINDS)
    # Kernels for any number of tokens from the first call on: those of a fixed number may add up in another order.
    part.compile(dynamic=True, mode=None if mode is CompileMode.DEFAULT else mode.value)


def keep_linears_eager(module: nn.Module) -> None:
    """Take the layers whose weight gradients can be deferred out of what torch.compile makes of the module."""
    for part in module.modules():
        if isinstance(part, Deferring) and "forward" not in vars(part):
            part.forward = torch.compiler.disable(part.forward)


def is_compiled(module: nn.Module) -> bool:
    """True if a user has compiled the module, or a part of it."""
    return any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in module.modules())
