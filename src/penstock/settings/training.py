"""Settings of how a model is trained: the grid of processes, the order of their work, and the optimizer.

Learning rate and weight decay are closed forms of the step number, counted from 1. There is no state from step to step,
so a skipped step does not shift later ones.
"""

import dataclasses
import itertools
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Any, Literal, NamedTuple, Self, cast

from penstock.settings.declare import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    ConfigError,
    NamedValue,
    Settings,
    TableValue,
    argument,
    match,
    mismatch,
    refuse_divisor,
    setting,
)

# ---- The process grid as arithmetic: the sizes of its axes, the place of each rank, and the groups of ranks


AXES = ("dp", "pp", "cp", "tp")
_NUM_OFFERED = 5
# More than any machine has, and few enough to list their groups.
_PROCESSES = Bounds(least=1, limit=2**20)
# Processes cannot even greet each other in much less than a second. A clock counts nanoseconds in 64 bits: 68 years.
_TIMEOUT = Bounds(least=1, limit=2**31 - 1)

Groups = tuple[tuple[int, ...], ...]
Device = Literal["auto", "cpu", "cuda"]
TransportKind = Literal["auto", "host"]


class ContextForm(NamedValue):
    """The exchange between ranks that share sequences.

    RING: keys and values go round; works for any number of heads. ALL_TO_ALL: every rank gets all tokens of some heads
    and sends its own tokens of the others; fewer and larger messages, if the ranks divide the heads.

    >>> EngineOptions(attention="all-to-all").attention is ContextForm.ALL_TO_ALL
    True
    """

    RING = "ring"
    ALL_TO_ALL = "all-to-all"


class Coordinates(NamedTuple):
    """A rank's place on every axis."""

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{axis} {place}" for axis, place in zip(self._fields, self, strict=True))


@dataclass(frozen=True)
class Layout(Settings, section="parallel"):
    """Sizes of the grid's axes and their order; by default the ranks of a tp group are neighbours.

    An ep group consists of consecutive ranks among those that differ only in dp and cp, so ep adds no ranks.
    `ranks`, such as `range(2, 4)`, are the processes of the world on which the grid lies, None for all: so engines can
    live on different processes of one script. Everywhere else a rank is counted among those of the grid.

    Raises:
        ConfigError: a size below one, an ep that does not divide dp * cp, an order that does not name each axis once,
            ranks that are not ascending or not as many as the grid has.

    >>> layout = Layout(pp=2, dp=2)
    >>> layout.world_size, str(layout.coordinates(3)), layout.groups("pp")
    (4, 'dp 1, pp 1, cp 0, tp 0', ((0, 1), (2, 3)))
    """

    pp: int = setting(1, "Pipeline ranks.", _PROCESSES)
    dp: int = setting(1, "Data-parallel ranks, each with a copy of the model and its own data.", _PROCESSES)
    cp: int = setting(1, "Context-parallel ranks, which share every sequence's tokens.", _PROCESSES)
    tp: int = setting(1, "Tensor-parallel ranks, which share every layer.", _PROCESSES)
    ep: int = setting(
        1,
        "Ranks that share every layer's experts; they are among those of dp and cp, so it divides dp * cp.",
        _PROCESSES,
    )
    order: str = setting(
        "-".join(AXES),
        "Numbering of the ranks along these axes, the last one fastest: ranks of one machine have adjacent numbers.",
    )
    ranks: tuple[int, ...] | range | None = argument(None, Bounds(least=0, limit=2**20))

    def _check(self) -> None:
        if sorted(self.axes) != sorted(AXES):
            raise ConfigError(
                f"parallel.order = {self.order!r} must name each of dp, pp, cp and tp once, such as dp-pp-cp-tp"
            )
        if self.ranks is not None and list(self.ranks) != sorted(set(self.ranks)):
            raise ConfigError(f"ranks = {list(self.ranks)} must be ascending, such as range(2, 4)")
        if self.world_size > (limit := _PROCESSES.limit or 0):
            raise ConfigError(f"{self.product} is {self.world_size} processes; at most {limit} are possible")
        refuse_divisor("parallel.ep", self.ep, "parallel.dp x parallel.cp", self.dp * self.cp)
        if self.ranks is not None and len(self.ranks) != self.world_size:
            raise ConfigError(f"{self} is {self.world_size} processes, but ranks names {len(self.ranks)}")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in their order, slowest first."""
        return tuple(self.order.split("-"))

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name; their product is the number of processes."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Processes of the grid."""
        return math.prod(self.sizes.values())

    @property
    def product(self) -> str:
        """The axes' sizes as settings: ``parallel.dp = 2 x parallel.pp = 4 x ...``."""
        return " x ".join(f"parallel.{axis} = {size}" for axis, size in self.sizes.items())

    @property
    def shares_layers(self) -> bool:
        """True if ranks work on a layer together, and so communicate within it."""
        return self.tp > 1 or self.cp > 1 or self.ep > 1

    def __str__(self) -> str:
        text = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        text = text if self.ep == 1 else f"{text} (ep={self.ep})"
        return text if self.ranks is None else f"{text} on ranks {', '.join(map(str, self.ranks))}"

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout {self} of {self.world_size} ranks")
        places = {}
        for axis in reversed(self.axes):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**places)

    def rank_of(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global rank at a place."""
        places, rank = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}, 0
        for axis in self.axes:
            size = getattr(self, axis)
            if not 0 <= places[axis] < size:
                raise ValueError(f"{axis} rank {places[axis]} is outside the layout {self}")
            rank = rank * size + places[axis]
        return rank

    def groups(self, *axes: str) -> Groups:
        """The global ranks of every group along some axes, whose ranks differ only in these axes.

        Members are sorted, and groups by their first members.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"unknown axis {axis!r}; there are {', '.join(AXES)}")
        others = [axis for axis in AXES if axis not in axes]
        members = self.offsets(*axes)
        return tuple(tuple(first + member for member in members) for first in self.offsets(*others))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks of one group along some axes, that of `rank`, sorted."""
        place = self.coordinates(rank)._asdict()
        first = self.rank_of(**{axis: 0 if axis in axes else place[axis] for axis in AXES})
        return tuple(first + member for member in self.offsets(*axes))

    def stride(self, axis: str) -> int:
        """The distance of ranks that are neighbours on an axis."""
        return math.prod(getattr(self, later) for later in self.axes[self.axes.index(axis) + 1 :])

    def offsets(self, *axes: str) -> list[int]:
        """The numbers of the ranks whose place on all other axes is 0, sorted."""
        found = [0]
        for axis in axes:
            stride = self.stride(axis)
            found = [offset + stride * i for offset in found for i in range(getattr(self, axis))]
        return sorted(found)

    def expert_groups(self) -> Groups:
        """The groups of ranks that together hold one copy of a layer's experts."""
        starts = range(0, self.dp * self.cp, self.ep)
        return tuple(sorted(r[start : start + self.ep] for r in self.groups("dp", "cp") for start in starts))

    def expert_copies(self) -> Groups:
        """The groups of ranks that hold the same experts, over which experts' gradients are summed."""
        return tuple(sorted(ranks[place :: self.ep] for ranks in self.groups("dp", "cp") for place in range(self.ep)))

    def model_copies(self) -> Groups:
        """The groups of ranks that together hold one copy of the whole model, experts included."""
        copies: list[list[int]] = [[] for _ in range(self.dp * self.cp // self.ep)]
        for ranks in self.groups("dp", "cp"):
            for place, rank in enumerate(ranks):
                copies[place // self.ep].append(rank)
        return tuple(sorted(tuple(sorted(ranks)) for ranks in copies))

    def check(self, world_size: int) -> None:
        """Refuse a number of processes that the layout does not fill exactly.

        Raises: ValueError naming every size, and the nearest of the layouts that would fit.
        """
        if self.ranks is not None:
            if self.ranks[-1] >= world_size:
                raise ValueError(f"the layout {self} names rank {self.ranks[-1]}, but there are {world_size} processes")
            return
        if world_size == self.world_size:
            return
        offered = itertools.islice(self.fitting(world_size), _NUM_OFFERED)
        raise ValueError(
            f"the layout {self} needs {self.world_size} processes, but there are {world_size}; "
            f"{world_size} would fit {', or '.join(str(other) for other in offered)}"
        )

    def fitting(self, world_size: int) -> "Iterator[Layout]":
        """The layouts of `world_size` processes, nearest to this one first."""
        found = []
        for sizes in _factors(world_size, len(AXES)):
            by_axis = dict(zip(AXES, sizes, strict=True))
            ep = max(ep for ep in _divisors(by_axis["dp"] * by_axis["cp"]) if ep <= self.ep)
            found.append(Layout(**by_axis, ep=ep, order=self.order))
        yield from sorted(found, key=self._distance)

    def _distance(self, other: "Layout") -> tuple[float, ...]:
        """The distance between sizes, in doublings; ties go to layouts that keep tp, cp and pp."""
        *steps, of_ep = [
            abs(math.log2(getattr(other, axis) / getattr(self, axis))) for axis in ("tp", "cp", "pp", "dp", "ep")
        ]
        return (round(sum(steps), 9), *steps, of_ep)


@dataclass(frozen=True)
class ParallelConfig(Layout, section="parallel"):
    """The grid of processes.

    >>> ParallelConfig(pp=2, dp=2, device="cpu").world_size
    4
    """

    attention: ContextForm = setting(
        ContextForm.RING,
        'Exchange between cp ranks: keys and values go round a "ring", or heads are exchanged "all-to-all".',
    )
    device: Device = setting("auto", '"auto" takes GPUs where each rank finds one of its own, else the CPU for all.')
    transport: TransportKind = setting(
        "auto", '"host" sends the tensors of GPUs through host memory: slower, but ranks may share one.'
    )
    num_threads: int = setting(1, "CPU threads of a rank.", Bounds(least=1, limit=2**12))
    timeout_s: float = setting(
        600.0,
        "Seconds that a rank waits for a peer before it reports the failure and ends.",
        _TIMEOUT,
    )
    shutdown_timeout_s: float = setting(
        600.0,
        "Seconds that a run which is asked to end (SIGTERM, Ctrl-C) has to finish its step and save; then it ends "
        "without, and the newest checkpoint is the one before.",
        _TIMEOUT,
    )
    elastic: bool = setting(False, "Run on as many pipelines as the group of processes has room for, regardless of dp.")


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in _divisors(number):
        for others in _factors(number // first, count - 1):
            yield (first, *others)


# ---- The schedule: its name and options


class SearchedPlacement(NamedValue):
    """Placements for a searched order: in a loop, or there and back."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True)
class ScheduleConfig(Settings, section="schedule"):
    """The order of each rank's work.

    A setting with the name of a parameter of a schedule's builder is an option of that schedule; `options` finds it.

    >>> EngineOptions(schedule=ScheduleConfig("interleaved", stages_per_rank=2)).schedule.name
    'interleaved'
    """

    name: str = setting(
        "1f1b",
        "One of `penstock schedule list`; or a file: torch's .csv, or .txt as `penstock schedule export` writes; or a "
        "function of your own: package.module:function or file.py:function.",
    )
    stages_per_rank: int | None = setting(
        None, "Stages of each pipeline rank; left out, as many as the schedule is meant for.", AT_LEAST_1
    )
    receives_ahead: int = setting(2, "Receives posted ahead of need on each edge.", AT_LEAST_1)
    group_size: int | None = setting(
        None,
        "Microbatches that take turns at a rank's stages in interleaved schedules; left out, the number of ranks.",
        AT_LEAST_1,
    )
    max_live_microbatches: float | None = setting(
        None,
        "Microbatches that `auto` may keep live on a rank; left out, the number of ranks.",
        Bounds(least=1),
    )
    placement: SearchedPlacement | tuple[int, ...] | None = setting(
        None,
        'Placement of `auto`: in a loop, there and back ("v"), or the rank of each stage; left out, in a loop.',
        AT_LEAST_0,
    )
    overlap: bool = setting(
        True,
        "In fused pairs, one side computes while the other's collectives are in flight; false: one after the other.",
    )
    early_release: bool = setting(
        False,
        "In overlapped pairs, a layer's backward ends, and frees memory, before the forward's experts compute.",
    )
    split_backward: bool = setting(
        False, "In combined schedules, pairs hold the backward for inputs; the backward for weights follows."
    )
    early_gradients: bool = setting(True, "Send each input gradient upstream before the weight gradients are computed.")
    cut: tuple[int, ...] | str | None = setting(
        None,
        "Units of each stage, by hand, 0 for one between others that hands on what it gets; or a layout in Megatron's "
        'language, such as "Et|(tt|)*3,L". Left out, the cut with the fastest slowest rank.',
        AT_LEAST_0,
    )
    measure: bool = setting(
        False,
        "Measure the units' times before the cut instead of estimating them; `auto` searches an order for these times.",
    )
    search_cut: bool = setting(
        False, "Search for the cut and the order of `auto` together, for the shortest step by measured times."
    )

    def _check(self) -> None:
        if self.early_release and not self.overlap:
            raise ConfigError(
                "schedule.early_release = true changes the turns of overlapped pairs, but schedule.overlap = false; "
                "leave out one of them"
            )

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are neither None nor false, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}


# ---- Groups of parameters by name patterns, each with its own hyperparameters; the optimizers that files can name


Course = Callable[[int], float]
"""The value of a hyperparameter at each step, counted from 1."""


class OptimizerName(NamedValue):
    """An optimizer of `torch.optim`. AdamW runs as a fused kernel over flat buckets unless it has other arguments."""

    ADAMW = "adamw"
    ADADELTA = "adadelta"
    ADAFACTOR = "adafactor"
    ADAGRAD = "adagrad"
    ADAM = "adam"
    ADAMAX = "adamax"
    ASGD = "asgd"
    MUON = "muon"
    NADAM = "nadam"
    RADAM = "radam"
    RMSPROP = "rmsprop"
    RPROP = "rprop"
    SGD = "sgd"


class Division(NamedValue):
    """The finest parts of a model that an optimizer steps each by itself, as it would step them together."""

    ELEMENTS = "elements"
    PARAMETERS = "parameters"
    MODEL = "model"


@dataclass(frozen=True)
class Arguments(TableValue):
    """Further arguments of an optimizer's class, by name.

    >>> Arguments.read({"momentum": 0.9}).values
    {'momentum': 0.9}
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        return cls(dict(table))

    def table(self) -> dict[str, Any]:
        return dict(self.values)


_FORGETS = Bounds(least=0, below=1, otherwise="never forgets")


@dataclass(frozen=True)
class ParameterGroup(Settings, TableValue, section="optimizer.groups"):
    """Hyperparameters of the parameters whose full names match a pattern; what is left out is the optimizer's.

    A parameter belongs to the first group that matches it. In a pattern `*` stands for any text, dots included.

    >>> group = ParameterGroup("*.norm.*", weight_decay=0.0)
    >>> group.matches("layers.0.attention.norm.weight", num_dims=1), group.matches("head.weight", num_dims=2)
    (True, False)
    """

    #: matches full names, as `Engine.parameters` lists them
    pattern: str
    #: the peak of the optimizer's own course of the learning rate, or a course of the group's own; 0 keeps its weights
    learning_rate: float | Course | None = argument(None, AT_LEAST_0)
    weight_decay: float | Course | None = argument(None, AT_LEAST_0)
    beta1: float | None = argument(None, _FORGETS)
    beta2: float | None = argument(None, _FORGETS)
    #: True if only parameters of two dimensions or more belong to it
    matrices: bool = False
    #: True if its parameters are not trained
    frozen: bool = False
    #: another optimizer for the group
    name: OptimizerName | str | None = None
    #: further arguments of the optimizer
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def _check(self) -> None:
        found, name = match(OptimizerName | None, self.name)
        if not found:
            raise ConfigError(mismatch(f"{self.section}.name", self.name, OptimizerName | None))
        object.__setattr__(self, "name", name)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Self:
        known = [own.name for own in dataclasses.fields(cls)]
        if unknown := sorted(table.keys() - set(known)):
            raise ConfigError(f"optimizer.groups has no {unknown[0]!r}; possible are {', '.join(known)}")
        if "pattern" not in table:
            raise ConfigError('a table of optimizer.groups needs a pattern, such as "*.norm.*"')
        return cls(**cast(dict[str, Any], dict(table)))

    def table(self) -> dict[str, Any]:
        given = {own.name: getattr(self, own.name) for own in dataclasses.fields(self)}
        usual = ParameterGroup(self.pattern)
        changed = {key: value for key, value in given.items() if key == "pattern" or value != getattr(usual, key)}
        return {key: str(value) if callable(value) or key == "name" else value for key, value in changed.items()}

    def matches(self, name: str, num_dims: int) -> bool:
        """True for a parameter of the group, given by full name."""
        return fnmatchcase(name, self.pattern) and (num_dims >= 2 or not self.matrices)


# ---- Settings of the optimizer, with learning rate and weight decay as closed forms of the step number, counted from 1


class Decay(NamedValue):
    """The decay of the learning rate after its warm-up.

    >>> LearningRate(peak=0.4, decay="cosine", num_decay_steps=2).decay is Decay.COSINE
    True
    """

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"
    INVERSE_SQRT = "inverse-sqrt"


class Ramp(NamedValue):
    """The course of weight decay from its first value to its last."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


_SHARE = re.compile(r"\d{1,2}(\.\d+)?%")


@dataclass(frozen=True)
class LearningRate(Settings, section="optimizer"):
    """A linear rise from `initial` to `peak` over the warm-up, then a fall that ends at `floor`.

    With w warm-up steps and the fall ending at step n, step t in (w, n] has progress x = (t - w) / (n - w) and

        constant      peak
        linear        floor + (peak - floor) (1 - x)
        cosine        floor + (peak - floor) (1 + cos(pi x)) / 2
        inverse-sqrt  max(floor, peak sqrt(max(w, 1) / t)), for any t > w; it has no end

    After step n the linear and the cosine form stay at `floor`.

    Source: linear warm-up and inverse square root: arXiv 1706.03762, section 5.3. Cosine: arXiv 1608.03983, section 3
    (one cycle).

    >>> rate = LearningRate(peak=0.4, decay=Decay.LINEAR, num_warmup_steps=2, num_decay_steps=4)
    >>> [rate(step) for step in (1, 2, 3, 4, 5)]
    [0.2, 0.4, 0.2, 0.0, 0.0]
    """

    peak: float = setting(1e-3, "The highest learning rate.", ABOVE_0, key="learning_rate")
    decay: Decay = setting(Decay.CONSTANT, "Decay of the learning rate after the warm-up.")
    num_warmup_steps: int | str = setting(
        0, 'Steps over which the learning rate rises from zero, or their share of the run, such as "7%".', AT_LEAST_0
    )
    num_decay_steps: int | None = setting(
        None, "The step at which the decay ends; left out, the last step of the run.", AT_LEAST_1
    )
    #: The rate before the first step; not a setting of a run.
    initial: float = argument(0.0, AT_LEAST_0)
    floor: float = setting(0.0, "The learning rate at the end of the decay.", AT_LEAST_0, key="final_learning_rate")

    def _check(self) -> None:
        if self.floor > self.peak:
            raise ConfigError(
                f"optimizer.final_learning_rate = {self.floor} is above optimizer.learning_rate = {self.peak}; "
                "the rate can only fall"
            )
        if self.initial > self.peak:
            raise ConfigError(
                f"optimizer.initial = {self.initial} is above optimizer.learning_rate = {self.peak}; the rate can only "
                "rise in the warm-up"
            )
        end, warmup = self.num_decay_steps, self.num_warmup_steps
        if isinstance(warmup, str) and not _SHARE.fullmatch(warmup):
            raise ConfigError(
                f"optimizer.num_warmup_steps = {warmup!r} is no share of the run; give a number of steps, or a share "
                'below 100% such as "7%"'
            )
        if self.ends and end is not None and isinstance(warmup, int) and end < warmup:
            raise ConfigError(
                f"optimizer.num_decay_steps = {end} lies within its warm-up of {self.num_warmup_steps} steps; "
                f"{self.num_warmup_steps} or more are possible"
            )

    def warmup(self, num_steps: int) -> int:
        """The warm-up's steps of a run of `num_steps`; a share is rounded up, and never all of them."""
        own = self.num_warmup_steps
        return own if isinstance(own, int) else min(math.ceil(num_steps * Fraction(own[:-1]) / 100), num_steps - 1)

    @property
    def ends(self) -> bool:
        """True if the decay has an end."""
        return self.decay in (Decay.LINEAR, Decay.COSINE)

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` >= 1; that of step 0 is the value before the first.

        Raises:
            ConfigError: the decay has an end that is left out.
        """
        _check_step(step)
        warmup, end = self.num_warmup_steps, self.num_decay_steps
        if isinstance(warmup, str):
            raise ConfigError(f"optimizer.num_warmup_steps = {warmup!r} needs the length of a run; give steps")
        if self.ends and end is None:
            raise ConfigError(f"optimizer.decay = {self.decay} needs num_decay_steps, the step at which it ends")
        if step < warmup:
            return self.initial + (self.peak - self.initial) * step / warmup
        if self.decay is Decay.INVERSE_SQRT:
            first = max(warmup, 1)
            return max(self.floor, self.peak * math.sqrt(first / max(step, first)))
        if end is None or not self.ends:
            return self.peak
        progress = _progress(step, warmup, end)
        if self.decay is Decay.LINEAR:
            return self.floor + (self.peak - self.floor) * (1 - progress)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True)
class WeightDecay(Settings, section="optimizer"):
    """Weight decay that goes from `first` to `last` by step `num_steps`, and stays there.

    With progress x = t / num_steps at step t: linear first + (last - first) x; cosine
    first + (last - first) (1 - cos(pi x)) / 2. A constant form has `first` alone.

    >>> WeightDecay(0.0, 0.4, Ramp.LINEAR, num_steps=4)(1)
    0.1
    """

    first: float = setting(0.1, "Weight decay; norms and biases have none.", AT_LEAST_0, key="weight_decay")
    last: float | None = setting(
        None,
        "Final weight decay, reached by cosine over the run; left out, it is constant.",
        AT_LEAST_0,
        key="final_weight_decay",
    )
    #: The form; left out, cosine if there is a last value, else constant.
    ramp: Ramp | None = None
    #: The step at which the last value is reached.
    num_steps: int | None = argument(None, AT_LEAST_1)

    def _check(self) -> None:
        if self.ramp is Ramp.CONSTANT:
            if self.last not in (None, self.first):
                raise ConfigError(f"a constant weight decay of {self.first} cannot end at {self.last}")
        elif self.ramp is not None and None in (self.last, self.num_steps):
            raise ConfigError(f"a {self.ramp} weight decay needs its last value and the step of reaching it")

    def __call__(self, step: int) -> float:
        """Return the weight decay of step `step` >= 1.

        Raises:
            ConfigError: it changes, and the step of reaching its last value is left out.
        """
        _check_step(step)
        if self.last is None or self.ramp is Ramp.CONSTANT:
            return self.first
        if self.num_steps is None:
            raise ConfigError(f"optimizer.final_weight_decay = {self.last} needs num_steps, the step of reaching it")
        progress = _progress(step, 0, self.num_steps)
        if self.ramp is not Ramp.LINEAR:
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.first + (self.last - self.first) * progress


# The rates that are left out, told from equal ones by their identity.
_USUAL_RATE, _USUAL_DECAY = LearningRate(), WeightDecay()


@dataclass(frozen=True)
class OptimizerConfig(Settings, section="optimizer"):
    """The optimizer, its schedules and its groups of parameters.

    Norms and biases are never decayed, unless a group of theirs gives a weight decay. A number for the learning rate
    or the weight decay stands for a constant.

    >>> OptimizerConfig(name="sgd", arguments={"momentum": 0.9}).arguments.values
    {'momentum': 0.9}

    Source: arXiv 1711.05101, algorithm 2. Clipping: arXiv 1211.5063, section 3.2.

    >>> config = OptimizerConfig(LearningRate(3e-4, num_warmup_steps=10), weight_decay=WeightDecay(0.01))
    >>> config.learning_rate(5), config.weight_decay(5), config.clip_norm
    (0.00015, 0.01, 1.0)
    """

    #: with a `factory`: left out, or None, for the rates with which that makes its optimizer
    learning_rate: LearningRate | Course | float | None = _USUAL_RATE
    beta1: float = setting(0.9, "Decay of the mean of gradients (Adam's family).", _FORGETS)
    beta2: float = setting(0.95, "Decay of the mean of squared gradients (Adam's family).", _FORGETS)
    eps: float = setting(1e-8, "Added to the root of the mean of squared gradients (Adam's family).", ABOVE_0)
    #: with a `factory`: as `learning_rate`
    weight_decay: WeightDecay | Course | float | None = _USUAL_DECAY
    clip_norm: float = setting(1.0, "Gradients are clipped to this global norm; 0 for no clipping.", AT_LEAST_0)
    zero: bool = setting(
        False,
        "Data- and context-parallel ranks shard the optimizer's state and fp32 masters: each steps its shard, and the "
        "results are gathered (ZeRO-1).",
    )
    name: OptimizerName = setting(OptimizerName.ADAMW, "The optimizer, one of torch.optim.", is_newer=True)
    arguments: Arguments = setting(
        Arguments(), "Further arguments of the optimizer's class, such as momentum.", is_newer=True
    )
    groups: tuple[ParameterGroup, ...] = setting(
        (),
        "Parameters by name pattern with a learning rate, decay, betas or optimizer of their own, or frozen.",
        is_newer=True,
    )
    #: makes an optimizer of any class from torch's parameter groups, in place of `name`; not a setting of a run
    factory: Callable[[Any], Any] | None = None
    #: how the step of the factory's optimizer may be divided among ranks; None for its class's own attribute `divides`,
    #: what is known of a class of torch or torchao, or "parameters"; not a setting of a run
    divides: Division | None = None
    #: makes a scheduler of torch.optim.lr_scheduler from an optimizer; not a setting of a run
    scheduler: Callable[[Any], Any] | None = None

    @classmethod
    def of(cls, given: "OptimizerConfig | OptimizerName | str | Callable[[Any], Any]") -> "OptimizerConfig":
        """The settings as they are, of an optimizer's name, or of a factory alone: as it is made, and not clipped.

        Raises:
            ConfigError: it is none of these.
        """
        if isinstance(given, OptimizerConfig):
            return given
        if isinstance(given, str):
            return replace(cls(), name=given)
        if callable(given):
            return cls(factory=given, clip_norm=0.0)
        kind = type(given).__name__
        if hasattr(given, "param_groups"):
            raise ConfigError(
                f"optimizer is an instance of {kind}, but each rank makes one for the parameters "
                f"that it steps; give the class {kind}, or functools.partial of it with its arguments"
            )
        raise ConfigError(
            f"optimizer = {given!r} is not possible; give an OptimizerConfig, a name such as 'sgd', or a function that "
            "makes a torch.optim.Optimizer from parameter groups"
        )

    def _check(self) -> None:
        if self.factory is not None:
            # A factory makes its optimizer with rates of its own. Others that equal the usual ones are given.
            for rate, usual in (("learning_rate", _USUAL_RATE), ("weight_decay", _USUAL_DECAY)):
                if getattr(self, rate) is usual:
                    object.__setattr__(self, rate, None)
            if named := [group for group in self.groups if group.name is not None]:
                raise ConfigError(
                    f"optimizer.groups: {named[0].pattern!r} asks for {named[0].name}, but a factory makes the "
                    "optimizer of all groups; leave one of them out"
                )
        elif self.divides is not None:
            raise ConfigError("optimizer.divides describes the optimizer of a factory, and there is none")
        elif self.learning_rate is None or self.weight_decay is None:
            raise ConfigError("only an optimizer that a factory makes has a learning rate and a weight decay by itself")
        if self.scheduler is not None and isinstance(self.learning_rate, LearningRate):
            if self.learning_rate.decay is not Decay.CONSTANT or self.learning_rate.num_warmup_steps:
                raise ConfigError("the learning rate has a scheduler and a course of its own; only one can set it")
        elif self.scheduler is not None and self.learning_rate is not None:
            raise ConfigError("the learning rate has a scheduler and is a function of the step; only one can set it")

    def __post_init__(self) -> None:
        for name, schedule in (("learning_rate", LearningRate), ("weight_decay", WeightDecay)):
            if isinstance(getattr(self, name), int | float):
                object.__setattr__(self, name, schedule(getattr(self, name)))
        super().__post_init__()

    def num_decay_steps(self, num_steps: int) -> int | None:
        """The step of a run of `num_steps` at which its rates reach their ends; None if they are constant."""
        rate, decay = self.learning_rate, self.weight_decay
        ends = isinstance(rate, LearningRate) and rate.ends
        moves = ends or (isinstance(decay, WeightDecay) and decay.last is not None)
        own = rate.num_decay_steps if isinstance(rate, LearningRate) else None
        return (own or num_steps) if moves else None

    def over(self, num_steps: int) -> "OptimizerConfig":
        """The settings for a run of `num_steps`, which ends the rates whose own end is left out."""
        end = self.num_decay_steps(num_steps)
        rate, decay = self.learning_rate, self.weight_decay
        return replace(
            self,
            learning_rate=replace(rate, num_decay_steps=end, num_warmup_steps=rate.warmup(num_steps))
            if isinstance(rate, LearningRate)
            else rate,
            weight_decay=replace(decay, num_steps=end) if isinstance(decay, WeightDecay) else decay,
        )


def _check_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
        raise ConfigError(f"there is no rate of step {step!r}; steps are whole numbers from 0 on")


def _progress(step: int, first: int, last: int) -> float:
    return 1.0 if step >= last else (step - first) / (last - first)
