"""The findings of a check: where each way of computing first parts from a plain loop, and the usual causes."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.Enum):
    """A usual cause of a difference: a mistake in a user's own part, and what to do instead."""

    CHANCE = (
        "two plain loops do not have this in common: random numbers of another source than torch's generators (which "
        "are seeded for each layer, microbatch and step), the time, or a value of a class or module that one loop "
        "leaves for the next"
    )
    ELSEWHERE = (
        "a layer or the loss reaches a parameter without holding it, by an attribute, a closure or a global name, "
        "so that in its stage nobody trains it; assign it (self.weight = other.weight), which ties it, or hand on "
        "what is computed with it as an output"
    )
    SHARED = (
        "a trained parameter shares memory with another tensor, as a view or by .data; an engine moves what it trains, "
        "so that a step of one is not seen in the other; let both layers hold the parameter itself (self.weight = "
        "other.weight), which ties it"
    )
    UNTRAINED = (
        "a layer or the loss reaches a parameter, or another tensor that requires a gradient, which no layer holds, so "
        "that nobody trains it; let a layer hold it as a parameter (a loss's the last layer, which gives it beside its "
        "output), or freeze it (requires_grad_(False))"
    )
    LEFT_BEHIND = (
        "a layer leaves something for a layer of another stage, or for the loss, in an object that both reach; in "
        "stages another microbatch's, or nothing, is there; hand it on as an output, (x, more)"
    )
    CALLS = (
        "a layer or the loss looks at how often, or in which order, it was called; it can ask for microbatch, "
        "num_microbatches and step by name"
    )
    UNDECLARED = (
        "a layer or the loss keeps something from step to step in an attribute, which no checkpoint holds; state is "
        "parameters, buffers (register_buffer) and get_extra_state"
    )
    REPLAYED = (
        "a layer is no function of its input, parameters, buffers and torch's random numbers, so that computing it "
        "again gives something else: it counts its calls, draws from a generator of its own, or changes its input in "
        "place; leave it out of recompute, or make it one"
    )
    JOINT = (
        "the optimizer joins parameters in its step, as a norm over all of them does, or random numbers that it draws "
        "in their order, so that ranks step otherwise; declare it by divides = 'model', which keeps it to one rank"
    )
    OPTIMIZER_STATE = (
        "the optimizer keeps something outside of state_dict(), which alone a checkpoint holds; put it into "
        "self.state[parameter] or the parameter groups"
    )
    NO_SUM = (
        "the loss, or its weight, is no sum over tokens or examples: a mean of each microbatch, or something that "
        "looks at all of it; loss_fn gives a sum and loss_weight_fn counts, and one mean is made of both"
    )
    MIXED = (
        "a layer mixes rows of different sequences of a microbatch, so that an answer depends on what else is in it; "
        "sequences.lengths says where each begins"
    )
    IN_PLACE = (
        "a tensor is changed in place that somebody else reads: a layer's input, a part of the batch, a parameter or "
        "its gradient; change a copy (clone())"
    )
    REFUSED = "the engine says itself what is wrong"

    @property
    def text(self) -> str:
        """The cause and what to do, in a sentence."""
        return self.value


class Way(enum.Enum):
    """A way of computing the steps, which is compared with the plain loop."""

    AGAIN = "a second plain loop"
    STAGES = "in stages"
    APART = "in a stage for each layer"
    RESUMED = "after a save and load"
    RECOMPUTED = "under activation checkpointing"
    SPLIT = "with another number of microbatches"
    SUMS = "by the sums over microbatches"


@dataclass(frozen=True)
class Difference:
    """The first difference between one way and the plain loop."""

    #: the way that differs
    way: Way
    #: step, counted from 1, and microbatch, counted from 0; None if the microbatch is not known
    step: int
    microbatch: int | None
    #: the quantity that differs, in words such as "the gradient of layers.2.weight differs"
    what: str
    #: both values in a few words, or the engine's own error
    values: str
    #: usual causes, the likeliest first
    causes: tuple[Cause, ...]

    def __str__(self) -> str:
        place = f"step {self.step}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")
        return f"{place}, {self.way.value}: {self.what} ({self.values})"


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    >>> layers = [torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)]
    >>> batch = PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 6, 4)])
    >>> report = check(layers, batch)
    >>> report.is_equal, report.first
    (True, None)
    """

    #: the first difference of each way that differs from the plain loop
    differences: tuple[Difference, ...]
    #: the comparison, in words
    compared: str

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference; None if there is none."""
        return self.differences[0] if self.differences else None

    def raise_if_different(self) -> None:
        """Raise if anything differs, as a test does. Raises: AssertionError with the report."""
        if self.differences:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        if self.first is None:
            return f"equal, bit for bit: {self.compared}"
        lines = [str(self.first)]
        causes = () if Cause.REFUSED in self.first.causes else self.first.causes
        for i, cause in enumerate(causes):
            lines.append(f"  {'or' if i else 'usual cause'}: {cause.text}")
        lines += map(str, self.differences[1:])
        return "\n".join(lines)
