"""The mixture-of-experts block, in place of a layer's MLP block, as a row of segments.

    router with norm, shared expert and permutation | sizes, dispatch | experts | combine with residual

Each token goes to its `num_active` highest-scoring experts. There is no capacity limit; no token is dropped. If one
rank holds all experts, the two exchanges are left out.

Shapes: T tokens of this rank, S the same with padding, D hidden size, K active experts, N rows (copies of tokens, one
for each expert that they go to).
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import CachedRows, CacheSize
from penstock.model.lanes import drain
from penstock.model.layers.expert_dispatch import AwaitSizes, Route, RowOrder, gather, spread
from penstock.model.layers.functions import RMSNorm, gated, gated_joint
from penstock.model.layers.grouped_linear import GroupedLinear, RowGroups, grouped_matmul
from penstock.model.layers.router import Choice, Router
from penstock.model.linear import Linear
from penstock.model.matmul import Matmul
from penstock.model.segments import Compute, Exchange, Segment, SegmentedUnit, State, walk
from penstock.model.sequences import Sequences
from penstock.parallel.collectives import Collectives, Handle
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ExpertConfig, ModelConfig


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
    """

    def __init__(self, config: ModelConfig, matmul: Matmul, groups: ModelGroups | None = None) -> None:
        super().__init__()
        groups = groups or ModelGroups()
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
        if self.needs_all_pipelines:
            route = Route()
            return drain(walk(self._row(route, Compute("router", partial(self._route_all, route))), None, x_TD))
        h_TD = self.norm(x_TD)
        choice = self.router(h_TD)
        order = RowOrder.of(choice.experts_TK)
        rows_ND = spread(h_TD, order)
        out_ND = self.experts(rows_ND, RowGroups.of(choice.counts_E, rows_ND.shape[0]))
        base_TD = x_TD if self.shared is None else x_TD + self.shared(h_TD)
        return gather(out_ND, choice.weights_TK, base_TD, order)

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
            AwaitSizes(route, self.experts_of_ranks),
            Exchange("dispatch", partial(self._to_experts, route), partial(self._from_experts, route), True),
            experts,
            Exchange("combine", partial(self._from_experts, route), partial(self._to_experts, route)),
            combine,
        ]

    def _route(self, route: Route, sequences: Sequences, x: Tensor) -> State:
        tokens, route.num_padding = self._own_tokens(sequences, x.shape[0])
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
            route.send_sizes(self.collectives, self.experts_of_ranks)
        order = route.order = RowOrder.of(choice.experts_TK)
        base_TD = x_TD if self.shared is None else x_TD + self.shared(h_TD)
        return spread(h_TD, order), choice.weights_TK, base_TD

    def _own_tokens(self, sequences: Sequences, num_rows: int) -> tuple[range, int]:
        """The microbatch's tokens in these rows, and the number of padding rows after them."""
        if self.token_peers.size == 1:
            return range(num_rows), 0
        first = min(self.token_peers.rank * num_rows, sequences.num_tokens)
        tokens = range(first, min(first + num_rows, sequences.num_tokens))
        return tokens, num_rows - len(tokens)

    def _compute(self, route: Route, rows_ND: Tensor) -> State:
        if route.arrived is None:
            return (self.experts(rows_ND, RowGroups.of(route.choice.counts_E, rows_ND.shape[0])),)
        arrived = route.arrived
        out_ND = self.experts(arrived.sorted_by_expert(rows_ND), arrived.groups)
        return (arrived.sorted_by_rank(out_ND),)

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
