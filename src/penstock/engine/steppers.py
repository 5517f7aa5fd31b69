"""Update rules: each steps flat tensors from their gradients, and owns the state that this takes.

To add an optimizer, add a class here and let `stepper_for` choose it; norms, clipping, masters, ZeRO, checkpoints and
memory estimates follow from its `state_kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.settings import OptimizerConfig


class Stepper(Protocol):
    """The update rule of an optimizer over the flat tensors that a rank steps (`masters`, fp32 or wider)."""

    #: names of the state tensors of each master, as checkpoints spell them; each is as long as its master
    state_kinds: ClassVar[tuple[str, ...]]
    #: by master, in order: kind of state -> flat tensor
    states: Sequence[Mapping[str, Tensor]]

    def __init__(self, masters: Sequence[Tensor], config: OptimizerConfig) -> None: ...

    def step(
        self, places: Sequence[int], gradients: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        """Step the masters at these places from their gradients, in place."""
        ...

    def continue_from(self, num_updates: int) -> None:
        """Go on as if every master had been stepped this number of times; `states` is loaded in place."""
        ...


class AdamW:
    """AdamW. Source: arXiv 1711.05101, algorithm 2."""

    state_kinds: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    #: by master: running means of its gradients and of their squares
    states: Sequence[Mapping[str, Tensor]]
    #: flat tensors that are stepped
    _masters: Sequence[Tensor]
    #: by master: the number of its updates, fp32 on its device, as the fused kernel takes it
    _num_updates: Sequence[Tensor]

    def __init__(self, masters: Sequence[Tensor], config: OptimizerConfig) -> None:
        self.config, self._masters = config, masters
        self.states = [{kind: torch.zeros_like(master) for kind in self.state_kinds} for master in masters]
        self._num_updates = [torch.zeros((), dtype=torch.float32, device=master.device) for master in masters]

    def step(
        self, places: Sequence[int], gradients: Sequence[Tensor], learning_rate: float, weight_decay: float
    ) -> None:
        # The class torch.optim.AdamW loads the compiler at its first use, which takes a second, and calls this.
        adamw(
            [self._masters[i] for i in places],
            list(gradients),
            [self.states[i]["exp_avg"] for i in places],
            [self.states[i]["exp_avg_sq"] for i in places],
            [],
            [self._num_updates[i] for i in places],
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
        )

    def continue_from(self, num_updates: int) -> None:
        for number in self._num_updates:
            number.fill_(num_updates)


STEPPERS: tuple[type[Stepper], ...] = (AdamW,)


def stepper_for(config: OptimizerConfig) -> type[Stepper]:
    """The update rule that the settings ask for; AdamW is the only one."""
    return AdamW
