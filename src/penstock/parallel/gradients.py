"""One stage's gradients in flat buckets, and their sums over ranks.

Every parameter is a view of a bucket's flat tensor and so is its gradient, at the same offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from penstock.parallel.buckets import CAP_BYTES, Bucket, Place, Reduction, fill, is_16_bit, make_bucket, members_of
from penstock.parallel.launched import Follow, Launched, launch_gather, launch_own_sum, launch_sum


class GradientBuckets:
    """Owner of one stage's flat parameters and gradients; gradients accumulate in at least fp32, summed over ranks.

    `parameters` are (full name, parameter) pairs; those that require no gradient are left alone. From here on a
    parameter's data is a view of flat storage with its values, and `parameter.main_grad` the view its gradient
    accumulates in. For fp32 and fp64 parameters `parameter.grad` is that same view. For 16-bit ones each backward
    adds into it and drops `parameter.grad`. A parameter that no backward reaches has the gradient zero.

    Parameters fill buckets in the order given, up to `cap_bytes` of gradients each; a larger one has a bucket of its
    own. One bucket never mixes types, devices, reductions, or parameters with weight decay and without (those of one
    dimension: norms and biases). `reductions` are by full name; other gradients are summed over `group`.

    A step is ``zero_(); backward passes; launch(); ...; wait()``. `zero_` also clears up after a step that failed
    anywhere in between. Where the step is shared out, `gather` follows it, and `settle` before parameters are read.

    `follow` is told of each reduction that has been launched, and gives what is to be waited for in its place.

    Raises: ValueError for a name or a parameter given twice.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        cap_bytes: int = CAP_BYTES,
        reductions: Mapping[str, Reduction] | None = None,
        follow: Follow | None = None,
    ) -> None:
        _check_distinct(parameters)
        self._follow = follow
        self._pending: list[Launched] = []
        self._gathering: list[Launched] = []
        trained = members_of(parameters, group, reductions or {})
        self.buckets: tuple[Bucket, ...] = tuple(make_bucket(members) for members in fill(trained, cap_bytes))
        self._gradients = {
            name: view for bucket in self.buckets for name, view in bucket.views(bucket.gradients).items()
        }
        self._hooks = []
        for place in self._places():
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
        return {place.name: place.parameter for place in self._places()}

    def gradient(self, name: str) -> Tensor:
        """Give one parameter's gradient as a view: fp32, or fp64 for an fp64 parameter."""
        return self._gradients[name]

    def zero_(self) -> None:
        """Set all gradients to zero, attach them again where someone took them off, and forget an unfinished step."""
        # A reduction that was launched before a failure may still write into the buckets.
        self.wait()
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for place in self._places():
            place.parameter.grad = None if is_16_bit(place.parameter) else self._gradients[place.name]

    def launch(self) -> None:
        """Start summing every bucket over its group, in one fixed order; no backward may follow before `wait`.

        What several ranks have computed in part is summed among them before this returns: it is little.
        """
        assert not self._pending, "launched twice without a wait"
        for bucket in self.buckets:
            self._sum_parts(bucket)
        for bucket in self.buckets:
            if bucket.reduction.group is not None:
                launch = launch_own_sum if bucket.reduction.sharded else launch_sum
                self._pending.append(launch(bucket.gradients, bucket.reduction.group, self._follow))

    def _sum_parts(self, bucket: Bucket) -> None:
        """Sum a bucket's gradients over the ranks that have computed a part each of the same parameters."""
        reduction = bucket.reduction
        if reduction.among is None:
            return
        if reduction.num_parts == 1:
            launch_sum(bucket.gradients, reduction.among, self._follow).wait()
            return
        # A row for each part, zeros in those of others: one sum over all ranks, and no group for every few of them.
        rows = bucket.gradients.new_zeros(reduction.num_parts, bucket.gradients.numel())
        rows[reduction.part] = bucket.gradients
        launch_sum(rows, reduction.among, self._follow).wait()
        bucket.gradients.copy_(rows[reduction.part])

    def wait(self) -> None:
        """Wait for what `launch` started (on a GPU: order the current stream after it)."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()

    def gather(self) -> None:
        """Start giving every rank the parameters that others have stepped; they may be read after `settle`."""
        self.settle()
        for bucket in self.buckets:
            reduction = bucket.reduction
            if reduction.num_owners > 1 and reduction.group is not None and not reduction.lent:
                self._gathering.append(launch_gather(bucket.parameters, reduction.group, self._follow))

    def settle(self) -> None:
        """Wait for what `gather` started; costs nothing where nothing is under way."""
        gathering, self._gathering = self._gathering, []
        for work in gathering:
            work.wait()

    @property
    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients' elements that this rank steps, by full name: flat views, none where it owns none of them."""
        return {
            fragment.name: fragment.view(bucket.gradients[bucket.owned])
            for bucket in self.buckets
            for fragment in bucket.fragments
        }

    def close(self) -> None:
        """Take the hooks off the parameters, which keep their values and their storage."""
        for hook in self._hooks:
            hook.remove()

    def _places(self) -> Iterator[Place]:
        return (place for bucket in self.buckets for place in bucket.places)


def sum_tied(ties: Mapping[str, str], gradients: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Give all copies of every tied parameter the sum of their gradients, once.

    ties: full name of the copy -> full name of the owner; an owner's copies lie together. gradients: this rank's, by
    full name, reduced over dp. group: the two ranks that hold the owner and its copies, used for a tie of which this
    rank holds one side alone. Called by all ranks that hold one. Copies are added up first, so that there are two
    summands, and the result is bitwise the same wherever both sides lie.
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
            raise ValueError(f"two parameters of one stage bear the name {name!r}")
        if id(parameter) in seen:
            raise ValueError(f"{name!r} and {seen[id(parameter)]!r} are one parameter; give it once, or tie two copies")
        names.add(name)
        seen[id(parameter)] = name


def _add_and_drop(parameter: Tensor) -> None:
    if parameter.grad is not None:  # none is brought where a linear layer's waits for W
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _keep_in_view(parameter: Tensor) -> None:
    # Autograd has accumulated in place, unless someone took the view off: then what it left is a tensor of its own.
    view = parameter.main_grad  # type: ignore[attr-defined]
    if parameter.grad is not view:
        view.add_(parameter.grad)
        parameter.grad = view
