"""Update rules of the package's own, which step flat tensors, and what is known of optimizers of torch's kind.

Another rule of its own is another `FlatStepper` here, entered in `STEPPERS`. Norms, clipping, masters, ZeRO,
checkpoints and memory estimates follow from the state it names.
"""

from __future__ import annotations

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from penstock.parallel import Place
from penstock.parallel.gradients import as_real
from penstock.settings import ConfigError
from penstock.settings.declare import match, mismatch, type_in_words
from penstock.settings.optimizer import Division, Rate

Values = Mapping[str, Any]
"""A group's hyperparameters under torch's names: `lr`, `weight_decay`, `betas` and the like."""


@dataclass(eq=False)
class Block:
    """The part of one bucket that a rank steps."""

    #: the number of the parameter group
    group: int
    #: the values that are stepped, flat: fp32 or wider
    master: Tensor
    #: their gradients
    gradient: Tensor
    #: the parameters' elements in both
    places: Sequence[Place]
    #: what a `FlatStepper` keeps: kind of state -> one value for each element of the master, 0 at first
    state: Mapping[str, Tensor] = field(default_factory=dict)
    #: the number of its updates, fp32 on its device, for a rule that counts them
    num_updates: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.num_updates = torch.zeros((), dtype=torch.float32, device=self.master.device)


@dataclass(frozen=True, eq=False)
class OwnedState:
    """A state tensor of one parameter, as a view: one value for each of its elements that this rank steps, or a whole.

    `place` is None for a tensor of another shape than the parameter's, such as the number of its steps.
    """

    place: Place | None
    values: Tensor


StateName = tuple[str, str]
"""The kind of a state, and the full name of its parameter."""
States = Mapping[StateName, OwnedState]
Stored = tuple[torch.dtype, tuple[int, ...] | None]
"""A stored state's type, and its shape: None if it has one value for each of the parameter's elements."""


class StateKeeper(Protocol):
    """Keeps state of parameters. To load another: copy it into what `allocate_for` gives, then call `load_state`."""

    def state(self) -> States:
        """The present state, as views. Raises: ConfigError naming what a checkpoint cannot hold."""
        ...

    def allocate_for(self, stored: Mapping[StateName, Stored]) -> States:
        """State of the forms that a checkpoint has of its parameters, to copy that into."""
        ...

    def load_state(self, state: States | None, num_updates: int, num_missed: Mapping[str, int]) -> None:
        """Go on from a state that the others gave, or with None from the present one, after this number of updates.

        num_missed: full name -> the updates that a parameter was frozen in, if any; as many for all of one block.
        """
        ...


class Stepper(StateKeeper, Protocol):
    """The parameters of one optimizer, and their state."""

    def step(self, values: Sequence[Values], factor: float = 1.0) -> None:
        """Step all masters from their gradients times `factor`, which the gradients then are, in place.

        values: the groups' hyperparameters by number.
        """
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy masters and state as they are before a step; returns a function that puts them back."""
        ...

    @property
    def state_bytes(self) -> int:
        """Memory of the state."""
        ...


class FlatStepper(Stepper):
    """A rule that steps each element by itself, so over flat buckets, whole or in parts."""

    #: the kinds of state that it keeps of each element
    state_kinds: ClassVar[tuple[str, ...]]
    #: the hyperparameters that it takes beside `lr`, with their defaults
    hyperparameters: ClassVar[Values]
    #: what is stepped
    _blocks: Sequence[Block]
    #: the same, by the number of their group
    _by_group: Mapping[int, Sequence[Block]]

    def __init__(self, blocks: Sequence[Block]) -> None:
        groups = dict.fromkeys(block.group for block in blocks)
        self._blocks = blocks
        self._by_group = {group: [block for block in blocks if block.group == group] for group in groups}
        for block in blocks:
            block.state = {kind: torch.zeros_like(block.master) for kind in self.state_kinds}

    @abstractmethod
    def step_group(self, blocks: Sequence[Block], values: Values) -> None:
        """Step the masters of one group's blocks and their state, in place, by the group's hyperparameters."""

    def step(self, values: Sequence[Values], factor: float = 1.0) -> None:
        for group, blocks in self._by_group.items():
            self.step_scaled(blocks, values[group], factor)

    def step_scaled(self, blocks: Sequence[Block], values: Values, factor: float) -> None:
        """Step one group as `step` says; a rule whose kernel takes a factor does without a pass of its own."""
        scale((block.gradient for block in blocks), factor)
        self.step_group(blocks, values)

    def state(self) -> States:
        return {
            (kind, place.name): OwnedState(place, place.view(flat))
            for block in self._blocks
            for kind, flat in block.state.items()
            for place in block.places
        }

    def allocate_for(self, stored: Mapping[StateName, Stored]) -> States:
        return self.state()

    def load_state(self, state: States | None, num_updates: int, num_missed: Mapping[str, int]) -> None:
        for block in self._blocks:
            missed = max((num_missed.get(place.name, 0) for place in block.places), default=0)
            block.num_updates.fill_(num_updates - missed)

    def snapshot(self) -> Callable[[], None]:
        tensors = [t for block in self._blocks for t in (block.master, *block.state.values(), block.num_updates)]
        before = [tensor.clone() for tensor in tensors]

        def restore() -> None:
            for tensor, values in zip(tensors, before, strict=True):
                tensor.copy_(values)

        return restore

    @property
    def state_bytes(self) -> int:
        return sum(flat.nbytes for block in self._blocks for flat in block.state.values())


class AdamW(FlatStepper):
    """AdamW, as one fused kernel over all blocks of a group. Source: arXiv 1711.05101, algorithm 2."""

    state_kinds = ("exp_avg", "exp_avg_sq")
    hyperparameters: ClassVar[Values] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

    def step_group(self, blocks: Sequence[Block], values: Values) -> None:
        self._step(blocks, values, 1.0)

    def step_scaled(self, blocks: Sequence[Block], values: Values, factor: float) -> None:
        if any(block.master.device.type == "cpu" or as_real(block.master).dtype is torch.float64 for block in blocks):
            # The kernel divides, which gives other bits than this product, and by a number in fp32.
            super().step_scaled(blocks, values, factor)
        else:
            self._step(blocks, values, factor)

    def _step(self, blocks: Sequence[Block], values: Values, factor: float) -> None:
        device = blocks[0].master.device
        divisor = None if factor == 1.0 else torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        # The class torch.optim.AdamW loads the compiler at its first use, which takes a second, and calls this.
        adamw(
            [as_real(block.master) for block in blocks],
            [as_real(block.gradient) for block in blocks],
            [as_real(block.state["exp_avg"]) for block in blocks],
            [as_real(block.state["exp_avg_sq"]) for block in blocks],
            [],
            [block.num_updates for block in blocks],
            fused=True,
            amsgrad=False,
            beta1=values["betas"][0],
            beta2=values["betas"][1],
            lr=values["lr"],
            weight_decay=values["weight_decay"],
            eps=values["eps"],
            maximize=False,
            grad_scale=divisor,
        )


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place."""
    for gradient in gradients if factor != 1.0 else ():
        gradient.mul_(factor)


STEPPERS: dict[str, type[FlatStepper]] = {"adamw": AdamW}
"""`optimizer.name` -> its rule here, which takes the place of a class of torch.optim unless that is given arguments."""


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer from torch's parameter groups."""


@dataclass(frozen=True, eq=False)
class OptimizerKind:
    """An optimizer that steps one or several groups."""

    #: for messages
    label: str
    #: makes it as one of torch; of a rule of the package's own, one that only has its hyperparameters
    make: Make
    #: the rule of the package's own, which steps flat buckets
    stepper: type[FlatStepper] | None = None
    #: how its step may be divided, as the settings declare it
    divides: Division | None = None

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """One of these parameter groups, with tensors of its own among their settings, such as a learning rate."""
        optimizer = self.make(groups)
        for group in optimizer.param_groups:
            group.update({key: value.clone() for key, value in group.items() if isinstance(value, Tensor)})
        return optimizer


@dataclass(frozen=True, eq=False)
class GroupRule:
    """One group's optimizer and hyperparameters."""

    kind: OptimizerKind
    #: course of the learning rate; None for that with which the optimizer is made
    rate: Rate | None
    #: course of the weight decay; None for that with which the optimizer is made
    decay: Rate | None
    #: further keys of torch's parameter group
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def hyperparameters(self) -> Values:
        """The hyperparameters of a group of the package's own rules, before any course sets them."""
        assert self.kind.stepper is not None
        return {"lr": 0.0, **self.kind.stepper.hyperparameters, **self.options}

    @cached_property
    def made_as(self) -> str:
        """The name of the optimizer's class. Raises: ConfigError if none is made."""
        return self.kind.stepper.__name__ + " of Penstock" if self.kind.stepper else type(self._sample).__name__

    @cached_property
    def _sample(self) -> torch.optim.Optimizer:
        return sample(self.kind, [self])

    @cached_property
    def division(self) -> Division:
        """The parts that the optimizer steps independently; see `OptimizerConfig.divides`.

        Raises:
            ConfigError: it cannot be made, steps by more than the gradients, or declares what is no division.
        """
        if self.kind.stepper is not None:
            return Division.ELEMENTS
        optimizer = self._sample
        if (reason := _why_not(optimizer)) is not None:
            raise ConfigError(
                f"the optimizer {self.made_as} {reason}; give one whose step takes nothing but parameters with "
                "their gradients"
            )
        declared = self.kind.divides or getattr(type(optimizer), "divides", None)
        is_one, declared = match(Division | None, declared)
        if not is_one:
            raise ConfigError(mismatch(f"{self.made_as}.divides", declared, Division))
        return declared or known_division(optimizer) or Division.PARAMETERS


_OF_TORCH = {
    Division.ELEMENTS: "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD",
    Division.PARAMETERS: "Adafactor Muon SparseAdam",
    Division.MODEL: "LBFGS",
}
# Blocks of quantized state, and rounding by chance, are of a parameter and its shape.
_OF_TORCHAO = {Division.PARAMETERS: "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8 _AdamW"}
DIVISIONS: Mapping[str, Division] = {
    f"{package}.{name}": division
    for package, table in (("torch", _OF_TORCH), ("torchao", _OF_TORCHAO))
    for division, names in table.items()
    for name in names.split()
}
"""Package and class of each optimizer of torch and torchao -> how its step may be divided. A subclass may differ."""


def known_division(optimizer: torch.optim.Optimizer) -> Division | None:
    """The division of an optimizer of torch or torchao; None for any other, and for one with hooks on its step."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    kind = type(optimizer)
    return DIVISIONS.get(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")


def sample(kind: OptimizerKind, rules: Sequence[GroupRule]) -> torch.optim.Optimizer:
    """An optimizer over one small parameter of each group, which never steps. Raises: ConfigError if none is made."""
    groups = [{"params": [nn.Parameter(torch.zeros(2, 2))], **rule.options} for rule in rules]
    try:
        return kind.optimizer(groups)
    except ConfigError:
        raise
    except Exception as error:  # whatever the optimizer says
        raise ConfigError(
            f"the optimizer {kind.label} is not made of parameter groups with a small matrix each: it raises "
            f"{type(error).__name__}: {error}"
        ) from error


def _why_not(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why no pipeline can step with this optimizer, in words; None if there is none."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "takes sparse gradients, and those here are dense"
    needed = [one for one in inspect.signature(optimizer.step).parameters.values() if one.default is one.empty]
    if any(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed):
        return f"steps with a {needed[0].name} that computes the loss anew, which no step of a pipeline can"
    return None


# ---- The hyperparameters of every parameter group at any step: functions of the step's number alone


class Rates:
    """Gives each group's hyperparameters at a step, the same on every rank.

    Of an optimizer of torch's kind they are those that a course or a scheduler sets, and no other: what it writes into
    its groups stays. A scheduler of torch acts on a sample of the optimizer, which never steps, and is stepped until it
    has reached the step that is asked for; for an earlier one it starts again. So a rate depends on the step's number
    alone, whatever was skipped or resumed.
    """

    #: what the last group's optimizer was made with
    usual: Values
    #: the groups by number
    _rules: Sequence[GroupRule]
    #: makes the scheduler of an optimizer; None without one
    _make_scheduler: Any
    #: with a scheduler: the sample of each optimizer, and its scheduler
    _samples: Mapping[OptimizerKind, tuple[torch.optim.Optimizer, Any]]
    #: the keys that the schedulers have set
    _set: set[str]
    #: the step that the schedulers have reached
    _step: int

    def __init__(self, rules: Sequence[GroupRule], make_scheduler: Callable[[Any], Any] | None) -> None:
        self._rules, self._make_scheduler, self._set = rules, make_scheduler, {"lr"}
        last = self._rules[-1]
        self.usual = last.hyperparameters if last.kind.stepper else sample(last.kind, [last]).param_groups[0]
        self._restart()

    def at(self, step: int) -> list[Values]:
        """The groups' hyperparameters at step `step` >= 1, by number."""
        if self._make_scheduler is not None:
            if step < self._step:
                self._restart()
            with warnings.catch_warnings():
                # It expects its optimizer to step, which the real ones do.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for _ in range(self._step, step):
                    for _, scheduler in self._samples.values():
                        scheduler.step()
            self._step = step
        groups = {kind: iter(optimizer.param_groups) for kind, (optimizer, _) in self._samples.items()}
        by_group: list[Values] = []
        for rule in self._rules:
            values = dict(rule.hyperparameters) if rule.kind.stepper else {}
            if rule.kind in groups:
                group = next(groups[rule.kind])
                values |= {key: group[key] for key in self._set if key in group}
            courses = {"lr": rule.rate, "weight_decay": rule.decay}
            by_group.append(values | {key: course(step) for key, course in courses.items() if course is not None})
        return by_group

    def _restart(self) -> None:
        """Make the samples, whose schedulers are then at step 1."""
        kinds = dict.fromkeys(rule.kind for rule in self._rules) if self._make_scheduler is not None else {}
        self._step, self._samples = 1, {kind: self._scheduled(kind) for kind in kinds}

    def _scheduled(self, kind: OptimizerKind) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = sample(kind, [rule for rule in self._rules if rule.kind is kind])
        optimizer.param_groups[:] = [_Watched(group, self._set) for group in optimizer.param_groups]
        scheduler = self._make_scheduler(optimizer)
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"a scheduler must be one of torch.optim.lr_scheduler whose rates follow from the step alone, not "
                f"{type_in_words(scheduler)}"
            )
        return optimizer, scheduler


class _Watched(dict[str, Any]):
    """A parameter group of torch that notes the keys that are set."""

    #: the keys
    _set: set[str]

    def __init__(self, group: Mapping[str, Any], keys: set[str]) -> None:
        super().__init__(group)
        self._set = keys

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key != "initial_lr":
            self._set.add(key)


# ---- The state of parameters that are frozen


@dataclass(eq=False)
class SetAside(StateKeeper):
    """Keeps the state of parameters that were trained and are frozen now, in host memory, for when they are thawed."""

    #: this rank's frozen parameters, by full name
    parameters: Mapping[str, nn.Parameter]
    #: (kind of state, full name) -> the state
    _kept: States = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The parameters of which it keeps something."""
        return {name for _, name in self._kept}

    def state(self) -> States:
        return self._kept

    def allocate_for(self, stored: Mapping[StateName, Stored]) -> States:
        allocated: dict[StateName, OwnedState] = {}
        for key, (dtype, shape) in stored.items():
            if (parameter := self.parameters.get(key[1])) is not None:
                place = Place.whole(key[1], parameter, 0) if shape is None else None
                size = (parameter.numel(),) if shape is None else shape
                allocated[key] = OwnedState(place, torch.zeros(size, dtype=dtype))
        return allocated

    def load_state(self, state: States | None, num_updates: int, num_missed: Mapping[str, int]) -> None:
        if state is not None:
            self._kept = state
