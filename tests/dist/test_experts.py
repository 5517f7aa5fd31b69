"""Layers with experts: the bits of one process under any schedule, and its numbers however the experts are shared."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.parallel.tensor_slice import Shard
from penstock.settings import ExpertConfig, GroupScore, LearningRate, ModelConfig, OptimizerConfig, Precision, Scores
from tests.covering import EVERY
from tests.dist.launch import run_ranks

STEPS = 2
EVERYTHING = ExpertConfig(
    num_experts=8,
    num_active=2,
    intermediate_size=16,
    bias_step=0.05,
    microbatch_loss=0.1,
    sequence_loss=0.1,
    global_loss=0.1,
    z_loss=0.01,
    shared_size=12,
    shared_gate=True,
)
DEEPSEEK = replace(
    EVERYTHING,
    scores=Scores.SIGMOID,
    scaling_factor=1.5,
    num_groups=4,
    num_active_groups=2,
    group_score=GroupScore.BEST_TWO,
    shared_gate=False,
    num_dense_first=1,
)
# What a microbatch is counts for its own balance alone; without it, any split gives the same numbers.
LAYOUT_FREE = replace(DEEPSEEK, microbatch_loss=0.0)


@dataclass(frozen=True)
class Case:
    experts: ExpertConfig
    schedule: str = "1f1b"
    num_microbatches: int = 3
    recompute: str = "none"
    precision: Precision = Precision.FP32
    num_predictions: int = 0
    tied: bool = False
    favoured: int | None = None
    """An expert whose bias is so high that every token goes there."""


@dataclass(frozen=True)
class Outcome:
    """Of one rank: what each step told, and by full name what it holds after the last."""

    losses: list[float]
    norms: list[float]
    aux_losses: list[tuple[Mapping[str, float], float | None]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    shards: dict[str, Shard]


def documents() -> list[list[Tensor]]:
    """Documents of unequal lengths, as many for each step as any layout here divides."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 12, (STEPS, 12), generator=generator).tolist()
    return [[torch.randint(0, 48, (n,), generator=generator) for n in step] for step in lengths]


def train(case: Case, layout: Layout, steps: list[list[Tensor]] | None = None) -> Outcome:
    config = ModelConfig(
        48,
        24,
        32,
        3,
        4,
        num_kv_heads=2,
        experts=case.experts,
        num_predictions=case.num_predictions,
        tie_embeddings=case.tied,
    )
    options = EngineOptions(
        schedule=case.schedule,
        recompute=case.recompute,
        precision=case.precision,
        # With a small eps a step is the gradient's sign, and rounding decides over elements that are nearly zero.
        optimizer=OptimizerConfig(LearningRate(1e-2), eps=1e-3, clip_norm=0.5),
        timeout_s=30.0,
    )
    engine = Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)
    if case.favoured is not None:
        for name, parameter in engine.parameters().items():
            if name.endswith("balance.bias"):
                parameter.data[case.favoured] = 100.0
    results = [
        engine.train_batch(
            PackedBatch.from_documents(step[engine.grid.dp_rank :: layout.dp]),
            micro_batches=MicroBatchSpec(num=case.num_microbatches),
        )
        for step in steps or documents()
    ]
    trained = [name for buckets in engine.trainer.buckets.values() for name in buckets.gradients]
    outcome = Outcome(
        [r.loss for r in results],
        [r.grad_norm for r in results],
        [(dict(r.aux_losses.losses), r.aux_losses.busiest_expert) for r in results],
        {name: engine.gradient(name).clone() for name in trained},
        {name: p.detach().clone() for name, p in engine.parameters().items()},
        dict(engine.shards),
    )
    engine.close()
    engine.grid.close()
    return outcome


def train_all(rank: int, cases: list[tuple[Case, Layout]]) -> list[Outcome]:
    return [train(case, layout) for case, layout in cases]


BITWISE = [
    Case(EVERYTHING, "afab"),
    Case(EVERYTHING, "1f1b", recompute="full"),
    Case(DEEPSEEK, "1f1b", num_microbatches=1),
    Case(EVERYTHING, "interleaved"),
    Case(DEEPSEEK, "zb-v"),
    Case(DEEPSEEK, "dualpipe-v", num_microbatches=5),
    Case(EVERYTHING, "zb-h1", num_predictions=1, tied=True),
    Case(DEEPSEEK, "interleaved-zb", recompute="full", num_predictions=2),
]
if EVERY:
    BITWISE += [
        Case(DEEPSEEK, "zb-h1", recompute="full"),
        Case(EVERYTHING, "zb-h1", num_microbatches=5),
        Case(DEEPSEEK, "1f1b", num_predictions=2),
        Case(EVERYTHING, "interleaved-zb", recompute="full", num_predictions=2),
    ]


@cache
def alone(case: Case) -> Outcome:
    """What one process makes of a case; neither schedule nor recomputation has a say in it."""
    return train(replace(case, schedule="1f1b", recompute="none"), Layout())


@pytest.mark.shows(20, 27)
def test_any_schedule_gives_the_bits_of_one_process() -> None:
    for pp in (2, 3):
        cases = BITWISE if EVERY else BITWISE[pp - 2 :: 2]
        by_rank = run_ranks(pp, train_all, [(case, Layout(pp=pp)) for case in cases], timeout_s=100.0)
        for number, case in enumerate(cases):
            seen: set[str] = set()
            expected = alone(case)
            for outcomes in by_rank:
                found = outcomes[number]
                assert (found.losses, found.norms) == (expected.losses, expected.norms), case
                for (losses, busiest), (wanted, wanted_busiest) in zip(
                    found.aux_losses, expected.aux_losses, strict=True
                ):
                    assert losses == pytest.approx(wanted, rel=1e-6), case
                    assert busiest == wanted_busiest, case
                for name, gradient in found.gradients.items():
                    assert torch.equal(gradient, expected.gradients[name]), (case, name)
                for name, parameter in found.parameters.items():
                    assert torch.equal(parameter, expected.parameters[name]), (case, name)
                seen |= found.parameters.keys()
            assert seen == expected.parameters.keys()
            assert any("experts.gate_up" in name for name in seen)


FP64 = Case(LAYOUT_FREE, precision=Precision.FP64)
SHARED = [
    FP64,
    replace(FP64, recompute="full", num_predictions=1),
    replace(FP64, favoured=3),
    replace(FP64, experts=replace(LAYOUT_FREE, num_experts=7, num_groups=1, num_active_groups=1)),
]
# Further tokens through layers with experts, through dense ones, and where the weights of both ends are one.
PREDICTING = [
    replace(FP64, num_predictions=2, tied=True),
    replace(FP64, num_predictions=1, recompute="full", experts=replace(LAYOUT_FREE, dense_layers=(2,))),
]


@pytest.mark.shows(88)
@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(dp=2, ep=2), Layout(cp=2, ep=2), Layout(tp=2)],
        [Layout(dp=4, ep=2), Layout(dp=4, ep=4), Layout(pp=2, dp=2, ep=2), Layout(dp=2, tp=2, ep=2)],
    ],
    ids=["two", "four"],
)
def test_sharing_the_experts_changes_nothing(layouts: list[Layout]) -> None:
    # Everything once, and each layout.
    numbered = [(number, layouts[number % len(layouts)]) for number in range(len(SHARED))]
    if EVERY:
        numbered = [(number, layout) for number in range(len(SHARED)) for layout in layouts]
    cases = [(SHARED[number], layout) for number, layout in numbered]
    cases = [(replace(case, schedule="zb-h1") if layout.pp > 1 else case, layout) for case, layout in cases]
    by_rank = run_ranks(layouts[0].world_size, train_all, cases, timeout_s=110.0)
    for case, (number, layout) in enumerate(numbered):
        for outcomes in by_rank:
            check_equal(outcomes[case], alone(SHARED[number]), layout)
        shared = {shard.count for outcomes in by_rank for shard in outcomes[case].shards.values() if shard.axis == "ep"}
        assert shared == ({layout.ep} if layout.ep > 1 else set())


@pytest.mark.shows(27, 85)
@pytest.mark.parametrize(
    "layouts",
    [[Layout(tp=2)] * 2, [Layout(pp=2, tp=2), Layout(cp=2, tp=2, ep=2)]],
    ids=["two", "four"],
)
def test_ranks_that_share_a_predicting_head_learn_what_one_learns(layouts: list[Layout]) -> None:
    cases = list(zip(PREDICTING[:: 1 if layouts[0].pp == 1 else -1], layouts, strict=True))
    by_rank = run_ranks(layouts[0].world_size, train_all, cases, timeout_s=110.0)
    for number, (case, layout) in enumerate(cases):
        held: set[str] = set()
        for outcomes in by_rank:
            check_equal(outcomes[number], alone(case), layout)
            assert "prediction" in outcomes[number].aux_losses[0][0]
            held |= {name for name in outcomes[number].shards if name.startswith("head.")}
        assert "head.embedding.weight" in held and "head.predictions.0.attention.q.weight" in held


def train_with_padding(rank: int, layout: Layout) -> list[Outcome]:
    """Microbatches of 3, 5, 1, 4, 9 and 7 tokens, which two tensor-parallel ranks divide after padding alone."""
    generator = torch.Generator().manual_seed(6)
    lengths = ((3, 5), (1, 4), (9, 7))
    steps = [[torch.randint(0, 48, (n,), generator=generator) for n in step] for step in lengths]
    experts = replace(LAYOUT_FREE, shared_size=0)
    cases = [Case(experts, num_microbatches=2, precision=Precision.FP64, recompute=way) for way in ("none", "full")]
    return [train(case, layout, steps) for case in cases]


@pytest.mark.shows(47)
def test_padding_changes_neither_routing_nor_its_losses() -> None:
    whole = train_with_padding(0, Layout())
    for outcomes in run_ranks(2, train_with_padding, Layout(tp=2)):
        for found, expected in zip(outcomes, whole, strict=True):
            check_equal(found, expected, Layout(tp=2))
            assert {"sequence_balance", "global_balance", "z"} <= set(found.aux_losses[0][0])
            # What was counted: each expert's share of the last step's 16 tokens, two to each.
            loads = {name: value for name, value in found.parameters.items() if name.endswith("balance.load")}
            assert loads
            for name, load in loads.items():
                assert torch.equal(load, expected.parameters[name])
                tokens = load * 2 * 16 / len(load)
                assert torch.equal(tokens, tokens.round()) and int(tokens.sum()) == 2 * 16


def check_equal(found: Outcome, expected: Outcome, layout: Layout) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-12), layout
    assert found.norms == pytest.approx(expected.norms, rel=1e-12), layout
    for (losses, busiest), (wanted, wanted_busiest) in zip(found.aux_losses, expected.aux_losses, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-12), layout
        assert busiest == wanted_busiest, layout
    for held, whole in (
        (found.gradients, expected.gradients),
        (found.parameters, expected.parameters),
    ):
        assert held
        for name, value in held.items():
            shard = found.shards.get(name)
            wanted = whole[name] if shard is None else shard.of(whole[name])
            scale = float(whole[name].abs().max())
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12 * scale, msg=f"{layout} {name}")
