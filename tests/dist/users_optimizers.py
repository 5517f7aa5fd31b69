"""Published optimizers: where they keep state, and how they write it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Its functions over lists are public by use alone.
EACH: Any = torch


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW, which keeps running values in its groups. Source: arXiv 2405.15682, algorithm 1."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": 1e-8, "k": 0, "weight_sum": 0.0, "lr_max": -1.0, "warmup": 3}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), k = group["betas"], group["k"]
            rate = group["lr"] * min(1.0, (k + 1) / group["warmup"]) * math.sqrt(1 - beta2 ** (k + 1))
            group["scheduled_lr"] = rate
            rate_max = group["lr_max"] = max(rate, group["lr_max"])
            weight = rate_max**2
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            own = [p for p in group["params"] if p.grad is not None]
            for parameter in own:
                if "z" not in self.state[parameter]:
                    self.state[parameter]["z"] = parameter.detach().clone()
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
            squares = [self.state[p]["exp_avg_sq"] for p in own]
            gradients = [p.grad.clone() for p in own]
            EACH._foreach_mul_(squares, beta2)
            EACH._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            roots = EACH._foreach_sqrt(squares)
            EACH._foreach_add_(roots, group["eps"])
            EACH._foreach_div_(gradients, roots)
            anchors = [self.state[p]["z"] for p in own]
            EACH._foreach_lerp_(own, anchors, weight=share)
            EACH._foreach_add_(own, gradients, alpha=rate * (beta1 * (1 - share) - 1))
            EACH._foreach_sub_(anchors, gradients, alpha=rate)
            group["k"] = k + 1


class Shampoo(torch.optim.Optimizer):
    """Shampoo, with a list of preconditioners of their own shapes. Source: arXiv 1802.09568, algorithm 1."""

    def __init__(self, params: Any, lr: float = 0.05, rate: Tensor | None = None) -> None:
        super().__init__(params, {"lr": lr if rate is None else rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.clone()
                if not state:
                    state["step"] = 0
                    state["sides"] = [torch.eye(n, dtype=gradient.dtype) * 1e-3 for n in gradient.shape]
                    state["last"] = {"norm": 0.0, "scales": (1.0, None)}
                for dim, side in enumerate(state["sides"]):
                    rows = gradient.transpose(0, dim).reshape(gradient.shape[dim], -1)
                    side.add_(rows @ rows.T)
                for dim, side in enumerate(state["sides"]):
                    values, vectors = torch.linalg.eigh(side)
                    root = (vectors * values.clamp(min=1e-6) ** (-0.25)) @ vectors.T
                    gradient = (root @ gradient.transpose(0, dim)).transpose(0, dim)
                norm = float(gradient.norm())
                state["step"] += 1
                state["last"] = {"norm": norm, "scales": (1.0 / (1.0 + norm), state["last"]["norm"])}
                parameter.sub_(group["lr"] * state["last"]["scales"][0] * gradient)


class Prodigy(torch.optim.Optimizer):
    """Prodigy, whose running estimate is of all parameters. Source: arXiv 2306.06101, algorithm 4."""

    divides = "model"

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-3, "d0": 1e-3, "d_max": 1e-3, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = self.param_groups[0]
        d, numerator, denominator = first["d"], first["d_numerator"] * 0.95, 0.0
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if "step" not in state:
                    state["step"] = 0
                    state["s"] = torch.zeros_like(parameter.flatten())
                    state["p0"] = parameter.flatten().clone()
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                numerator += (
                    (d / first["d0"]) * d * torch.dot(gradient.flatten(), state["p0"] - parameter.flatten()).item()
                )
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=d * d * 0.01)
                state["s"].mul_(0.95).add_(gradient.flatten(), alpha=(d / first["d0"]) * d)
                denominator += state["s"].abs().sum().item()
        d_max = max(first["d_max"], numerator / denominator)
        for group in self.param_groups:
            group.update(d_numerator=numerator, d=d_max, d_max=d_max, k=group["k"] + 1)
            for parameter in group["params"]:
                self.state[parameter]["step"] += 1
                denominators = self.state[parameter]["exp_avg_sq"].sqrt().add_(d * 1e-8)
                parameter.addcdiv_(parameter.grad, denominators, value=-group["lr"] * d * d)
