"""Random numbers of units in training, such as dropout's.

They depend on the run's seed, the step, the microbatch and the unit alone: not on the cut into stages, the schedule, or
on anything that draws numbers in between. So every layout drops the same activations, activation checkpointing drops
them again, and a resumed run goes on as if it had never stopped.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Randomness:
    """The random numbers of one microbatch of a step; each unit draws from a seed of its own."""

    #: the run's seed
    seed: int
    #: optimizer steps taken before this one
    step: int
    #: the data- and context-parallel place whose microbatch it is
    place: int
    microbatch: int
    device: torch.device

    def unit_seed(self, unit: str) -> int:
        """The seed from which the unit of that name draws."""
        text = f"{self.seed}/{self.step}/{self.place}/{self.microbatch}/{unit}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def begin(self, unit: str) -> None:
        """Set torch's generators to the unit's seed."""
        value = self.unit_seed(unit)
        for generator in _generators(self.device):
            generator.manual_seed(value)


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Leave torch's generators, at the end of this context, as they were at its beginning."""
    states = [(generator, generator.get_state()) for generator in _generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """The generators from which a layer on that device may draw."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
