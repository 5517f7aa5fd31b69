"""What the stages keep of a microbatch for its backward, in bytes, by running them on tensors without data.

Shapes: T tokens of the microbatch, D hidden size.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock import schedule
from penstock.engine.build import recomputes
from penstock.engine.options import EngineOptions, Precision
from penstock.model import Sequences, UnitSpec, WeightGradients, cross_entropy_sum, defer
from penstock.runtime import Boundary, Stage, Tape, drain
from penstock.runtime.tape import Segment


@dataclass(frozen=True)
class KeptBytes:
    """What a stage keeps of one microbatch: `whole` from its F to its I or B, `for_weights` from I to W.

    With recompute the latter may be more: what W needs has been computed again by then.
    """

    whole: int
    for_weights: int


def costs_of_memory(kept: Sequence[KeptBytes], lengths: Sequence[float] = ()) -> schedule.Costs:
    """The costs with which a simulation tells the bytes of live tapes, given every stage's; all times are 1.

    `lengths` has a factor on the bytes for each microbatch, where they differ.
    """
    return schedule.Costs(
        microbatch_bytes=[stage.whole for stage in kept],
        weight_memory_share=[stage.for_weights / stage.whole if stage.whole else 0.0 for stage in kept],
        lengths=lengths,
    )


def kept_bytes(
    units: Sequence[UnitSpec], hidden_size: int, cut: Sequence[range], options: EngineOptions, lengths: Sequence[int]
) -> list[KeptBytes]:
    """What each stage of a cut keeps of a microbatch with sequences of these lengths; nothing is computed.

    The last stage's output goes into a cross entropy. What parameters hold is not counted, nor what the units share
    with each other twice.
    """
    boundary = Boundary(hidden_size, options.precision.parameter_dtype)
    found = []
    with FakeTensorMode(), _default_dtype(boundary.dtype):
        sequences = Sequences.from_lengths(lengths, torch.device("cpu"))
        for number, members in enumerate(cut):
            x = torch.zeros(boundary.shape(sequences.num_tokens), dtype=boundary.dtype)
            if number == 0:
                x = torch.zeros(sequences.num_tokens, dtype=torch.int64)
            stage = _stage(number, [units[i] for i in members], boundary, options)
            found.append(_kept_of_stage(stage, x, sequences, is_last=number == len(cut) - 1))
    return found


def _stage(number: int, units: Sequence[UnitSpec], boundary: Boundary, options: EngineOptions) -> Stage:
    owner = WeightGradients()
    modules = [(unit.name, unit.build()) for unit in units]
    for _, module in modules:
        defer(module, owner)
    under_autocast = options.precision is Precision.BF16_AUTOCAST
    return Stage(
        number,
        modules,
        boundary,
        owner,
        autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=under_autocast),
        recompute=frozenset(unit.name for unit in units if recomputes(unit.name, options)),
    )


def _kept_of_stage(stage: Stage, x: Tensor, sequences: Sequences, *, is_last: bool) -> KeptBytes:
    def finish(output: Tensor) -> Tensor:
        labels = torch.zeros(sequences.num_tokens, dtype=torch.int64)
        return cross_entropy_sum(output, labels) if is_last else output

    tape, parameters = Tape(), [parameter for _, parameter in stage.named_parameters()]
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = drain(stage.forward(tape, x, sequences, finish if is_last else None))
    leaves = [entry.leaf for entry in tape.segments if isinstance(entry, Segment) and entry.leaf is not None]
    whole = bytes_of(saved + leaves, parameters)
    saved.clear()
    drain(stage.backward(tape, None if is_last else torch.zeros_like(output), split=True))
    factors = [factor for pending in tape.weight_gradients for factor in (pending.x_TI, pending.grad_TO)]
    return KeptBytes(whole, bytes_of(factors, parameters))


def bytes_of(tensors: Iterable[Tensor], parameters: Iterable[Tensor]) -> int:
    """The bytes that tensors hold, each storage counted once and those of parameters never."""
    not_counted = {parameter.untyped_storage()._cdata for parameter in parameters}
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in not_counted)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Modules are built in the run's dtype: those without data can not be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
