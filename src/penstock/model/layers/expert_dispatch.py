"""Dispatch of tokens to their experts and back: sorted by expert, and between ranks by unequal all-to-alls.

Shapes: T tokens, D hidden size, K active experts, N = T K rows (a token's copies, one for each of its experts), E
experts, R ranks of the expert-parallel group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from penstock.model.lanes import Lane
from penstock.model.layers.grouped_linear import RowGroups
from penstock.model.layers.router import Choice
from penstock.model.segments import State, Undo
from penstock.parallel.collectives import Collectives, Handle


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The rows of a microbatch sorted by expert, those of one expert in the order of their tokens."""

    #: row -> its token
    token_of_row_N: Tensor
    #: (token, number of its choice) -> row
    row_of_slot_TK: Tensor

    @classmethod
    def of(cls, experts_TK: Tensor) -> "RowOrder":
        slots_N = experts_TK.flatten().sort(stable=True).indices
        row_of_slot = torch.empty_like(slots_N)
        row_of_slot[slots_N] = torch.arange(len(slots_N), device=slots_N.device)
        return cls(slots_N // experts_TK.shape[1], row_of_slot.view_as(experts_TK))


class _RowsOfTokens(torch.autograd.Function):
    """Tokens [T, D] -> rows [N, D]; a token's gradient is the sum of its rows', in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return h_TD.index_select(0, order.token_of_row_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum_of_rows(grads[0], ctx.order.row_of_slot_TK, None), None


class _Gather(torch.autograd.Function):
    """Base [T, D] + the sum of each token's rows times its weights."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, base_TD: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(rows_ND, weights_TK)
        ctx.order, ctx.base_dtype = order, base_TD.dtype
        return _sum_of_rows(rows_ND, order.row_of_slot_TK, weights_TK).to(base_TD.dtype).add_(base_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (grad_TD,), (rows_ND, weights_TK), order = grads, ctx.saved_tensors, ctx.order
        weights_N = torch.empty_like(weights_TK.flatten())
        weights_N[order.row_of_slot_TK.flatten()] = weights_TK.flatten()
        of_rows_ND = grad_TD.index_select(0, order.token_of_row_N)
        products_N = torch.linalg.vecdot(of_rows_ND.to(weights_TK.dtype), rows_ND.to(weights_TK.dtype))
        grad_weights_TK = products_N[order.row_of_slot_TK]
        grad_rows_ND = of_rows_ND.mul_(weights_N[:, None]).to(rows_ND.dtype)
        return grad_rows_ND, grad_weights_TK, grad_TD, None


def _sum_of_rows(rows_ND: Tensor, row_of_slot_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The sum of each token's rows in the order of its choices, weighted if there are weights; in at least fp32."""
    dtype = torch.promote_types(rows_ND.dtype, torch.float32)
    total_TD = None
    for k in range(row_of_slot_TK.shape[1]):
        part_TD = rows_ND.index_select(0, row_of_slot_TK[:, k]).to(dtype)
        if weights_TK is None:
            total_TD = part_TD if total_TD is None else total_TD.add_(part_TD)
        elif total_TD is None:
            total_TD = part_TD.mul_(weights_TK[:, k : k + 1])
        else:
            total_TD.addcmul_(part_TD, weights_TK[:, k : k + 1])
    assert total_TD is not None
    return total_TD.to(rows_ND.dtype) if weights_TK is None else total_TD


def spread(h_TD: Tensor, order: RowOrder) -> Tensor:
    """One row for each pair of a token and an expert that it goes to [N, D], sorted by expert."""
    return _RowsOfTokens.apply(h_TD, order)  # pyright: ignore[reportReturnType]


def gather(rows_ND: Tensor, weights_TK: Tensor, base_TD: Tensor, order: RowOrder) -> Tensor:
    """The base plus the weighted sum of each token's rows [T, D], summed in fp32, returned in the base's dtype."""
    return _Gather.apply(rows_ND, weights_TK, base_TD, order)  # pyright: ignore[reportReturnType]


class _Arrange(torch.autograd.Function):
    """Rows in another order; `back` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, there_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.there_N, ctx.back_N = there_N, back_N
        return rows_ND.index_select(0, there_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.back_N), None, None


@dataclass(frozen=True, eq=False)
class ArrivedRows:
    """The rows of this rank's experts, as received: rank after rank, each rank's rows sorted by expert."""

    groups: RowGroups
    #: rank -> number of rows sent to it, and received from it
    sent: tuple[int, ...]
    received: tuple[int, ...]
    #: permutation that sorts received rows by expert, and its inverse
    by_expert_N: Tensor
    by_rank_N: Tensor

    @classmethod
    def of(
        cls, sent_counts_E: Tensor, received_counts_RE: Tensor, experts_of_ranks: Sequence[int], num_rows: int
    ) -> "ArrivedRows":
        """Compute from the rows sent to every expert, and the rows that each rank sends to each expert here.

        `num_rows` are sent in all.
        """
        device = sent_counts_E.device
        num_experts, num_local = len(sent_counts_E), received_counts_RE.shape[1]
        if isinstance(sent_counts_E, FakeTensor):
            # In a rehearsal all ranks send alike.
            sizes = list(RowGroups.of(sent_counts_E, num_rows).sizes)
            sizes += sizes[:num_local] * len(experts_of_ranks)
        else:
            # Both at once, to wait for the device only once.
            sizes = torch.cat([sent_counts_E, received_counts_RE.flatten()]).tolist()
        sent = [sum(part) for part in _split(sizes[:num_experts], experts_of_ranks)]
        by_rank = _split(sizes[num_experts:], [num_local] * len(experts_of_ranks))
        received = [sum(part) for part in by_rank]
        runs = torch.tensor(by_rank, dtype=torch.int64).view(len(experts_of_ranks), -1)
        expert_of_run = torch.arange(num_local).expand(runs.shape).flatten()
        expert_of_row = torch.repeat_interleave(expert_of_run, runs.flatten(), output_size=sum(received))
        by_expert = expert_of_row.sort(stable=True).indices
        by_rank_N = torch.empty_like(by_expert)
        by_rank_N[by_expert] = torch.arange(len(by_expert))
        groups = RowGroups(tuple(map(sum, zip(*by_rank, strict=True))), device)
        return cls(groups, tuple(sent), tuple(received), by_expert.to(device), by_rank_N.to(device))

    def sorted_by_expert(self, rows_ND: Tensor) -> Tensor:
        return _Arrange.apply(rows_ND, self.by_expert_N, self.by_rank_N)  # pyright: ignore[reportReturnType]

    def sorted_by_rank(self, rows_ND: Tensor) -> Tensor:
        return _Arrange.apply(rows_ND, self.by_rank_N, self.by_expert_N)  # pyright: ignore[reportReturnType]


def _split(values: list[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, first = [], 0
    for size in sizes:
        parts.append(values[first : first + size])
        first += size
    return parts


@dataclass(eq=False)
class Route:
    """The routing of one microbatch in one layer, filled in as its row of segments runs."""

    #: the experts of each token, and the order in which rows leave
    choice: Choice = field(init=False)
    order: RowOrder = field(init=False)
    #: the numbers of rows that other ranks will send, on their way here
    sizes: Handle[Tensor] = field(init=False)
    #: None where this rank has all experts
    arrived: ArrivedRows | None = None
    num_padding: int = 0

    def send_sizes(self, collectives: Collectives, experts_of_ranks: Sequence[int]) -> None:
        """Start sending every rank the number of rows that each of its experts will receive."""
        num_local = experts_of_ranks[collectives.rank]
        self.sizes = collectives.all_to_all(self.choice.counts_E, experts_of_ranks, [num_local] * len(experts_of_ranks))


@dataclass(frozen=True, eq=False)
class AwaitSizes:
    """A segment that waits for the sizes, whose exchange the router's segment has launched.

    The message is small but queues behind collectives in flight. The extra yield matches the backward's, which comes
    before the experts' weight gradients, so that both lanes alternate evenly.
    """

    route: Route
    experts_of_ranks: tuple[int, ...]
    name: str = "sizes"

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        yield
        route = self.route
        received_RE = route.sizes.wait().view(len(self.experts_of_ranks), -1)
        route.arrived = ArrivedRows.of(
            route.choice.counts_E, received_RE, self.experts_of_ranks, len(route.order.token_of_row_N)
        )
        del route.sizes
        return state
