"""An optimizer over flat buckets with one gradient norm for the whole model, the same bits however the model is cut.

Three things make it so. Elements are stepped by a fused kernel over flat tensors whose places are whole cache lines
(see `penstock.parallel.gradients`). Norms are taken parameter by parameter, each over the same elements in the same
order wherever it lies. And their squares are added without rounding on the way, so the order does not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, mul
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.optimizer.groups import ParameterGroups
from penstock.engine.optimizer.state import MASTER, STATE, is_of_all, state_name
from penstock.engine.optimizer.steppers import (
    Block,
    GroupRule,
    OwnedState,
    Rates,
    SetAside,
    StateKeeper,
    StateName,
    States,
    Stepper,
    Stored,
    Values,
    scale,
)
from penstock.engine.optimizer.torch_stepper import TorchStepper
from penstock.parallel import Bucket, GradientBuckets, Reduction
from penstock.parallel.gradients import as_real
from penstock.parallel.host import gather_json
from penstock.parallel.staging import read_numbers
from penstock.settings import ConfigError, Division, LearningRate, OptimizerConfig

# As in torch.nn.utils.clip_grad_norm_: keeps the quotient finite.
_CLIP_EPS = 1e-6
# The elements that are compared at once: on a CPU those that stay in its cache, on a device as many as are one launch.
_AT_ONCE, _AT_ONCE_ON_DEVICE = 1 << 20, 1 << 26
WholeState = Mapping[str, tuple[bool, Tensor]]
"""``optimizer.<kind>.<parameter>`` -> True if it has one value for each of the parameter's elements, and the tensor."""


@dataclass
class LossScaler:
    """The scale of the present step's loss, the same on every rank because all ranks see the same outcomes.

    It is halved at once when a step fails, and doubled after many that succeed: a power of two, so that scaling and
    unscaling round nothing.

    Source: arXiv 1710.03740, section 3.2.
    """

    #: factor on the loss of the present step
    scale: float = 2.0**16
    #: steps that have succeeded since the scale last moved, and the number of them after which it rises
    num_good_steps: int = 0
    num_growth_steps: int = 2000
    smallest: ClassVar[float] = 1.0
    largest: ClassVar[float] = 2.0**24

    def update(self, success: bool) -> None:
        """Learn whether the step's gradients were finite, and set the scale of the next."""
        self.num_good_steps = self.num_good_steps + 1 if success else 0
        if not success:
            self.scale = max(self.scale / 2, self.smallest)
        elif self.num_good_steps == self.num_growth_steps:
            self.scale, self.num_good_steps = min(self.scale * 2, self.largest), 0

    def state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs, as JSON values."""
        return {"scale": self.scale, "num_good_steps": self.num_good_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.scale, self.num_good_steps = float(state["scale"]), int(state["num_good_steps"])


@dataclass(frozen=True)
class Update:
    """The outcome of one optimizer step, the same on every rank."""

    #: False where a gradient was not finite: then nothing has changed
    success: bool
    #: norm of all gradients before clipping, without the loss scale; NaN where one was not finite
    grad_norm: float
    #: learning rate of the last step that succeeded, this or an earlier one
    learning_rate: float


class Optimizer:
    """Steps the parameters of this rank's stages, from gradients that are reduced and whose ties are summed.

    Norm, clipping, loss scale and fp32 masters are here; the update rules are those of steppers.

    Args:
        buckets: gradient buckets of the local stages.
        config: the optimizer's settings.
        group: host-memory group of the ranks that hold the model between them, over which norms are gathered.
        ties: full names, copy -> owner; a copy is stepped like any parameter but not counted in the norm.
        scaler: scales the loss of fp16 training.
        norm_names: the names under which this rank counts parameters that are shared with other ranks; None for those
            that another rank counts.

    The groups that number the buckets are those of `config`, if they are not given instead of it.

    Raises: ValueError when two ranks, or two stages, count a parameter of the same name.
    """

    #: settings, with the schedules of learning rate and weight decay
    config: OptimizerConfig
    #: the groups that number the buckets
    groups: ParameterGroups
    #: None unless training in fp16
    scaler: LossScaler | None
    #: absolute number of the last step, skipped ones included
    num_steps: int
    #: learning rate of the last step that succeeded
    learning_rate: float
    #: steps that succeeded
    num_updates: int
    #: trained parameters, of any rank, that were frozen for some updates -> the number of those
    num_missed: dict[str, int]
    #: frozen parameters, of any rank, that were trained -> the number of updates that they have seen
    num_seen: dict[str, int]
    #: ranks that hold the model between them
    _group: dist.ProcessGroup | None
    #: all buckets; the gradients of lent parameters lie in buckets of their own
    _buckets: tuple[Bucket, ...]
    #: buckets that are stepped here; the owners of lent parameters step them
    _stepped: list[Bucket]
    #: the stepped buckets of 16-bit parameters, each with the fp32 copy of its own part that is stepped in its place
    _masters: list[tuple[Bucket, Tensor]]
    #: the groups' hyperparameters at any step; a user's own schedule may raise
    rates: Rates
    #: True where a user's own optimizer, or one of torch's, takes part: it may raise anything in its step
    may_fail: bool
    #: the number of the group of matrices that no pattern matches
    _usual: int
    #: the update rules and their state, one for each optimizer among the groups
    _steppers: list[Stepper]
    #: the state of this rank's frozen parameters, which whoever makes the optimizer gives it
    aside: SetAside
    #: all that keep state, and the state that each last gave to be written to, which `load_progress` takes up
    _keepers: Sequence[StateKeeper]
    _given: dict[StateKeeper, States]
    #: gradients that this rank counts in the norm, by the order of their names
    _counted: list[Tensor]
    #: the largest number of gradients that any rank counts
    _num_norms: int

    def __init__(
        self,
        buckets: Sequence[GradientBuckets],
        config: OptimizerConfig | ParameterGroups,
        group: dist.ProcessGroup | None = None,
        ties: Mapping[str, str] | None = None,
        scaler: LossScaler | None = None,
        norm_names: Mapping[str, str | None] | None = None,
    ) -> None:
        gradients = [(name, view) for of_stage in buckets for name, view in of_stage.owned_gradients.items()]
        names = [(name, (norm_names or {}).get(name, name)) for name, _ in gradients]
        # First of all: below this any rank may fail alone.
        self._num_norms = _max_names_of_rank([in_norm for _, in_norm in names if in_norm is not None], group)
        self.groups = config if isinstance(config, ParameterGroups) else ParameterGroups(config)
        self.config = self.groups.config
        self.scaler = scaler
        self.num_steps = 0
        self.num_updates = 0
        self.num_missed, self.num_seen = {}, {}
        rate = self.config.learning_rate
        self.learning_rate = rate(0) if isinstance(rate, LearningRate) else 0.0
        self._group = group
        self._buckets: tuple[Bucket, ...] = tuple(bucket for of_stage in buckets for bucket in of_stage.buckets)
        self._stepped = [bucket for bucket in self._buckets if not bucket.reduction.lent]
        counted = {name for name, in_norm in names if in_norm is not None and name not in (ties or {})}
        self._counted = [as_real(view) for name, view in sorted(gradients, key=itemgetter(0)) if name in counted]
        self.rates = Rates(self.groups.rules, self.config.scheduler)
        self.may_fail = any(rule.kind.stepper is None for rule in self.groups.rules)
        self._usual = self.groups.usual
        self.aside = SetAside({})
        blocks, self._masters = list[Block](), []
        for bucket in self._stepped:
            # This rank's parameters themselves, or an fp32 copy of 16-bit ones.
            master = bucket.parameters[bucket.owned].to(bucket.gradients.dtype)
            blocks.append(Block(bucket.group, master, bucket.gradients[bucket.owned], bucket.owned_places))
            if master.dtype != bucket.parameters.dtype:
                self._masters.append((bucket, master))
        self._steppers = _steppers_for(self.groups.rules, blocks, is_split=group is not None)
        self._keepers, self._given = (self.aside, *self._steppers), {}

    @property
    def loss_scale(self) -> float:
        """Factor on the next step's loss; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @torch.no_grad()
    def step(self, number: int | None = None) -> Update:
        """Update all parameters, or none on any rank if a gradient is not finite on some rank.

        `number` is the absolute number of this step, from 1; by default one more than that of the last call, also
        if that one was skipped. Gradients are left clipped, and unscaled where they had to be touched.
        """
        number = self.num_steps + 1 if number is None else number
        norm, _ = self.take_edits_and_norm()
        return self.update(norm, number, self.rates.at(number))

    @torch.no_grad()
    def update(self, norm: float, number: int, values: Sequence[Values]) -> Update:
        """The rest of a step, in which ranks send each other nothing, given the gradients' norm and the rates."""
        self.num_steps, success = number, math.isfinite(norm)
        if success:
            usual = {**self.rates.usual, **values[self._usual]}
            self.learning_rate = float(usual.get("lr", 0.0))
            # The loss scale off and clipped, in one pass or, with nothing to do, in none.
            factor = 1.0 / self.loss_scale
            if self.config.clip_norm:
                factor *= min(1.0, self.config.clip_norm / (norm + _CLIP_EPS))
            scale((bucket.gradients for bucket in self._buckets if bucket.reduction.lent), factor)
            self._given.clear()
            for stepper in self._steppers:
                stepper.step(values, factor)
            self.num_updates += 1
            self._publish_masters()
        if self.scaler is not None:
            self.scaler.update(success)
        return Update(success, norm if success else math.nan, self.learning_rate)

    @property
    def kinds(self) -> str:
        """The optimizers by the names of their classes, which tell whose state a checkpoint has."""
        return ", ".join(sorted({rule.made_as for rule in self.groups.rules}))

    def snapshot(self) -> Callable[[], None]:
        """Copy what a step changes on this rank; returns a function that puts it back."""
        restores, progress = [stepper.snapshot() for stepper in self._steppers], self.progress()

        def restore() -> None:
            for put_back in restores:
                put_back()
            self._take_numbers(progress)
            self._publish_masters()

        return restore

    def owned_state(self) -> dict[str, OwnedState]:
        """The state and master of all that this rank steps: a flat view, and the elements of a parameter it belongs to.

        They are named ``optimizer.<kind>.<parameter>``.

        Raises: ConfigError naming what an optimizer keeps and a checkpoint cannot hold.
        """
        self._given = {keeper: keeper.state() for keeper in self._keepers}
        return self._given_and_masters()

    def allocate_for(self, stored: Mapping[StateName, Stored]) -> dict[str, OwnedState]:
        """`owned_state` as a checkpoint has it, to copy it into; then `load_progress` takes it up."""
        self._given = {keeper: keeper.allocate_for(stored) for keeper in self._keepers}
        return self._given_and_masters()

    def _given_and_masters(self) -> dict[str, OwnedState]:
        self.take_edits()
        states = {name: state for given in self._given.values() for name, state in given.items()}
        for bucket, master in self._masters:
            states |= {(MASTER, place.name): OwnedState(place, place.view(master)) for place in bucket.owned_places}
        return {f"{STATE}{kind}.{name}": state for (kind, name), state in states.items()}

    @property
    def reductions(self) -> dict[str, Reduction]:
        """Parameters that ranks step -> the ranks over which their gradients are summed, and which step them."""
        return {place.name: bucket.reduction for bucket in self._stepped for place in bucket.places}

    @property
    def state_bytes(self) -> int:
        """Memory of the update rules' state and of masters on this rank, without what frozen parameters have aside."""
        of_rules = sum(stepper.state_bytes for stepper in self._steppers)
        return of_rules + sum(master.nbytes for _, master in self._masters)

    def whole_state(self, device: torch.device, group: dist.ProcessGroup | None) -> WholeState:
        """Collect the state of this rank's parameters, whole although ranks step them in parts.

        What an optimizer keeps of no parameter is every rank's. All ranks of `group`, which hold the model between
        them, call it at one point.
        """
        owned, reductions = self.owned_state(), self.reductions
        if group is None:
            return {name: (state.place is not None, state.values.clone()) for name, state in owned.items()}
        by_rank = gather_json({name: _described(state, state_name(name)[1]) for name, state in owned.items()}, group)
        states: dict[str, tuple[bool, Tensor]] = {}
        for name in sorted({name for described in by_rank for name in described}):
            reduction = reductions.get(parameter := state_name(name)[1])
            first = next(described[name] for described in by_rank if name in described)
            if "bytes" in first:
                values = torch.tensor(first["bytes"], dtype=torch.uint8).view(getattr(torch, first["dtype"]))
                states[name] = False, values.view(first["shape"])
                continue
            if not self.config.zero or reduction is None or parameter in self.aside.parameters:
                if name in owned:
                    states[name] = owned[name].place is not None, owned[name].values.clone()
                continue
            members = [group.rank()]
            if reduction.group is not None:
                members = [dist.get_group_rank(group, r) for r in dist.get_process_group_ranks(reduction.group)]
            holders = [rank for rank in members if name in by_rank[rank]]
            if not holders:
                continue
            known = by_rank[holders[0]][name]
            whole = torch.zeros(known["shape"], dtype=getattr(torch, known["dtype"]), device=device)
            # A tensor of another shape is the same on every rank that has it.
            if name in owned and (known["elements"] or holders[0] == group.rank()):
                place = owned[name].place
                (whole if place is None else whole[place.first : place.last]).copy_(owned[name].values)
            if reduction.group is not None:
                # All but one rank's values are zero bits, so the sum is exact.
                flat = whole.reshape(-1).view(torch.uint8)
                dist.all_reduce(flat, group=reduction.group)
                whole.copy_(flat.view(whole.dtype).view(whole.shape))
            states[name] = known["elements"], whole
        return states

    def take_whole_state(self, whole: WholeState) -> None:
        """Copy what is stepped here, or set aside, from the state of another optimizer; before `load_progress`."""
        stored = {
            state_name(name): (values.dtype, None if elements else tuple(values.shape))
            for name, (elements, values) in whole.items()
        }
        for name, state in self.allocate_for(stored).items():
            if name in whole:
                elements, values = whole[name]
                assert elements == (state.place is not None), f"{name} has changed its form"
                part = values.view(-1)[state.place.first : state.place.last] if state.place is not None else values
                state.values.copy_(part)
        # A parameter may have been changed while it was frozen.
        self.take_edits()

    def progress(self) -> dict[str, Any]:
        """The numbers that a resumed run needs beside its state, as JSON values."""
        return {
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "learning_rate": self.learning_rate,
            "kinds": self.kinds,
            "scaler": None if self.scaler is None else self.scaler.state(),
            **({"since": dict(self.num_missed)} if self.num_missed else {}),
            **({"paused": dict(self.num_seen)} if self.num_seen else {}),
        }

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Go on from `progress` and the state that was last given, and give 16-bit parameters their masters' values."""
        self._take_numbers(progress)
        for keeper in self._keepers:
            keeper.load_state(self._given.pop(keeper, None), self.num_updates, self.num_missed)
        self._publish_masters()

    def _take_numbers(self, progress: Mapping[str, Any]) -> None:
        self.num_steps = int(progress["num_steps"])
        self.learning_rate = float(progress["learning_rate"])
        self.num_updates = int(progress["num_updates"])
        self.num_missed, self.num_seen = dict(progress.get("since", {})), dict(progress.get("paused", {}))
        if self.scaler is not None and progress["scaler"] is not None:
            self.scaler.load_state(progress["scaler"])

    def take_edits(self) -> None:
        """Take over what was written into 16-bit parameters since the last step, by whatever way.

        Where an element is no longer its master rounded, the master becomes the element; all others keep theirs. A
        parameter of any type that was given other storage (`parameter.data = ...`) has its values moved back.
        """
        self._move_back()
        pairs, is_same = self._compare_with_masters()
        if pairs:
            self._take_changed(pairs, torch.stack(is_same).tolist())

    @torch.no_grad()
    def _move_back(self) -> None:
        """Give parameters that were given other storage their places in the buckets again, with their values."""
        for bucket in self._stepped:
            storage = bucket.parameters.untyped_storage()
            for place in bucket.places:
                if place.parameter.untyped_storage()._cdata != storage._cdata:
                    view = place.view(bucket.parameters).view(place.parameter.shape)
                    view.copy_(place.parameter)
                    place.parameter.data = view

    def _compare_with_masters(self) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Parts of 16-bit parameters with their masters, and for each True if the one is the other rounded."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for bucket, master in self._masters:
            num = _AT_ONCE if master.device.type == "cpu" else _AT_ONCE_ON_DEVICE
            pairs += zip(bucket.parameters[bucket.owned].split(num), master.split(num), strict=True)
        # Bits are compared four elements at once.
        wide = torch.int64
        is_same = [(values.view(wide) == master.to(values.dtype).view(wide)).all() for values, master in pairs]
        return pairs, is_same

    @torch.no_grad()
    def _take_changed(self, pairs: Sequence[tuple[Tensor, Tensor]], is_same: Sequence[float]) -> None:
        narrow = torch.int16
        for values, master in (pair for pair, same in zip(pairs, is_same, strict=True) if not same):
            unchanged = values.view(narrow) == master.to(values.dtype).view(narrow)
            master.copy_(torch.where(unchanged, master, values.to(master.dtype)))

    def take_edits_and_norm(self, also_read: Sequence[Tensor] = ()) -> tuple[float, list[float]]:
        """Take edits as `take_edits` does; the gradients' norm without the loss scale, and the numbers of `also_read`.

        The norm is not finite if any element on any rank is not. All ranks of the group call it. Tensors that are
        `also_read` have one element: the device is waited for only once.
        """
        self._move_back()
        pairs, is_same = self._compare_with_masters()
        # In float64: a sum of squares in fp32 loses digits with the size of the parameter, 4 of 7 at 15 million.
        gradients = self._counted
        norms = torch._foreach_norm(gradients, 2, torch.float64) if gradients else []  # pyright: ignore[reportPrivateImportUsage]
        numbers = read_numbers([*norms, *is_same, *also_read])
        num_own = len(norms) + len(is_same)
        self._take_changed(pairs, numbers[len(norms) : num_own])
        rank_norms = torch.tensor(numbers[: len(norms)] + [0.0] * (self._num_norms - len(norms)), dtype=torch.float64)
        gathered = [rank_norms]
        if self._group is not None:
            gathered = [torch.empty_like(rank_norms) for _ in range(self._group.size())]
            dist.all_gather(gathered, rank_norms, group=self._group)
        values = torch.cat(gathered).tolist()
        # fsum is exact before its one rounding, so the order of parameters, which differs by layout, does not matter.
        return math.sqrt(math.fsum(map(mul, values, values))) / self.loss_scale, numbers[num_own:]

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for bucket, master in self._masters:
            bucket.parameters[bucket.owned].copy_(master)


def _described(state: OwnedState, parameter: str) -> dict[str, Any]:
    place = state.place
    shape = list(state.values.shape) if place is None else [place.parameter.numel()]
    description = {
        "elements": place is not None,
        "shape": shape,
        "dtype": str(state.values.dtype).removeprefix("torch."),
    }
    if is_of_all(parameter):
        description["bytes"] = state.values.reshape(-1).view(torch.uint8).tolist()
    return description


def _max_names_of_rank(names: Sequence[str], group: dist.ProcessGroup | None) -> int:
    """The largest number of names on any rank.

    Raises: ValueError on every rank when a name occurs twice.
    """
    by_rank = gather_json(sorted(names), group)
    every = sorted(name for rank_names in by_rank for name in rank_names)
    twice = [name for name, following in itertools.pairwise(every) if name == following]
    if twice:
        raise ValueError(f"parameter {twice[0]!r} is held twice; give the copies names of their own and tie them")
    return max(len(rank_names) for rank_names in by_rank)


def _steppers_for(rules: Sequence[GroupRule], blocks: Sequence[Block], is_split: bool) -> list[Stepper]:
    """The update rules of these blocks, one for each optimizer among the groups.

    is_split: True where several ranks step the model's parameters, each its own.

    Raises: ConfigError for an optimizer that steps all parameters together, where they are split.
    """
    steppers: list[Stepper] = []
    for index, kind in enumerate(dict.fromkeys(rule.kind for rule in rules)):
        rules_of_kind = {number: rule for number, rule in enumerate(rules) if rule.kind is kind}
        blocks_of_kind = [block for block in blocks if block.group in rules_of_kind]
        rule = next(iter(rules_of_kind.values()))
        if is_split and rule.division is Division.MODEL:
            raise ConfigError(
                f'the optimizer {rule.made_as} steps all parameters together (divides = "model"), but several ranks '
                "step parameters here, each its own; it can train with pp = 1, tp = 1, ep = 1 and "
                "optimizer.zero = false"
            )
        if kind.stepper is not None:
            steppers.append(kind.stepper(blocks_of_kind))
        elif any(block.places for block in blocks_of_kind):
            steppers.append(TorchStepper(kind, rules_of_kind, index, blocks_of_kind))
    return steppers
