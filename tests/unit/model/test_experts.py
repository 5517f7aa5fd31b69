"""Layers with experts: against a plain loop over experts, and what holds of routers, losses and stacks alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.model import (
    AuxLoss,
    AuxLosses,
    FutureTokens,
    ModelGroups,
    Sequences,
    WeightGradients,
    cross_entropy_sum,
    decoder_units,
    defer,
    drain,
    zip_lanes,
)
from penstock.model.layers.experts import ExpertBlock, experts_of_ranks
from penstock.model.layers.grouped_linear import (
    GroupedLinear,
    GroupedMatmul,
    GroupedMatmulKernel,
    RowGroups,
    grouped_matmul,
)
from penstock.model.layers.router import Balance, Router
from penstock.model.linear import TORCH
from penstock.runtime import Boundary, Message, Stage, Tape
from penstock.settings import ExpertConfig, GroupScore, ModelConfig, Scores

D, LENGTHS = 12, ((3, 5, 1), (4, 2))
EXPERTS = ExpertConfig(
    num_experts=6,
    num_active=2,
    intermediate_size=8,
    microbatch_loss=0.3,
    sequence_loss=0.2,
    global_loss=0.1,
    z_loss=0.05,
    shared_size=4,
    shared_gate=True,
)
SIGMOID = replace(EXPERTS, scores=Scores.SIGMOID, scaling_factor=2.0, normalise=False, shared_gate=False)
MODEL = ModelConfig(40, D, 16, 2, 2, experts=EXPERTS)


@torch.no_grad()
def half_of(experts: ExpertConfig, seed: int = 0) -> ExpertBlock:
    """A unit in float64 with random weights; every expert's last load differs."""
    half = ExpertBlock(replace(MODEL, experts=experts), TORCH).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in half.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    half.norm.weight.add_(1.0)
    return half


def plain(half: ExpertBlock, x_TD: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The unit's output and its terms for each token together, by a loop over tokens and experts, in one graph."""
    config = half.router.config
    h_TD = F.rms_norm(x_TD, (D,), half.norm.weight, half.norm.eps)
    logits_TE = h_TD @ half.router.logits.weight.T
    scores_TE = logits_TE.softmax(-1) if config.scores is Scores.SOFTMAX else logits_TE.sigmoid()
    chosen = [row.topk(config.num_active).indices.tolist() for row in scores_TE]
    rows = []
    for x, h, scores, experts in zip(x_TD, h_TD, scores_TE, chosen, strict=True):
        total = sum(scores[e] for e in experts) if config.normalise else 1.0
        y = x
        for e in experts:
            gate, up = (half.experts.gate_up.weight[e] @ h).chunk(2)
            out = half.experts.down.weight[e] @ (F.silu(gate) * up)
            y = y + config.scaling_factor * scores[e] / total * out
        shared = half.shared
        if shared is not None:
            inner = F.silu(shared.gate.weight @ h) * (shared.up.weight @ h)
            scale = 1.0 if shared.scale is None else torch.sigmoid(shared.scale.weight @ h)
            y = y + scale * (shared.down.weight @ inner)
        rows.append(y)
    shares_TE = scores_TE / scores_TE.sum(-1, keepdim=True)

    def imbalance(first: int, end: int) -> Tensor:
        counts = torch.zeros(config.num_experts, dtype=torch.float64)
        for experts in chosen[first:end]:
            counts[experts] += 1
        return (shares_TE[first:end] * counts / counts.mean()).sum()

    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    load = half.router.balance.load
    terms = config.microbatch_loss * imbalance(0, len(chosen))
    terms = terms + config.sequence_loss * sum(imbalance(s, s + n) for s, n in zip(starts, lengths, strict=True))
    terms = terms + config.global_loss * (0.0 if load is None else (shares_TE * load).sum())
    return torch.stack(rows), terms + config.z_loss * logits_TE.logsumexp(-1).square().sum()


@dataclass(frozen=True)
class Microbatch:
    x: Tensor
    grad: Tensor
    sequences: Sequences
    terms: AuxLosses


def microbatches() -> list[Microbatch]:
    """Two of unequal lengths whose losses have unequal factors."""
    generator = torch.Generator().manual_seed(9)
    found = []
    for lengths, factor in zip(LENGTHS, (0.25, 3.0), strict=True):
        x, grad = torch.randn(2, sum(lengths), D, generator=generator, dtype=torch.float64)
        terms = AuxLosses(factor, factor * 0.5)
        found.append(Microbatch(x, grad, Sequences.from_lengths(lengths).with_aux_losses(terms), terms))
    return found


def walk(half: ExpertBlock, split: bool, recompute: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and input gradients, all forwards before all backwards, the last two lanes zipped."""
    owner = WeightGradients()
    defer(half, owner)
    stage = Stage(0, [("half", half)], Boundary(D, torch.float64), owner, recompute=["half"] if recompute else [])
    parts, tapes = microbatches(), [Tape(), Tape()]
    first = drain(stage.forward(tapes[0], Message((parts[0].x,)), parts[0].sequences))
    second = drain(stage.forward(tapes[1], Message((parts[1].x,)), parts[1].sequences))
    lanes = [stage.backward(tape, Message((part.grad,)), split) for tape, part in zip(tapes, parts, strict=True)]
    grads = zip_lanes(*lanes)
    for tape in tapes:
        stage.weight_backward(tape)
    return [first.tensors[0], second.tensors[0]], [grad.tensors[0] for grad in grads]


@pytest.mark.shows(27, 88)
@pytest.mark.parametrize("experts", [EXPERTS, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize(("split", "recompute"), [(False, False), (True, False), (True, True)])
def test_outputs_gradients_and_terms_are_those_of_a_loop_over_experts(
    experts: ExpertConfig, split: bool, recompute: bool
) -> None:
    half, reference = half_of(experts), half_of(experts)
    outputs, grads = walk(half, split, recompute)
    for part, output, grad in zip(microbatches(), outputs, grads, strict=True):
        leaf = part.x.clone().requires_grad_()
        expected, terms = plain(reference, leaf, part.sequences.lengths)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        # The term's factor is its own microbatch's, however many forwards lie between.
        ((expected * part.grad).sum() + part.terms.per_token * terms).backward()
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-12, atol=1e-12)
    trained = [name for name, p in half.named_parameters() if p.requires_grad]
    assert len(trained) == (8 if half.shared and half.shared.scale else 7)
    for name in trained:
        found, wanted = half.get_parameter(name).grad, reference.get_parameter(name).grad
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.shows(47)
def test_noted_terms_and_counts_are_each_microbatchs_own() -> None:
    half, part = half_of(EXPERTS), microbatches()[0]
    stage = Stage(0, [("half", half)], Boundary(D, torch.float64))
    drain(stage.forward(Tape(), Message((part.x,)), part.sequences))
    terms = plain(half, part.x, part.sequences.lengths)[1].detach()
    noted = {kind: float(value) for (_, kind), value in part.terms.values.items()}
    assert set(noted) == {AuxLoss.BALANCE, AuxLoss.SEQUENCE_BALANCE, AuxLoss.GLOBAL_BALANCE, AuxLoss.Z}
    assert sum(noted.values()) == pytest.approx(float(terms) * part.terms.per_token, rel=1e-12)
    (counts,) = part.terms.counts.values()
    assert int(counts.sum()) == len(part.x) * EXPERTS.num_active


def test_balanced_experts_cost_the_coefficient_and_idle_ones_more() -> None:
    def cost(logits_TE: Tensor) -> float:
        config = ExpertConfig(4, 1, 8, microbatch_loss=1.0)
        router = Router(4, config, TORCH)
        router.logits.weight.data = torch.eye(4)
        terms = AuxLosses(1.0, 1.0 / len(logits_TE))
        router(logits_TE, Sequences.from_lengths([len(logits_TE)]).with_aux_losses(terms), range(len(logits_TE)))
        (value,) = terms.values.values()
        return float(value)

    assert cost(20 * torch.eye(4).repeat(5, 1)) == pytest.approx(1.0)
    assert cost(20 * torch.eye(4)[:1].repeat(20, 1)) == pytest.approx(4.0)


class TestRouter:
    def test_a_token_keeps_to_the_best_groups(self) -> None:
        scores = torch.tensor([[0.8, 0.0, 0.5, 0.5, 0.6, 0.3]])
        for score, kept in ((GroupScore.BEST, {0, 1, 4, 5}), (GroupScore.BEST_TWO, {2, 3, 4, 5})):
            config = ExpertConfig(6, 4, 8, num_groups=3, num_active_groups=2, group_score=score)
            router = Router(D, config, TORCH)
            assert set(router._best(scores)[0].tolist()) == kept

    def test_the_bias_decides_the_choice_and_not_the_weights(self) -> None:
        config = ExpertConfig(4, 2, 8, bias_step=0.5, normalise=False)
        router = Router(4, config, TORCH)
        router.logits.weight.data = torch.eye(4)
        bias = router.balance.bias
        assert bias is not None
        bias.data = torch.tensor([0.0, 0.0, 5.0, 5.0])
        logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
        choice = router(logits)
        assert set(choice.experts_TK[0].tolist()) == {2, 3}
        torch.testing.assert_close(choice.weights_TK, logits.softmax(-1).gather(1, choice.experts_TK))

    def test_the_bias_moves_by_one_step_towards_the_mean(self) -> None:
        balance = Balance(ExpertConfig(3, 1, 8, bias_step=0.25, global_loss=0.1))
        assert balance.bias is not None and balance.load is not None
        balance.bias.data.zero_()
        balance.update(torch.tensor([2, 3, 4]))
        assert balance.bias.tolist() == [0.25, 0.0, -0.25]
        torch.testing.assert_close(balance.load.data, torch.tensor([2 / 3, 1.0, 4 / 3]))

    @pytest.mark.parametrize("scores", list(Scores))
    def test_the_bias_makes_experts_equally_busy_whatever_the_scores_prefer(self, scores: Scores) -> None:
        router = Router(16, ExpertConfig(8, 2, 8, scores, bias_step=0.01), TORCH)
        generator = torch.Generator().manual_seed(0)
        router.logits.weight.data = 0.25 * torch.randn(8, 16, generator=generator)
        assert router.balance.bias is not None
        router.balance.bias.data.zero_()
        # All tokens lean one way, so that without the bias few experts get most of them.
        h_TD = torch.randn(512, 16, generator=generator) + 4.0 * torch.eye(16)[0]

        def busiest() -> float:
            counts = router(h_TD).counts_E
            router.balance.update(counts)
            return float(counts.max() / counts.double().mean())

        assert busiest() > 3
        assert max([busiest() for _ in range(200)][-20:]) < 1.5

    def test_in_16_bit_scores_are_computed_in_fp32_and_the_bias_stays_so(self) -> None:
        router = Router(8, ExpertConfig(4, 2, 8, bias_step=1e-3, z_loss=0.1), TORCH).to(torch.bfloat16)
        router.logits.weight.data = torch.randn(4, 8).to(torch.bfloat16)
        assert router.balance.bias is not None
        assert router.balance.bias.dtype == torch.float32
        router.balance.bias.data.zero_()
        h = torch.randn(5, 8).to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            weights = router(h).weights_TK
        exact = (h.float() @ router.logits.weight.float().T).softmax(-1).topk(2).values
        torch.testing.assert_close(weights.sort(descending=True).values, exact / exact.sum(-1, keepdim=True))

    def test_nothing_is_noted_where_nothing_is_learned(self) -> None:
        half, part = half_of(EXPERTS), microbatches()[0]
        expected = plain(half, part.x, LENGTHS[0])[0]
        rows: Any = None  # what a piece's tokens are to each other is of no account to experts
        torch.testing.assert_close(half.decode(part.x, half.new_cache(rows), rows), expected)


class TestStack:
    @pytest.mark.parametrize("sizes", [(3, 0, 4, 1), (0, 0, 8, 0), (0, 0, 0, 0)])
    def test_each_row_meets_its_own_expert_and_empty_experts_get_zero(self, sizes: tuple[int, ...]) -> None:
        stack = GroupedLinear(4, 5, 7, grouped_matmul(TORCH)).double()
        nn.init.normal_(stack.weight)
        x = torch.randn(sum(sizes), 5, dtype=torch.float64, requires_grad=True)
        groups = RowGroups(torch.tensor(sizes), sum(sizes))
        out = stack(x, groups)
        of_row = [e for e, size in enumerate(sizes) for _ in range(size)]
        expected = [stack.weight[e] @ x[i] for i, e in enumerate(of_row)]
        torch.testing.assert_close(out, torch.stack(expected) if expected else x.new_zeros(0, 7))
        grad = torch.randn_like(out)
        out.backward(grad)
        assert stack.weight.grad is not None
        for e, size in enumerate(sizes):
            rows = [i for i, of in enumerate(of_row) if of == e]
            torch.testing.assert_close(stack.weight.grad[e], grad[rows].T @ x.detach()[rows])
            assert size or not stack.weight.grad[e].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_one_kernel_for_all_experts_computes_what_one_product_each_does(self, dtype: torch.dtype) -> None:
        class Everywhere(GroupedMatmulKernel):
            """The kernel is fast on a GPU alone, but there is one on any device."""

            @staticmethod
            def takes(x: Tensor, weight_EOI: Tensor) -> bool:
                return True

        groups, generator = RowGroups(torch.tensor([3, 0, 5, 8]), 16), torch.Generator().manual_seed(0)
        x, weight, grad = (
            torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (4, 24, 16), (16, 24))
        )
        together, one_by_one = Everywhere(), GroupedMatmul()
        limit = 32 * torch.finfo(dtype).eps
        for one, other in (
            (together.output(x, weight, groups), one_by_one.output(x, weight, groups)),
            (together.input_gradient(grad, weight, groups), one_by_one.input_gradient(grad, weight, groups)),
        ):
            torch.testing.assert_close(one, other, rtol=limit, atol=limit)
        totals = torch.ones(2, 4, 24, 16)
        together.add_weight_gradient(totals[0], grad, x, groups)
        one_by_one.add_weight_gradient(totals[1], grad, x, groups)
        torch.testing.assert_close(totals[0], totals[1], rtol=limit, atol=limit)
        assert totals[0, 1].eq(1).all()


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 2), (7, 4), (5, 5), (9, 2)])
def test_experts_are_shared_as_evenly_as_can_be(num_experts: int, num_ranks: int) -> None:
    shares = experts_of_ranks(num_experts, num_ranks)
    assert sum(shares) == num_experts
    assert max(shares) - min(shares) <= 1
    units = decoder_units(
        replace(MODEL, experts=ExpertConfig(num_experts, 2, 8)), groups=ModelGroups.planned(ep=num_ranks)
    )
    (shard,) = {unit.sharding["experts.down.weight"] for unit in units if unit.sharding}
    assert shard.length == shares[0]
    assert shard.full_shape == (num_experts, D, 8)


@pytest.mark.parametrize(
    ("settings", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"num_dense_first": 2}, [2, 3, 4, 5]),
        ({"every": 2}, [1, 3, 5]),
        ({"num_dense_first": 1, "every": 2, "dense_layers": (4,)}, [2]),
    ],
)
def test_dense_layers_stand_between(settings: dict[str, Any], sparse: list[int]) -> None:
    config = replace(MODEL, num_layers=6, experts=ExpertConfig(4, 2, 8, **settings))
    units = {unit.name: unit for unit in decoder_units(config)}
    found = [i for i in range(6) if isinstance(units[f"layers.{i}.mlp"].build(), ExpertBlock)]
    assert found == sparse


class TestPrediction:
    def test_tokens_ahead_end_with_their_sequence(self) -> None:
        tokens, labels = torch.arange(10, 18), torch.tensor([11, 12, 13, -100, 15, 16, -100, 99])
        ahead = FutureTokens.of(tokens, labels, [4, 3, 1], 1)
        assert ahead.tokens_T.tolist() == [11, 12, 13, 13, 15, 16, 16, 17]
        assert ahead.labels_T.tolist() == [12, 13, -100, -100, 16, -100, -100, -100]
        assert FutureTokens.of(tokens, labels, [4, 3, 1], 5).labels_T.eq(-100).all()

    @pytest.mark.parametrize("tied", [False, True])
    def test_the_loss_is_that_of_each_further_layer_in_one_graph(self, tied: bool) -> None:
        dense = replace(MODEL, experts=ExpertConfig(), num_predictions=2, tie_embeddings=tied)
        (spec,) = decoder_units(dense)[-1:]
        assert spec.num_ahead == 2

        def head() -> Any:
            module = spec.build().double()
            spec.initialise(module, 3)
            return module

        lengths, generator = (5, 4), torch.Generator().manual_seed(1)
        tokens, labels = torch.randint(0, 40, (2, 9), generator=generator)
        x = torch.randn(9, D, generator=generator, dtype=torch.float64)
        ahead = tuple(FutureTokens.of(tokens, labels, lengths, distance) for distance in (1, 2))
        terms = AuxLosses(0.7, 0.7)
        sequences = replace(Sequences.from_lengths(lengths), ahead=ahead)
        ours, tape = head(), Tape()
        stage = Stage(0, [("head", ours)], Boundary(D, torch.float64))
        sequences = sequences.with_aux_losses(terms)
        drain(stage.forward(tape, Message((x,)), sequences, lambda y: cross_entropy_sum(y, labels) * 0.7))
        [grad] = drain(stage.backward(tape, None)).tensors
        stage.weight_backward(tape)

        module, leaf = head(), x.clone().requires_grad_()
        loss = cross_entropy_sum(module.projection(module.norm(leaf)), labels)
        h = leaf
        for part, target in zip(module.predictions, ahead, strict=True):
            embedded = F.embedding(target.tokens_T, module.embedding.weight)
            h = part.join(torch.cat((part.stream_norm(h), part.token_norm(embedded)), -1))
            h = part.mlp(part.attention(h, sequences), sequences)
            further = cross_entropy_sum(module.projection(part.norm(h)), target.labels_T)
            loss = loss + dense.prediction_loss / 2 * further
        (0.7 * loss).backward()
        torch.testing.assert_close(grad, leaf.grad, rtol=1e-12, atol=1e-12)
        wanted = dict(module.named_parameters())
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-12, atol=1e-12, msg=name)
        assert {kind for _, kind in terms.values} == {AuxLoss.PREDICTION}


def test_a_block_called_as_a_plain_module_refuses_where_autograd_would_expect_a_graph() -> None:
    half, (part, _) = half_of(EXPERTS), microbatches()
    refused = "ExpertBlock called as a plain module gives no graph for a backward: train it in an Engine, or call it "
    with pytest.raises(ValueError, match=refused + r"under torch\.no_grad\(\)"):
        half(part.x, part.sequences)
    with torch.no_grad():
        expected = plain(half, part.x, LENGTHS[0])[0]
        torch.testing.assert_close(half(part.x, part.sequences), expected)
    half.requires_grad_(False)
    torch.testing.assert_close(half(part.x, part.sequences), expected)
    with pytest.raises(ValueError, match=refused):
        half(part.x.requires_grad_(), part.sequences)
