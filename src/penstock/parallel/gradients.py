"""One stage's gradients: accumulated in flat buckets, and summed over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.parallel.buckets import (
    CAP_BYTES,
    Bucket,
    GroupOf,
    Place,
    Reduction,
    fill_buckets,
    is_16_bit,
    make_bucket,
    unplaced,
)
from penstock.parallel.collectives import Collectives, Handle, Observer


class GradientBuckets:
    """Owner of one stage's flat parameters and gradients; gradients accumulate in at least fp32, summed over ranks.

    `parameters` are (full name, parameter) pairs; those that require no gradient are left alone. From now on a
    parameter's data is a view of flat storage with its values, and `parameter.main_grad` the view in which its gradient
    accumulates. For fp32 and fp64 parameters `parameter.grad` is that same view. For 16-bit ones each backward adds
    into it and drops `parameter.grad`. A parameter that no backward reaches has the gradient zero.

    Parameters fill buckets in the order given, up to `cap_bytes` of gradients each; a larger one has a bucket of its
    own. A bucket never mixes types, devices, reductions or parameter groups, which `group_of` numbers (left out, norms
    and biases, of one dimension, are set apart). `reductions` are by full name; the other gradients are summed over
    `group`.

    A step is ``zero_(); backward passes; launch(); ...; wait()``. `zero_` also cleans up after a step that failed
    anywhere in between. If ranks share the step (ZeRO-1), `gather` follows it, and `settle` before parameters are read.

    `observer` sees each reduction that is launched.

    Raises: ValueError for a name or a parameter given twice.
    """

    #: flat parameters and gradients, in the order in which their reductions are launched
    buckets: tuple[Bucket, ...]
    #: sees every collective
    _observer: Observer | None
    #: the reductions that `launch` has started
    _pending: list[Handle[Tensor]]
    #: the parameters that `gather` has started to collect
    _gathering: list[Handle[Tensor]]
    #: full name -> the parameter's gradient, a view of its bucket
    _gradients: dict[str, Tensor]
    #: the parameters' hooks, which `close` removes
    _hooks: list[RemovableHandle]

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        cap_bytes: int = CAP_BYTES,
        reductions: Mapping[str, Reduction] | None = None,
        observer: Observer | None = None,
        group_of: GroupOf | None = None,
    ) -> None:
        _check_distinct(parameters)
        self._observer = observer
        self._pending, self._gathering = [], []
        trained = unplaced(parameters, group, reductions or {}, group_of)
        self.buckets = tuple(make_bucket(entries) for entries in fill_buckets(trained, cap_bytes))
        self._gradients = {
            name: view for bucket in self.buckets for name, view in bucket.views(bucket.gradients).items()
        }
        self._hooks = []
        for place in self.places:
            view = self._gradients[place.name]
            place.parameter.main_grad = view  # type: ignore[attr-defined]
            hook = _add_and_drop if is_16_bit(place.parameter) else _keep_in_view
            self._hooks.append(place.parameter.register_post_accumulate_grad_hook(hook))
        self.zero_()

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """All gradients by full name, as views."""
        return self._gradients

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All parameters by full name."""
        return {place.name: place.parameter for place in self.places}

    def gradient(self, name: str) -> Tensor:
        """One parameter's gradient as a view: fp32, or fp64 for an fp64 parameter."""
        return self._gradients[name]

    def zero_(self) -> None:
        """Set all gradients to zero, reattach them where they were removed, and forget an unfinished step."""
        # A reduction that was launched before a failure may still write into the buckets.
        self.wait()
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for place in self.places:
            place.parameter.grad = None if is_16_bit(place.parameter) else self._gradients[place.name]

    def launch(self) -> None:
        """Start summing every bucket over its group, in one fixed order; no backward may follow before `wait`.

        Gradients that several ranks have each computed in part are summed before this returns; they are small.
        """
        assert not self._pending, "launched twice without a wait"
        for bucket in self.buckets:
            self._sum_parts(bucket)
        for bucket in self.buckets:
            if bucket.reduction.group is not None:
                collectives = Collectives(bucket.reduction.group, self._observer)
                if bucket.reduction.owner is not None:
                    self._pending.append(collectives.sum_gradients_at(bucket.gradients, bucket.reduction.owner))
                    continue
                launch = collectives.sum_owned_gradients if bucket.reduction.sharded else collectives.sum_gradients
                self._pending.append(launch(bucket.gradients))

    def _sum_parts(self, bucket: Bucket) -> None:
        """Sum a bucket's gradients over the ranks that have each computed a part of them."""
        reduction = bucket.reduction
        if reduction.among is None:
            return
        collectives = Collectives(reduction.among, self._observer)
        if reduction.num_parts == 1:
            collectives.sum_gradients(bucket.gradients).wait()
            return
        # One row for each part, zero on ranks with other parts: one sum over all ranks needs no groups of a few.
        rows = bucket.gradients.new_zeros(reduction.num_parts, bucket.gradients.numel())
        rows[reduction.part] = bucket.gradients
        collectives.sum_gradients(rows).wait()
        bucket.gradients.copy_(rows[reduction.part])

    def wait(self) -> None:
        """Wait for the reductions that `launch` started (on a GPU: order the current stream after them)."""
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()

    def forget(self) -> None:
        """Drop reductions that were cut; `zero_` does the rest."""
        pending, self._pending, self._gathering = self._pending, [], []
        for handle in pending:
            with contextlib.suppress(RuntimeError):
                handle.wait()

    def gather(self) -> None:
        """Start to give every rank the parameters that others have stepped; they may be read after `settle`."""
        self.settle()
        for bucket in self.buckets:
            reduction = bucket.reduction
            if not reduction.sharded or reduction.group is None or reduction.lent:
                continue
            collectives = Collectives(reduction.group, self._observer)
            if reduction.owner is None:
                self._gathering.append(collectives.gather_owned(bucket.parameters))
            else:
                self._gathering.append(collectives.spread_from(bucket.parameters, reduction.owner))

    def settle(self) -> None:
        """Wait for what `gather` started; costs nothing if nothing is in flight."""
        gathering, self._gathering = self._gathering, []
        for handle in gathering:
            handle.wait()

    @property
    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients' elements that this rank steps, by full name, as flat views; absent where it steps none."""
        return {
            place.name: place.view(bucket.gradients[bucket.owned])
            for bucket in self.buckets
            for place in bucket.owned_places
        }

    def close(self) -> None:
        """Remove hooks and gradients from the parameters, which keep their values and their storage."""
        self.wait()
        self.settle()
        for hook in self._hooks:
            hook.remove()
        for place in self.places:
            place.parameter.grad = None
            del place.parameter.main_grad  # type: ignore[attr-defined]

    @property
    def places(self) -> list[Place]:
        """All parameters, in the order of the buckets."""
        return [place for bucket in self.buckets for place in bucket.places]


def sum_tied(ties: Mapping[str, str], gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all copies of every tied parameter the sum of their gradients, once.

    ties: full name of the copy -> full name of the owner; an owner's copies are on one rank. gradients: this rank's, by
    full name, reduced over dp. group: the two ranks that hold the owner and its copies, used for a tie of which this
    rank holds only one side. All ranks that hold a side call it. Copies are added up first, so that there are two
    summands, and the result is bitwise the same wherever the two sides are.
    """
    for owner in sorted(set(ties.values())):
        copies = [gradients[name] for name, of in sorted(ties.items()) if of == owner and name in gradients]
        for other in copies[1:]:
            copies[0].add_(other)
        if copies and owner in gradients:
            copies[0].add_(gradients[owner])
            gradients[owner].copy_(copies[0])
        elif copies or owner in gradients:
            assert group is not None, f"{owner} is tied, and no group joins the ranks that hold it and its copies"
            dist.all_reduce(copies[0] if copies else gradients[owner], group=group)
        for other in copies[1:]:
            other.copy_(copies[0])


def _check_distinct(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    names: set[str] = set()
    seen: dict[int, str] = {}
    for name, parameter in parameters:
        if name in names:
            raise ValueError(f"two parameters of one stage have the name {name!r}")
        if id(parameter) in seen:
            raise ValueError(f"{name!r} and {seen[id(parameter)]!r} are one parameter; give it once, or tie two copies")
        names.add(name)
        seen[id(parameter)] = name


def _add_and_drop(parameter: Tensor) -> None:
    if parameter.grad is not None:  # None if a linear layer's weight gradient waits for W
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _keep_in_view(parameter: Tensor) -> None:
    # Autograd has accumulated in place, unless the view was removed: then the gradient is a tensor of its own.
    view = parameter.main_grad  # type: ignore[attr-defined]
    if parameter.grad is not view:
        view.add_(parameter.grad)
        parameter.grad = view
