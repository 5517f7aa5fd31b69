"""Training by a plain loop: layer after layer, microbatch after microbatch, one backward each, one optimizer step.

`penstock.check` holds the engine's steps against it. Random numbers are seeded as the engine seeds them, the loss is
divided by the same formula, and one optimizer has all parameters; nothing else of a step is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.data import PackedBatch
from penstock.engine.build import build_unit
from penstock.engine.optimizer.groups import ParameterGroups, freeze
from penstock.engine.optimizer.optimizer import Optimizer
from penstock.engine.options import EngineOptions
from penstock.engine.sharding import Ties
from penstock.engine.training.loss import BoundLoss, LossFn, LossWeightFn, StepLoss, scalar_loss
from penstock.model import Given, Numbers, Randomness, Sequences, UnitSpec, kept_random_state
from penstock.parallel import GradientBuckets, sum_tied
from penstock.runtime import UnitCall


class PlainLoop:
    """The training of a user's own layers by a plain loop in one process."""

    #: the layers by name, in order
    modules: dict[str, nn.Module]
    #: parameters by full name
    parameters: dict[str, nn.Parameter]
    #: each microbatch's share of the last step's loss
    losses: list[Tensor]
    #: the gradients of the last step by full name, before clipping
    gradients: dict[str, Tensor]
    #: tensors with a gradient of the last loss that are no parameter of a layer
    strangers: list[Tensor]
    #: steps taken
    _num_steps: int
    #: the loss, and the seed and device of random numbers
    _loss: StepLoss
    seed: int
    _device: torch.device
    #: see `UnitSpec.to_output`
    _to_output: Callable[[Tensor], Any] | None
    #: layer -> what its `forward` asks for
    _calls: dict[str, UnitCall]
    #: what trained parameters were before buckets gave them other memory, by full name
    _memory: dict[str, Tensor]
    #: gradients, ties between parameters, and the optimizer of all
    _buckets: GradientBuckets
    _ties: Ties
    _optimizer: Optimizer

    def __init__(
        self,
        units: Sequence[UnitSpec],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        options: EngineOptions,
        device: torch.device,
    ) -> None:
        self._loss, self.seed, self._device = StepLoss(BoundLoss(loss_fn, loss_weight_fn)), options.seed, device
        self.losses, self.gradients, self.strangers, self._num_steps = [], {}, [], 0
        self.modules = {unit.name: build_unit(unit, options, self._device) for unit in units}
        self.parameters = {
            f"{name}.{key}": parameter
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }
        self._to_output = units[-1].to_output
        self._calls = {name: UnitCall(name, module, recompute=False) for name, module in self.modules.items()}
        self._ties = Ties.of(units, self.parameters, 1)
        parameter_groups = ParameterGroups(options.optimizer, self._ties.originals)
        for name, parameter in self.parameters.items():
            parameter_groups.division(name, parameter)  # refuses an optimizer that no engine steps
        freeze(self.parameters, parameter_groups)
        trained = {name: own for name, own in self.parameters.items() if own.requires_grad}
        self._memory = {name: own.data for name, own in trained.items() if name not in self._ties.originals}
        self._buckets = GradientBuckets(list(self.parameters.items()), group_of=parameter_groups.number)
        self._optimizer = Optimizer([self._buckets], parameter_groups, ties=self._ties.originals)

    def torn(self) -> list[tuple[str, str]]:
        """The full names of each trained parameter and another tensor, trained or not, in the memory that it had."""
        tensors = list(self._memory.items())
        for layer, module in self.modules.items():
            # After a step, as a hook may have given an attribute a new tensor.
            attributes = [(key, value) for part in module.modules() for key, value in vars(part).items()]
            for name, tensor in (*module.named_parameters(), *module.named_buffers(), *attributes):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.requires_grad:
                    tensors.append((f"{layer}.{name}", tensor))
        return [
            (name, other_name)
            for name, one in self._memory.items()
            for other_name, other in tensors
            if name != other_name
            and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and torch.isin(_elements(one), _elements(other)).any()
        ]

    def take_step(self, microbatches: Sequence[PackedBatch]) -> None:
        self._num_steps += 1
        self._buckets.zero_()
        self.losses = self.losses_of(microbatches, self._num_steps)
        gradients = self._buckets.gradients
        self.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        sum_tied(self._ties.tied, gradients, None)
        self._optimizer.step(self._num_steps)

    def losses_of(self, microbatches: Sequence[PackedBatch], step: int, training: bool = True) -> list[Tensor]:
        """Each microbatch's share of the loss of a step; in training their gradients are accumulated."""
        factor = 1.0 / sum(float(self._loss.bound.loss_weight_fn(microbatch)) for microbatch in microbatches)
        losses = list[Tensor]()
        parameters = list(self.parameters.values())
        for module in self.modules.values():
            module.train(training)
        with kept_random_state(self._device), torch.set_grad_enabled(training):
            for index, microbatch in enumerate(microbatches):
                numbers = Numbers(index, len(microbatches), step)
                loss = self._loss(self._output(microbatch, numbers, training), microbatch, numbers)
                loss = (scalar_loss(loss) if training else loss) * factor
                losses.append(loss.detach())
                if training:
                    self.strangers = [leaf for leaf in _leaves(loss) if not any(leaf is p for p in parameters)]
                    loss.backward()
        return losses

    def _output(self, microbatch: PackedBatch, numbers: Numbers, training: bool) -> Any:
        """The last layer's output for a microbatch. Raises: ValueError naming a key that the batch lacks."""
        sequences = Sequences.from_lengths(microbatch.sequence_lengths("tokens"), self._device)
        randomness = Randomness(self.seed, numbers.step - training, 0, numbers.microbatch, self._device)
        keys = {key: microbatch[key].to(self._device) for key in microbatch.keys}
        given, x = Given(keys, randomness, numbers._asdict()), keys["tokens"]
        for call in self._calls.values():
            call.lacks = call.lacking(microbatch.keys)
            x = call.run(x, sequences, given)
        return x if self._to_output is None else self._to_output(x)


def _elements(tensor: Tensor) -> Tensor:
    """The numbers of a tensor's elements in its storage."""
    numbers = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that get a gradient in the loss's backward."""
    seen, nodes = set[Any](), [loss.grad_fn]
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
