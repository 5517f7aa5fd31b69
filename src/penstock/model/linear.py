"""The linear layer: the libraries that multiply, copies of weights made for them, and deferred weight gradients.

Its autograd function computes the input gradient at once. While its owner defers, it queues (input, output gradient)
instead of multiplying them; `drain` multiplies later and adds to the parameter's gradient. Both ways compute the same
products in the same order, so gradients are equal bit for bit.

Shapes: T tokens (all leading dimensions together), I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.graph import GradientEdge

#: of a type of device, for each product; torch's own takes as long as a small operation
_has_autocast = cache(is_autocast_available)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes on the tensor's device; None where it is off, as on devices without it."""
    device = x.device.type
    if not _has_autocast(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def autocast_to(x: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """A context in which autocast computes in that dtype on the tensor's device; None turns it off."""
    device = x.device.type
    if not _has_autocast(device):
        return nullcontext()
    return torch.autocast(device, dtype or torch.get_autocast_dtype(device), dtype is not None)


def dtype_of_sums(x: Tensor) -> torch.dtype:
    """The dtype in which numbers like these are added up: fp32, or their own if it is wider."""
    return torch.float32 if x.dtype is torch.float32 else torch.promote_types(x.dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Weights and biases of one layer, or of several that read the same input, as one kind of product reads them."""

    product: Callable[[Tensor], Tensor]
    #: bytes of weights, scales and biases
    num_bytes: int
    #: False if a single row would be computed otherwise than one of several
    takes_one_row: bool = True

    @classmethod
    def of(
        cls, product: Callable[[Tensor], Tensor], *read: Tensor | None, takes_one_row: bool = True
    ) -> "PackedWeights":
        """The product that reads these tensors."""
        return cls(product, sum(t.nbytes for t in read if t is not None), takes_one_row)

    def output(self, x: Tensor) -> Tensor:
        """The outputs of all layers side by side [..., O], in the dtype of x; a row depends on that row of x alone."""
        if self.takes_one_row or x.shape[:-1].numel() != 1:
            return self.product(x)
        return self.product(x.reshape(1, -1).repeat(2, 1))[0].view(*x.shape[:-1], -1)


Pack = Callable[[Tensor, Tensor | None], PackedWeights | None]
"""Makes packed weights of weights [O, I] and biases [O]; None where they stay as they are."""


@dataclass(frozen=True)
class Matmul:
    """The matrix products of a linear layer and its gradients, as `nn.Linear` and autograd compute them, bit for bit.

    Gradients take and return matrices; `output` keeps the leading dimensions. A subclass computes them in another way.
    """

    def output(self, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x, weight_OI, bias_O)

    def input_gradient(self, grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
        return grad_TO @ weight_OI

    def weight_gradient(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor:
        return grad_TO.t() @ x_TI

    def packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedWeights | None:
        """Weights of layers that read the same input, in an order that is read faster with the same bits."""
        return None

    def is_torchs(self, x: Tensor) -> bool:
        """True where torch itself computes the products of this input and their gradients."""
        return True

    def has_apart_rows(self, weight_OI: Tensor) -> bool:
        """True if a row of the output has the same bits whatever other rows there are."""
        return False


TORCH = Matmul()


@dataclass(eq=False)
class WeightCasts:
    """Copies of an engine's weights in another dtype, or packed for its products, while no weight changes.

    In training a cast lives as long as the product that needs it. A pass over many microbatches in which no weight
    changes keeps the casts of its first microbatch. Only generation packs weights: it reads all of them for each token.
    """

    #: weight -> its cast; None outside of `kept`
    _kept: dict[Tensor, Tensor] | None = None
    #: the layers whose weights are packed now
    _packed: "list[Linear]" = field(default_factory=list)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within this context each weight is cast at most once, on first use; what is packed there ends with it.

        Contexts nest; the outermost one frees the memory of casts.
        """
        before = self._kept
        self._kept = {} if before is None else before
        try:
            yield
        finally:
            self.renew()
            self._kept = before

    def renew(self) -> None:
        """Drop all copies, because the weights have changed."""
        if self._kept is not None:
            self._kept = {}
        for layer in self._packed:
            layer.packed = None
        self._packed.clear()

    def pack(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Pack the weights that layers of the module multiply inputs of this dtype with, jointly where they may be.

        A layer that computes something else by now, such as an adapter, keeps its own.
        """
        for layers in [*_joint_layers(module), *((part,) for part in module.modules())]:
            if not all(_can_be_packed(layer, dtype) and (len(layers) == 1 or bare(layer)) for layer in layers):
                continue
            if (packed := layers[0].matmul.packed(*_joint_values(layers))) is not None:
                _put(packed, layers)
                self._packed += layers

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in that dtype; the weight itself if it has that dtype already."""
        if weight.dtype == dtype or self._kept is None:
            return weight.to(dtype)
        found = self._kept.get(weight)
        if found is None or found.dtype != dtype:
            found = weight.detach().to(dtype)
            if _stays(weight):
                self._kept[weight] = found
        return found


def _stays(weight: Tensor) -> bool:
    """False for a weight that is computed from parameters: each use has a new one, of which nothing is kept."""
    return isinstance(weight, nn.Parameter)


def share_casts(module: nn.Module, casts: WeightCasts) -> int:
    """Attach `casts` to every linear layer of the module; return their number."""
    found = [part for part in module.modules() if isinstance(part, Linear)]
    for part in found:
        part.casts = casts
    return len(found)


@dataclass(frozen=True, eq=False)
class PendingGradient:
    """The weight and bias gradient of one use of one linear layer, not computed yet; it holds both factors."""

    weight: Tensor | None
    bias: Tensor | None
    x_TI: Tensor
    grad_TO: Tensor
    matmul: Matmul

    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """This use's part of the weight's and the bias's gradient, in their dtypes; None for what is None."""
        weight = bias = None
        if self.weight is not None:
            weight = self.matmul.weight_gradient(self.grad_TO, self.x_TI).to(self.weight.dtype)
        if self.bias is not None:
            bias = self.grad_TO.sum(0).to(self.bias.dtype)
        return weight, bias

    def compute(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with this use's part of its gradient."""
        for parameter, part in zip((self.weight, self.bias), self.parts(), strict=True):
            if parameter is not None and part is not None:
                yield parameter, part


@dataclass(eq=False)
class WeightGradients:
    """Switches the linear layers of one stage between computing and deferring; the queues are on the tapes.

    A deferred gradient reaches its parameter through `drain`, not through autograd. That of a weight which is computed
    from parameters, of a parameter with hooks, or of one that something else reads too, is never deferred.
    """

    #: takes the gradients of the backward that runs now; None while nothing is deferred
    queue: list[PendingGradient] | None = None
    #: False while forwards run of which no backward defers: torch's own function, half as long in Python, serves then
    may_defer: bool = True
    #: layers' parameters that something else reads too, as the first graph of the stage has shown; None before it
    read_elsewhere: set[Tensor] | None = None

    def learn_uses(self, edges: Sequence[GradientEdge]) -> None:
        """Learn from a graph, given by its roots, which weights and biases something beside linear layers reads.

        Autograd adds up all uses of a parameter before it accumulates them; a deferred one would come after the others.
        """
        nodes: list[Any] = [edge.node for edge in edges]
        seen, of_layers, others = set(nodes), set[Tensor | None](), set[Tensor]()
        while nodes:
            node = nodes.pop()
            if is_linear := isinstance(getattr(node, "layer", None), Linear):
                of_layers.update(node.parameters)
            for child, _ in node.next_functions:
                if child is None:
                    continue
                if not is_linear and (parameter := getattr(child, "variable", None)) is not None:
                    others.add(parameter)
                if child not in seen:
                    seen.add(child)
                    nodes.append(child)
        # Others are also the microbatch's activations, which must not stay.
        self.read_elsewhere = others & of_layers

    @contextmanager
    def deferred_to(self, queue: list[PendingGradient]) -> Iterator[None]:
        """Within this context weight gradients are queued there instead of computed."""
        before, self.queue = self.queue, queue
        try:
            yield
        finally:
            self.queue = before

    @staticmethod
    @torch.no_grad()
    def drain(queue: list[PendingGradient]) -> None:
        """Compute the queued gradients, accumulate them in the parameters, and leave the queue empty.

        Several uses of one parameter are summed first, as autograd does.
        """
        num_uses: dict[Tensor, int] = {}
        for pending in queue:
            for parameter in (pending.weight, pending.bias):
                if parameter is not None:
                    num_uses[parameter] = num_uses.get(parameter, 0) + 1
        sums: dict[Tensor, Tensor] = {}
        queue.reverse()
        while queue:
            # Popped, so that both factors are freed as soon as their product is computed.
            for parameter, part in queue.pop().compute():
                sums[parameter] = sums[parameter].add_(part) if parameter in sums else part
                num_uses[parameter] -= 1
                if num_uses[parameter] == 0:
                    total = sums.pop(parameter)
                    if parameter.grad is None:
                        parameter.grad = total
                    else:
                        parameter.grad.add_(total)


@runtime_checkable
class Deferring(Protocol):
    """A module whose weight gradients its owner can defer."""

    gradients: WeightGradients | None


class _WithGradient(torch.autograd.Function):
    """Any operation, by its two functions; see `with_gradient`."""

    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Tensor:
        output, kept = forward(*inputs)
        ctx.save_for_backward(*kept)
        ctx.written = backward
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.written(grads[0], *ctx.saved_tensors)


with_gradient: Callable[..., Tensor] = _WithGradient.apply
"""Compute with a gradient that is written out: `with_gradient(forward, backward, *inputs)`, all inputs being tensors.

`forward(*inputs)` gives the output and the tensors to keep, `backward(grad, *kept)` the gradients of all inputs.
"""


class _LinearFunction(torch.autograd.Function):
    """y = x weight^T + bias, computed in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "Linear") -> Tensor:
        # A frozen layer needs no input for its backward.
        ctx.save_for_backward(x if weight.requires_grad or bias is not None else None, weight)
        # The layer's attributes may be others by the time of its backward.
        ctx.layer, ctx.parameters = layer, (weight, bias)
        ctx.x_in_columns = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == len(x)
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (grad,), (x, weight), layer = grads, ctx.saved_tensors, ctx.layer
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_TO = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if needs_x:
            weight = weight.to(grad_TO.dtype)
            if ctx.x_in_columns and layer.matmul is TORCH:
                # As autograd does: the gradient has the order of x.
                grad_x = (weight.t() @ grad_TO.t()).t()
            else:
                grad_x = layer.matmul.input_gradient(grad_TO, weight).view(*grad.shape[:-1], weight.shape[1])
        own, bias = ctx.parameters
        now = own if needs_weight else None, bias if needs_bias else None
        if layer.gradients is not None and (queue := layer.gradients.queue) is not None:
            apart = layer.gradients.read_elsewhere or ()
            can_wait = [None if one in apart else _if_it_can_wait(one, ctx, place) for place, one in enumerate(now, 1)]
            later = can_wait[0], can_wait[1]
            if later[0] is not None or later[1] is not None:
                # Detached, since a view could keep its base's graph.
                queue.append(PendingGradient(*later, x.detach().reshape(-1, x.shape[-1]), grad_TO, layer.matmul))
            now = now[0] if later[0] is None else None, now[1] if later[1] is None else None
        if now[0] is None and now[1] is None:
            return grad_x, None, None, None
        return grad_x, *PendingGradient(*now, x.reshape(-1, x.shape[-1]), grad_TO, layer.matmul).parts(), None


def _if_it_can_wait(tensor: Tensor | None, ctx: Any, place: int) -> Tensor | None:
    """That input of the function if this backward adds its gradient to the input's own, and nobody sees it; else None.

    Other gradients go the way of autograd: where the weight is computed from others, where a hook is to have its
    gradient, or where somebody asks for gradients within a backward.
    """
    if tensor is None or not tensor.is_leaf or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        return None
    try:
        return tensor if torch._C._will_engine_execute_node(ctx.next_functions[place][0]) else None
    except RuntimeError:
        # This tensor's gradient is itself what `torch.autograd.grad` was asked for.
        return None


class Linear(nn.Linear):
    """`nn.Linear` whose weight gradient its owner can defer, with a choice of the library that multiplies.

    The bits are the same with and without an owner, deferring or not; with `TORCH` (the default) they are those of
    `nn.Linear`. `defer` attaches the owner.
    """

    gradients: WeightGradients | None = None
    matmul: Matmul = TORCH
    casts: WeightCasts | None = None
    #: True for a layer whose inputs are of a wider dtype than its weights
    widens: bool = False
    #: read in place of weight and bias, and of those of neighbours with the same input; None where they are read
    packed: PackedWeights | None = None
    #: this layer's outputs among those
    among: slice = slice(0, 0)

    def __init__(self, in_features: int, out_features: int, bias: bool = False, matmul: Matmul = TORCH) -> None:
        super().__init__(in_features, out_features, bias)
        self.matmul = matmul

    @property
    def has_apart_rows(self) -> bool:
        """True if a row of the layer's output has the same bits whatever other rows there are."""
        return self.packed is not None or self.matmul.has_apart_rows(self.weight)

    def reset_parameters(self) -> None:
        """Keep the values as they are: `initialise` sets them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.output(x)[..., self.among]
        dtype, owner = autocast_dtype(x), self.gradients
        is_whole = owner is None or not owner.may_defer or not torch.is_grad_enabled()
        if is_whole and dtype is None and x.dtype == self.weight.dtype and self.matmul.is_torchs(x):
            return F.linear(x, self.weight, self.bias)
        if dtype is not None and torch.float64 not in (x.dtype, self.weight.dtype) and not x.is_complex():
            x = x.to(dtype)
        elif x.is_complex() or not (self.widens or x.dtype == self.weight.dtype):
            # Complex gradients are products with conjugates; and torch refuses another dtype than the weights'.
            return F.linear(x, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return self.product(x)
        if torch._C._are_functorch_transforms_active():
            # Gradients within `torch.func` and `torch.vmap` are not the step's.
            return F.linear(x, self.weight, self.bias)
        return _LinearFunction.apply(x, self.weight, self.bias, self)  # pyright: ignore[reportReturnType]

    def product(self, x: Tensor) -> Tensor:
        """The output in the dtype of x, keeping nothing for a backward."""
        weight = self.weight
        if weight.dtype is not x.dtype:
            weight = weight.to(x.dtype) if self.casts is None else self.casts.of(weight, x.dtype)
        return self.matmul.output(x, weight, None if self.bias is None else self.bias.to(x.dtype))


def joint_output(x: Tensor, layers: "tuple[Linear, ...]") -> Tensor | None:
    """The outputs [..., O] side by side of layers that read the same input, by one product of their packed weights.

    None where these are not packed together, or a hook watches one of them. The bits are those of separate products.
    """
    if (packed := getattr(layers[0], "packed", None)) is None:
        return None
    for layer in layers:
        if getattr(layer, "packed", None) is not packed or not bare(layer):
            return None
    return packed.output(x)


def outputs(x: Tensor, layers: "tuple[Linear, ...]") -> Sequence[Tensor]:
    """The output of each of the layers for the same input, computed by one product if their weights are packed."""
    joint = joint_output(x, layers)
    if joint is None:
        return [layer(x) for layer in layers]
    return joint.split_with_sizes([layer.out_features for layer in layers], -1)


def bare(module: nn.Module) -> bool:
    """True if a call of the module is one of its `forward`: no hook watches or changes it."""
    return not (module._forward_hooks or module._forward_pre_hooks or nn.modules.module._has_any_global_hook())


def _can_be_packed(layer: nn.Module, dtype: torch.dtype) -> bool:
    """True if the layer computes its product of parameters of this dtype, and nothing else."""
    if not (isinstance(layer, Linear) and not layer.widens and layer.packed is None and layer.casts is not None):
        return False
    has_own = "forward" in vars(layer) or "product" in vars(layer)
    is_plain = type(layer).forward is Linear.forward and type(layer).product is Linear.product and not has_own
    return is_plain and layer.weight.dtype is dtype and _stays(layer.weight)


def _joint_layers(module: nn.Module) -> "Iterator[list[Linear]]":
    """The layers of each joint product in the module, whose parts may name their layers by the input that they read."""
    for part in module.modules():
        for names in getattr(part, "joint_layers", ()):
            yield [getattr(part, name) for name in names]


def _joint_values(layers: "Sequence[Linear]") -> tuple[Tensor, Tensor | None]:
    """The weights [O, I] and biases [O] of layers that read the same input, one below the other."""
    weights = [layer.weight.detach() for layer in layers]
    biases = None
    if any(layer.bias is not None for layer in layers):
        biases = [w.new_zeros(len(w)) if own.bias is None else own.bias.detach() for own, w in zip(layers, weights)]
    if len(layers) == 1:
        return weights[0], None if biases is None else biases[0]
    return torch.cat(weights), None if biases is None else torch.cat(biases)


def _put(packed: PackedWeights, layers: "Sequence[Linear]") -> None:
    """Have layers read these weights in place of their own."""
    begin = 0
    for layer in layers:
        layer.packed, layer.among = packed, slice(begin, begin + layer.out_features)
        begin += layer.out_features


def fix_weights(module: nn.Module, pack_joint: Pack | None = None) -> int:
    """Put packed weights in the place of the parameters that joint products read; returns the number of layers.

    Parts of the module list their layers, by the input that they read, as `joint_layers`. pack_joint: left out, that of
    each layer's `Matmul`, which keeps the bits. Where it packs nothing, and in layers that no part lists, such as
    routers, parameters stay.
    """
    num_layers = 0
    for layers in _joint_layers(module):
        packed = (pack_joint or layers[0].matmul.packed)(*_joint_values(layers))
        if packed is None:
            continue
        _put(packed, layers)
        for layer in layers:
            layer.register_parameter("weight", None)
            layer.register_parameter("bias", None)
        num_layers += len(layers)
    return num_layers


def joint_weights(module: nn.Module) -> set[str]:
    """The names of the weights that `fix_weights` packs."""
    packed = {layer.weight for layers in _joint_layers(module) for layer in layers}
    return {name for name, own in module.named_parameters(remove_duplicate=False) if own in packed}


def switch_linears(module: nn.Module) -> int:
    """Turn every plain `nn.Linear` of a module into a `Linear` with the same parameters and bits; returns their number.

    Subclasses of `nn.Linear` stay as they are, because they may compute something else.
    """
    plain = [part for part in module.modules() if type(part) is nn.Linear]
    for part in plain:
        part.__class__ = Linear
    return len(plain)


def defer(module: nn.Module, gradients: WeightGradients) -> int:
    """Attach the owner to every part of the module that can defer; return the number of parts."""
    parts = [part for part in module.modules() if isinstance(part, Deferring)]
    for part in parts:
        part.gradients = gradients
    return len(parts)
