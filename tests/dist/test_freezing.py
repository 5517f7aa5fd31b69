"""A frozen parameter has no gradient, no traffic and no new optimizer state, also when it changes between steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout
from penstock.engine import Engine
from penstock.schedule.recording import CollectiveKind
from penstock.settings import OptimizerConfig, ParameterGroup
from tests.covering import EVERY
from tests.dist.launch import run_ranks
from tests.dist.test_any_optimizer import Case, closed, one_step, opened

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
BUILT_IN = OptimizerConfig(learning_rate=0.01, clip_norm=0.0)
MUON = partial(torch.optim.Muon, lr=0.02)
# What is trained in each phase of two steps, by the beginnings of full names; the first layer is the whole of stage 0
# where there are many stages.
PHASES: tuple[tuple[str, ...], ...] = (
    ("layers.",),
    ("layers.2.", "layers.3.", "layers.5."),
    ("layers.0.", "layers.2.", "layers.5."),
    ("layers.",),
)
CASES = {
    1: [Case(Layout())],
    2: [Case(Layout(pp=2), "zb-h1"), Case(Layout(dp=2))],
    4: [Case(Layout(pp=2, dp=2), "interleaved"), Case(Layout(pp=4))],
}


def freeze(engine: Engine, trained: tuple[str, ...]) -> None:
    for name, parameter in engine.parameters().items():
        parameter.requires_grad_(name.startswith(trained))


def reduced_bytes(engine: Engine) -> int:
    records = engine.recorder.collective_records()
    return sum(record.num_bytes for record in records if record.kind is CollectiveKind.GRADIENTS)


def phases(rank: int, cases: list[Case], optimizer: Any, follow: bool) -> list[list[dict[str, Any]]]:
    """Of each phase: weights at its end, bytes, and with `follow` what differs from torch's optimizer."""
    return [_phases(case, optimizer, follow) for case in cases]


def _phases(case: Case, optimizer: Any, follow: bool) -> list[dict[str, Any]]:
    engine, found = opened(case, optimizer), []
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in engine.parameters().items()}
    reference = torch.optim.AdamW(theirs.values(), lr=0.01, weight_decay=0.1)
    for trained in PHASES:
        before = {name: p.detach().clone() for name, p in engine.parameters().items()}
        freeze(engine, trained)
        for _ in range(2):
            one_step(engine)
            for name, parameter in theirs.items() if follow else ():
                parameter.grad = engine.gradient(name).clone() if name.startswith(trained) else None
            reference.step()
        after = {name: p.detach().clone() for name, p in engine.parameters().items()}
        frozen = [name for name in after if not name.startswith(trained)]
        held = [name for buckets in engine.trainer.buckets.values() for name in buckets.gradients]
        found.append(
            {
                "weights": after,
                "moved": [name for name in frozen if not torch.equal(before[name], after[name])],
                "still": [name for name in after if name not in frozen and torch.equal(before[name], after[name])],
                "unlike torch": [name for name in after if follow and not torch.equal(after[name], theirs[name])],
                "held": [name for name in held if name in frozen],
                "with gradients": [n for n in frozen if engine.parameters()[n].grad is not None],
                "lost": [
                    n for n in after if not any(k.startswith("optimizer.") and k.endswith(n) for k in engine.state())
                ],
                "bytes": engine.state_bytes(),
                "reduced": reduced_bytes(engine),
                "numel": sum(after[name].numel() for name in after if name not in frozen),
            }
        )
    closed(engine)
    return found


@pytest.mark.shows(107, 162)
@pytest.mark.parametrize("world", CASES)
def test_frozen_parameters_cost_nothing_and_thawed_ones_go_on_as_in_torch(world: int) -> None:
    plain = CASES[world]
    by_rank = run_ranks(world, phases, plain, ADAMW, True, timeout_s=120.0)
    for number in range(len(plain)):
        first, second = (sum(of_rank[number][phase]["bytes"].gradients for of_rank in by_rank) for phase in (0, 1))
        assert second < 0.7 * first
    for of_rank in by_rank:
        assert len(of_rank) == len(plain)
        for case, found in zip(plain, of_rank, strict=True):
            check(case, found, states=2)


def check(case: Case, found: list[dict[str, Any]], states: int) -> None:
    assert len(found) == len(PHASES)
    for phase in found:
        for kind in ("moved", "still", "unlike torch", "held", "with gradients", "lost"):
            assert phase[kind] == [], (case, kind)
        # Each parameter is padded to whole cache lines; counts of steps are one number each.
        least = 4 * phase["numel"]
        assert least <= phase["bytes"].gradients <= 1.05 * least
        assert states * least <= phase["bytes"].optimizer <= 1.05 * states * least + 64
        expected = phase["bytes"].gradients if case.layout.dp > 1 else 0
        assert phase["reduced"] == expected, case


def bits_of(by_rank: list[list[list[dict[str, Any]]]], case: int, phase: int) -> dict[str, Tensor]:
    return {name: w for of_rank in by_rank for name, w in of_rank[case][phase]["weights"].items()}


@pytest.mark.shows(107)
@pytest.mark.parametrize("optimizer", [BUILT_IN, MUON, ADAMW], ids=["built-in", "muon", "adamw"])
def test_freezing_gives_the_same_bits_in_every_layout_and_with_zero(optimizer: Any) -> None:
    pipelines = [Case(Layout(pp=2), schedule) for schedule in (("zb-h1", "zb-v") if EVERY else ("zb-v",))]
    [alone] = run_ranks(1, phases, [Case(Layout())], optimizer, False, timeout_s=60.0)
    cut = run_ranks(2, phases, pipelines, optimizer, False, timeout_s=60.0)
    shared = run_ranks(2, phases, [Case(Layout(dp=2)), Case(Layout(dp=2), zero=True)], optimizer, False, timeout_s=60.0)
    for phase in range(len(PHASES)):
        wanted = bits_of([alone], 0, phase)
        for case in range(len(pipelines)):
            found = bits_of(cut, case, phase)
            assert found.keys() == wanted.keys()
            assert [name for name, w in found.items() if not torch.equal(w, wanted[name])] == []
        off, on = bits_of(shared, 0, phase), bits_of(shared, 1, phase)
        assert [name for name, w in on.items() if not torch.equal(w, off[name])] == []
        totals = [sum(of_rank[case][phase]["bytes"].optimizer for of_rank in shared) for case in (0, 1)]
        assert totals[1] < 0.65 * totals[0]


def resumed_after_thawing(rank: int, cases: list[Case], optimizers: list[Any], folder: Any) -> list[list[str]]:
    """Saved while some are frozen, and once more when all are thawed: what then differs from the run that went on."""
    found = []
    for number, (case, optimizer) in enumerate((case, own) for case in cases for own in optimizers):
        engine, again = opened(case, optimizer), None
        for trained in PHASES:
            freeze(engine, trained)
            if again is not None:
                freeze(again, trained)
                one_step(again)
            one_step(engine)
            if trained in PHASES[2:]:
                engine.save(folder / f"{number} {len(trained)}")
                if again is not None:
                    again.close()
                again = opened(case, optimizer)
                again.load(folder / f"{number} {len(trained)}")
        assert again is not None
        for one in (engine, again):
            one_step(one)
        ours, theirs = engine.parameters(), again.parameters()
        found.append([name for name in ours if not torch.equal(ours[name], theirs[name])])
        closed(engine)
        again.close()
    return found


@pytest.mark.shows(106, 107)
def test_a_run_that_thawed_parameters_is_resumed_bit_for_bit(tmp_path: Any) -> None:
    cases = [Case(Layout(pp=2)), Case(Layout(dp=2), zero=True)]
    found = run_ranks(2, resumed_after_thawing, cases, [BUILT_IN, MUON], tmp_path, timeout_s=90.0)
    assert found == [[[]] * 4] * 2


@pytest.mark.shows(107)
def test_settings_freeze_by_name_patterns() -> None:
    config = replace(
        BUILT_IN, groups=(ParameterGroup("layers.0.*", frozen=True), ParameterGroup("*.3.0.*", frozen=True))
    )
    engine = opened(Case(Layout()), config)
    frozen = {name for name, p in engine.parameters().items() if not p.requires_grad}
    assert frozen == {"layers.0.weight", "layers.3.0.weight"}
    before = {name: p.detach().clone() for name, p in engine.parameters().items()}
    one_step(engine)
    assert {name for name, p in engine.parameters().items() if torch.equal(p, before[name])} == frozen
    assert not [key for key in engine.state() if key.startswith("optimizer.") and key.endswith(tuple(frozen))]


def unequally_frozen(rank: int) -> str:
    engine = opened(Case(Layout(dp=2)), BUILT_IN)
    one_step(engine)
    before = {name: p.detach().clone() for name, p in engine.parameters().items()}
    if rank == 1:
        engine.parameters()["layers.2.0.weight"].requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"layers\.2\.0\.weight requires a gradient on rank 0 and none on rank 1"
    ) as caught:
        one_step(engine)
    assert all(torch.equal(p, before[name]) for name, p in engine.parameters().items())
    engine.parameters()["layers.2.0.weight"].requires_grad_(False)
    one_step(engine)
    assert torch.equal(engine.parameters()["layers.2.0.weight"], before["layers.2.0.weight"])
    return str(caught.value).splitlines()[0]


@pytest.mark.shows(107)
def test_ranks_that_freeze_unequally_are_refused_by_name() -> None:
    first, second = run_ranks(2, unequally_frozen, timeout_s=60.0)
    assert first == second


@pytest.mark.shows(107, 162)
def test_the_built_in_optimizer_counts_the_updates_of_a_thawed_parameter_as_torchs_does() -> None:
    engine = opened(Case(Layout()), BUILT_IN)
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in engine.parameters().items()}
    reference = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for trained in PHASES:
        freeze(engine, trained)
        for _ in range(2):
            one_step(engine)
            for name, parameter in theirs.items():
                parameter.grad = engine.gradient(name).clone() if name.startswith(trained) else None
            reference.step()
    for name, parameter in engine.parameters().items():
        # The built-in AdamW is torch's fused kernel.
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-7)
    engine.close()
