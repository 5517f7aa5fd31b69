"""What a user writes into 16-bit weights between steps holds, as in fp32, though the optimizer steps fp32 masters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn

from penstock import Layout, PackedBatch
from penstock.engine import Engine
from penstock.settings import OptimizerConfig, Precision
from tests.dist.launch import run_ranks
from tests.dist.test_any_optimizer import Case, batch_of, closed, one_step, opened

RATE = 0.05
SGD = partial(torch.optim.SGD, lr=RATE)
BUILT_IN = OptimizerConfig(learning_rate=0.01, clip_norm=0.0)
CASES = [Case(Layout(pp=2)), Case(Layout(dp=2)), Case(Layout(dp=2), zero=True)]


def clamped(parameter: nn.Parameter) -> None:
    parameter.clamp_(-0.1, 0.1)


def copied(parameter: nn.Parameter) -> None:
    # A common idiom, which no counter of versions sees.
    parameter.data.copy_(parameter.data * 0.5)


def pointed(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data * 0.9


def begun_anew(parameter: nn.Parameter) -> None:
    nn.init.normal_(parameter.detach(), generator=torch.Generator().manual_seed(3))


EDITS: tuple[Callable[[nn.Parameter], None], ...] = (clamped, copied, pointed, begun_anew)


@torch.no_grad()
def edit(engine: Engine) -> None:
    for name, parameter in engine.parameters().items():
        EDITS[crc32(name.encode()) % len(EDITS)](parameter)


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in engine.parameters().items()}


def edited(rank: int, cases: list[Case], folder: Path) -> list[dict[str, Tensor]]:
    """Weights at the end of a run with edits before its second and third step, saved after the second of them."""
    found = []
    for number, case in enumerate(cases):
        case = Case(case.layout, case.schedule, case.zero, Precision.BF16)
        engine = opened(case, SGD)
        one_step(engine)
        for _ in range(2):
            masters = {n: t for n, t in engine.state().items() if n.startswith("optimizer.master.")}
            before = {n: t.clone() for n, t in masters.items() if isinstance(t, Tensor)}
            edit(engine)
            held = weights(engine)
            assert any(
                not torch.equal(held[n], t.bfloat16())
                for n in held
                if (t := before.get(f"optimizer.master.{n}")) is not None
            )
            engine.save(folder / str(number))
            one_step(engine)
            for name, now in engine.parameters().items() if not case.zero else ():
                master = before[f"optimizer.master.{name}"]
                kept = torch.where(held[name] == master.bfloat16(), master, held[name].float())
                # As by hand: elements that were not changed have all digits of their masters.
                assert torch.equal(now, kept.add(engine.gradient(name), alpha=-RATE).bfloat16()), name
        again = opened(case, SGD)
        again.load(folder / str(number))
        assert all(torch.equal(p, held[name]) for name, p in again.parameters().items())
        one_step(again)
        assert all(torch.equal(p, again.parameters()[name]) for name, p in engine.parameters().items())
        found.append(weights(engine))
        closed(engine)
        again.close()
    return found


@pytest.mark.shows(163)
def test_what_is_written_into_bf16_weights_is_what_the_next_step_begins_with(tmp_path: Path) -> None:
    [[alone]] = run_ranks(1, edited, [Case(Layout())], tmp_path / "one", timeout_s=60.0)
    first, second = run_ranks(2, edited, CASES, tmp_path / "two", timeout_s=90.0)
    cut = first[0] | second[0]
    assert [name for name, weight in alone.items() if not torch.equal(weight, cut[name])] == []
    for of_rank in (first, second):
        assert [name for name, weight in of_rank[1].items() if not torch.equal(weight, of_rank[2][name])] == []


@pytest.mark.shows(163)
def test_weights_that_were_swapped_for_a_while_leave_no_trace() -> None:
    case, trained = Case(Layout(), precision=Precision.BF16), []
    for swaps in (False, True):
        engine = opened(case, BUILT_IN)
        mean = {name: weight.float() for name, weight in weights(engine).items()}
        for _ in range(4):
            one_step(engine)
            for name, weight in engine.parameters().items() if swaps else ():
                mean[name].lerp_(weight.detach().float(), 0.5)
            if swaps:
                own = weights(engine)
                for values in (mean, own):
                    for name, weight in engine.parameters().items():
                        weight.data.copy_(values[name])
                    engine.evaluate([batch_of(engine)])
        trained.append(engine.state())
        engine.close()
    plain, swapped = trained
    assert plain.keys() == swapped.keys()
    for name, values in plain.items():
        assert isinstance(values, Tensor) and torch.equal(values, swapped[name]), name  # type: ignore[arg-type]


@pytest.mark.shows(163)
def test_an_edit_outlasts_a_step_that_fails_and_parameters_that_are_frozen() -> None:
    engine = opened(Case(Layout(), precision=Precision.BF16), SGD)
    one_step(engine)
    edit(engine)
    held = weights(engine)

    def failing(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        raise ArithmeticError("made to fail")

    with pytest.raises(ArithmeticError):
        engine.train_batch(batch_of(engine), failing)
    assert all(torch.equal(p, held[name]) for name, p in engine.parameters().items())
    frozen = "layers.2.0.weight"
    engine.parameters()[frozen].requires_grad_(False)
    one_step(engine)
    with torch.no_grad():
        engine.parameters()[frozen].fill_(0.25)
    engine.parameters()[frozen].requires_grad_(True)
    one_step(engine)
    expected = torch.full_like(held[frozen], 0.25).float().add(engine.gradient(frozen), alpha=-RATE).bfloat16()
    assert torch.equal(engine.parameters()[frozen], expected)
    engine.close()
