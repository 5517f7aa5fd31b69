"""The mixture-of-experts block, in place of a layer's MLP block, as a row of segments.

    router with norm, shared expert and permutation | sizes, dispatch | experts | combine with residual

Each token goes to its `num_active` highest-scoring experts. There is no capacity limit; no token is dropped. Rows are
sorted by expert, and go between ranks by unequal all-to-alls; if one rank holds all experts, these are left out.

Shapes: T tokens of this rank, S the same with padding, D hidden size, K active experts, N rows (copies of tokens, one
for each expert that they go to).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.kv_cache import CachedRows, CacheSize
from penstock.model.lanes import Compute, Exchange, Lane, Segment, SegmentedUnit, State, Undo, drain, walk
from penstock.model.layers.dense import RMSNorm, gated, gated_joint
from penstock.model.layers.grouped_linear import GroupedLinear, ReadCounts, RowGroups, grouped_matmul, read_counts
from penstock.model.layers.router import Choice, Router
from penstock.model.linear import Linear, Matmul, dtype_of_sums, with_gradient
from penstock.model.sequences import Sequences
from penstock.model.units import ModelGroups
from penstock.parallel.collectives import Collectives, Handle
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ExpertConfig, ModelConfig


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Rows, each a copy of a token; `of` sorts them by expert, those of one expert in the order of their tokens."""

    #: row -> its token
    token_of_row_N: Tensor
    #: (token, number of its copy) -> row
    row_of_slot_TK: Tensor

    @classmethod
    def of(cls, experts_TK: Tensor) -> "RowOrder":
        slots_N = experts_TK.flatten().sort(stable=True).indices
        row_of_slot = torch.empty_like(slots_N)
        row_of_slot[slots_N] = torch.arange(len(slots_N), device=slots_N.device)
        return cls(slots_N // experts_TK.shape[1], row_of_slot.view_as(experts_TK))


def _sum_of_rows(rows_ND: Tensor, row_of_slot_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The sum of each token's rows in the order of its choices, weighted if there are weights; in at least fp32."""
    if weights_TK is None and row_of_slot_TK.shape[1] == 1:
        return rows_ND.index_select(0, row_of_slot_TK[:, 0])
    dtype = dtype_of_sums(rows_ND)
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
    """One row for each pair of a token and an expert that it goes to [N, D], sorted by expert.

    A token's gradient is the sum of its rows', in the order of its choices.
    """

    def forward(h_TD: Tensor) -> tuple[Tensor, tuple[()]]:
        return h_TD.index_select(0, order.token_of_row_N), ()

    def backward(grad_ND: Tensor) -> tuple[Tensor]:
        return (_sum_of_rows(grad_ND, order.row_of_slot_TK, None),)

    return with_gradient(forward, backward, h_TD)


def gather(rows_ND: Tensor, weights_TK: Tensor, base_TD: Tensor, order: RowOrder) -> Tensor:
    """The base plus the weighted sum of each token's rows [T, D], summed in fp32, returned in the base's dtype."""

    def forward(rows_ND: Tensor, weights_TK: Tensor, base_TD: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        sums_TD = _sum_of_rows(rows_ND, order.row_of_slot_TK, weights_TK)
        return sums_TD.to(base_TD.dtype).add_(base_TD), (rows_ND, weights_TK)

    def backward(grad_TD: Tensor, rows_ND: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights_N = torch.empty_like(weights_TK.flatten())
        weights_N[order.row_of_slot_TK.flatten()] = weights_TK.flatten()
        of_rows_ND = grad_TD.index_select(0, order.token_of_row_N)
        products_N = torch.linalg.vecdot(of_rows_ND.to(weights_TK.dtype), rows_ND.to(weights_TK.dtype))
        grad_weights_TK = products_N[order.row_of_slot_TK]
        grad_rows_ND = of_rows_ND.mul_(weights_N[:, None]).to(rows_ND.dtype)
        return grad_rows_ND, grad_weights_TK, grad_TD

    return with_gradient(forward, backward, rows_ND, weights_TK, base_TD)


@dataclass(frozen=True, eq=False)
class ArrivedRows:
    """The rows of this rank's experts, as received: rank after rank, each rank's rows sorted by expert."""

    groups: RowGroups
    #: rank -> number of rows sent to it, and received from it
    sent: tuple[int, ...]
    received: tuple[int, ...]
    #: received rows sorted by expert, and back
    by_expert: RowOrder
    by_rank: RowOrder

    @classmethod
    def of(cls, received_counts_RE: Tensor, numbers: Sequence[int], experts_of_ranks: Sequence[int]) -> "ArrivedRows":
        """Compute from the rows that each rank sends to each expert here.

        numbers: the rows sent to every expert, and those received, as they were read. All else stays on the device.
        """
        num_experts, num_local = sum(experts_of_ranks), received_counts_RE.shape[1]
        sent = [sum(part) for part in _split(numbers[:num_experts], experts_of_ranks)]
        by_rank = _split(numbers[num_experts:], [num_local] * len(experts_of_ranks))
        received = [sum(part) for part in by_rank]
        num_rows, device = sum(received), received_counts_RE.device
        expert_of_run = torch.arange(num_local, device=device).expand(received_counts_RE.shape).flatten()
        expert_of_row = torch.repeat_interleave(expert_of_run, received_counts_RE.flatten(), output_size=num_rows)
        there_N = expert_of_row.sort(stable=True).indices
        back_N = torch.empty_like(there_N)
        back_N[there_N] = torch.arange(num_rows, device=device)
        sizes = [sum(of_expert) for of_expert in zip(*by_rank, strict=True)]
        groups = RowGroups(received_counts_RE.sum(0), num_rows, lambda *counts: sizes)
        orders = RowOrder(there_N, back_N[:, None]), RowOrder(back_N, there_N[:, None])
        return cls(groups, tuple(sent), tuple(received), *orders)


def _split(values: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
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


@dataclass(frozen=True, eq=False)
class AwaitSizes:
    """A segment that waits for the sizes, whose exchange the router's segment has launched.

    The message is small but queues behind collectives in flight. The extra yield matches the backward's, which comes
    before the experts' weight gradients, so that both lanes alternate evenly.
    """

    route: Route
    experts_of_ranks: tuple[int, ...]
    #: reads the sizes, of which the exchanges' buffers are: the one wait for the device in a layer
    read: ReadCounts
    name: str = "sizes"

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        yield
        route = self.route
        received_RE = route.sizes.wait().view(len(self.experts_of_ranks), -1)
        numbers = self.read(len(route.order.token_of_row_N), route.choice.counts_E, received_RE)
        route.arrived = ArrivedRows.of(received_RE, numbers, self.experts_of_ranks)
        del route.sizes
        return state


class Experts(nn.Module):
    """This rank's experts: rows sorted by expert [N, D] -> down(silu(gate) * up) [N, D]."""

    def __init__(self, hidden_size: int, config: ExpertConfig, num_local: int, matmul: Matmul) -> None:
        super().__init__()
        grouped = grouped_matmul(matmul)
        self.gate_up = GroupedLinear(num_local, hidden_size, 2 * config.intermediate_size, grouped)
        self.down = GroupedLinear(num_local, config.intermediate_size, hidden_size, grouped)

    def forward(self, rows_ND: Tensor, groups: RowGroups) -> Tensor:
        return self.down(gated_joint(self.gate_up(rows_ND, groups)), groups)


class SharedExpert(nn.Module):
    """The expert that every token goes to, with an optional gate that scales its output token by token."""

    def __init__(self, hidden_size: int, config: ExpertConfig, matmul: Matmul) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, config.shared_size, matmul=matmul)
        self.up = Linear(hidden_size, config.shared_size, matmul=matmul)
        self.down = Linear(config.shared_size, hidden_size, matmul=matmul)
        self.scale = Linear(hidden_size, 1, matmul=matmul) if config.shared_gate else None

    def forward(self, h_TD: Tensor) -> Tensor:
        out_TD = self.down(gated(self.gate(h_TD), self.up(h_TD)))
        return out_TD if self.scale is None else out_TD * self.scale(h_TD).sigmoid()


class ExpertBlock(SegmentedUnit):
    """x + shared(norm(x)) + the weighted sum of the outputs of each token's experts.

    Each rank routes its own tokens. Under tensor parallelism these are its run of the residual stream [S, D]; the
    padding of the last run stays zero and goes to no expert.

    Args:
        config: of the model, with experts.
        matmul: computes the matrix products.
        groups: each rank of `ep` holds a run of neighbouring experts.

    `read_counts` reads numbers of rows; a rehearsal, whose rows have no numbers, puts another in its place.
    """

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups | None = None) -> None:
        super().__init__()
        groups = groups or ModelGroups()
        self.read_counts: ReadCounts = read_counts
        self.collectives, self.token_peers = Collectives(groups.ep), Collectives(groups.tp)
        self.experts_of_ranks = experts_of_ranks(config.experts.num_experts, self.collectives.size)
        num_local = self.experts_of_ranks[self.collectives.rank]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.router = Router(config.hidden_size, config.experts, matmul, groups)
        self.experts = Experts(config.hidden_size, config.experts, num_local, matmul)
        self.shared = SharedExpert(config.hidden_size, config.experts, matmul) if config.experts.shared_size else None

    @property
    def needs_all_pipelines(self) -> bool:
        """True if all ranks of the expert-parallel group must call `decode` together, those without tokens too."""
        return self.collectives.size > 1

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x_TD: Tensor, cache: None, rows: CachedRows) -> Tensor:
        route = Route()
        return drain(walk(self._row(route, Compute("router", partial(self._route_all, route))), None, x_TD))

    def segments(self, sequences: Sequences) -> Sequence[Segment]:
        route = Route()
        return self._row(route, Compute("router", partial(self._route, route, sequences)))

    def _row(self, route: Route, router: Compute) -> Sequence[Segment]:
        # The tokens' weights, and the stream that the outputs are added to, bypass the experts.
        experts = Compute("experts", partial(self._compute, route), apart=True, num_beside=2)
        combine = Compute("combine", partial(self._combine, route))
        if self.collectives.size == 1:
            return [router, experts, combine]
        return [
            router,
            AwaitSizes(route, self.experts_of_ranks, self.read_counts),
            Exchange("dispatch", partial(self._to_experts, route), partial(self._from_experts, route), True),
            experts,
            Exchange("combine", partial(self._from_experts, route), partial(self._to_experts, route)),
            combine,
        ]

    def _route(self, route: Route, sequences: Sequences, x: Tensor) -> State:
        # The microbatch's tokens in these rows, and the padding rows after them.
        tokens = range(x.shape[0])
        if self.token_peers.size > 1:
            first = min(self.token_peers.rank * len(x), sequences.num_tokens)
            tokens = range(first, min(first + len(x), sequences.num_tokens))
        route.num_padding = x.shape[0] - len(tokens)
        x_TD = x[: len(tokens)] if route.num_padding else x
        h_TD = self.norm(x_TD)
        return self._permute(route, x_TD, h_TD, self.router(h_TD, sequences, tokens))

    def _route_all(self, route: Route, x_TD: Tensor) -> State:
        """Route tokens to decode: each rank of the tensor-parallel group has all of them, and there is no loss."""
        h_TD = self.norm(x_TD)
        return self._permute(route, x_TD, h_TD, self.router(h_TD))

    def _permute(self, route: Route, x_TD: Tensor, h_TD: Tensor, choice: Choice) -> State:
        route.choice = choice
        if self.collectives.size > 1:
            # Every rank learns the number of rows that each of its experts will receive.
            received = [self.experts_of_ranks[self.collectives.rank]] * self.collectives.size
            route.sizes = self.collectives.all_to_all(choice.counts_E, self.experts_of_ranks, received)
        order = route.order = RowOrder.of(choice.experts_TK)
        base_TD = x_TD if self.shared is None else x_TD + self.shared(h_TD)
        return spread(h_TD, order), choice.weights_TK, base_TD

    def _compute(self, route: Route, rows_ND: Tensor) -> State:
        if route.arrived is None:
            groups = RowGroups(route.choice.counts_E, rows_ND.shape[0], self.read_counts)
            return (self.experts(rows_ND, groups),)
        arrived = route.arrived
        out_ND = self.experts(spread(rows_ND, arrived.by_expert), arrived.groups)
        return (spread(out_ND, arrived.by_rank),)

    def _combine(self, route: Route, rows_ND: Tensor, weights_TK: Tensor, base_TD: Tensor) -> State:
        y_TD = gather(rows_ND, weights_TK, base_TD, route.order)
        return (F.pad(y_TD, (0, 0, 0, route.num_padding)) if route.num_padding else y_TD,)

    def _to_experts(self, route: Route, rows: Tensor) -> Handle[Tensor]:
        assert route.arrived is not None
        return self.collectives.all_to_all(rows, route.arrived.sent, route.arrived.received)

    def _from_experts(self, route: Route, rows: Tensor) -> Handle[Tensor]:
        assert route.arrived is not None
        return self.collectives.all_to_all(rows, route.arrived.received, route.arrived.sent)


def check_expert_parallel(config: ModelConfig, num_ranks: int) -> None:
    """Refuse a number of ranks that cannot split the experts.

    Raises:
        ValueError: there are no experts, or fewer than ranks.
    """
    if num_ranks == 1:
        return
    if not config.experts.num_experts:
        raise ValueError(f"ep = {num_ranks}: the model has no experts to share; ep = 1 is possible")
    if num_ranks > config.experts.num_experts:
        raise ValueError(
            f"ep = {num_ranks} is more than the {config.experts.num_experts} experts of a layer; "
            f"at most ep = {config.experts.num_experts} is possible"
        )


def expert_shards(config: ModelConfig, groups: ModelGroups) -> dict[str, Shard]:
    """This rank's part of an expert block's parameters, by their names in it; empty if it has all experts."""
    experts = config.experts
    if groups.ep_size == 1:
        return {}
    shapes = {
        "experts.gate_up.weight": (experts.num_experts, 2 * experts.intermediate_size, config.hidden_size),
        "experts.down.weight": (experts.num_experts, config.hidden_size, experts.intermediate_size),
    }
    return {name: Shard("ep", 0, groups.ep_rank, groups.ep_size, shape) for name, shape in shapes.items()}


def experts_of_ranks(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """The number of neighbouring experts on each rank, as even as possible, larger numbers first as in `Shard`."""
    return tuple(num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks))
