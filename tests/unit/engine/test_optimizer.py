"""The optimizer against torch's own, per parameter; and its independence of buckets, stages and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.optimizer.optimizer import LossScaler, Optimizer
from penstock.parallel import GradientBuckets
from penstock.settings import LearningRate, OptimizerConfig, WeightDecay

SHAPES = {
    "a.weight": (33, 17),
    "a.bias": (33,),
    "b.weight": (128, 160),
    "norm.weight": (17,),
    "c.weight": (3, 1),
    "d": (50,),
}
# Above and below what torch's kernels hand to one thread at a time.
LARGE = SHAPES | {"large.weight": (300, 517)}
CONFIG = OptimizerConfig(LearningRate(peak=0.01, num_warmup_steps=2), weight_decay=WeightDecay(0.3), clip_norm=0.7)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _values(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _stage(names: list[str], dtype: torch.dtype, cap_bytes: int = 2**20) -> GradientBuckets:
    values = _values(0, LARGE)
    return GradientBuckets([(n, nn.Parameter(values[n].to(dtype))) for n in names], cap_bytes=cap_bytes)


def _set_gradients(stages: list[GradientBuckets], step: int, factor: float = 1.0) -> None:
    values = _values(100 + step, LARGE)
    for stage in stages:
        stage.zero_()
        for name, view in stage.gradients.items():
            view.copy_(values[name] * factor)


def _state(optimizer: Optimizer) -> dict[str, Tensor]:
    states = optimizer.owned_state().items()
    return {name: s.values if s.place is None else s.values.view(s.place.parameter.shape) for name, s in states}


def _train(stages: list[GradientBuckets], config: OptimizerConfig, num_steps: int = 4) -> dict[str, Tensor]:
    optimizer = Optimizer(stages, config)
    for step in range(num_steps):
        _set_gradients(stages, step)
        assert optimizer.step().success
    weights = {name: p.detach().clone() for stage in stages for name, p in stage.parameters.items()}
    return weights | _state(optimizer)


def _rounding(dtype: torch.dtype) -> float:
    """Some ulps for four steps: torch's looped kernels round between operations that fused ones do in one go."""
    return {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]


@pytest.mark.shows(93, 94)
@pytest.mark.parametrize("clip_norm", [0.0, 0.7, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_and_clipping_equal_torchs(dtype: torch.dtype, clip_norm: float) -> None:
    config = OptimizerConfig(CONFIG.learning_rate, 0.8, 0.9, 1e-7, CONFIG.weight_decay, clip_norm)
    ours = _train([_stage(list(SHAPES), dtype)], config)
    theirs = {name: nn.Parameter(value.to(dtype)) for name, value in _values(0).items()}
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.9),
        eps=1e-7,
    )
    for step in range(4):
        for name, gradient in _values(100 + step).items():
            theirs[name].grad = gradient.to(dtype)
        if clip_norm:
            nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        for group in adamw.param_groups:
            group["lr"] = CONFIG.learning_rate(step + 1)  # pyright: ignore[reportCallIssue, reportOptionalCall]
        adamw.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=_rounding(dtype), atol=_rounding(dtype))
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                ours[f"optimizer.{kind}.{name}"],
                adamw.state[parameter][kind],
                rtol=_rounding(dtype),
                atol=_rounding(dtype),
            )


@pytest.mark.shows(93)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_nothing_depends_on_buckets_stages_or_their_order(dtype: torch.dtype, num_threads: int) -> None:
    names = list(LARGE)
    expected = _train([_stage(names, dtype)], CONFIG)
    cuts = [
        [_stage(names, dtype, cap_bytes=0)],
        [_stage(names[::-1], dtype, cap_bytes=90_000)],
        [_stage(names[:2], dtype), _stage([], dtype), _stage(names[2:], dtype)],
        [_stage([name], dtype) for name in names[::-1]],
    ]
    for stages in cuts:
        seen = _train(stages, CONFIG)
        assert seen.keys() == expected.keys()
        assert [name for name in seen if not torch.equal(seen[name], expected[name])] == []


@pytest.mark.shows(93)
def test_the_norm_is_exact_to_float64_also_for_large_parameters() -> None:
    stage = GradientBuckets([("large", nn.Parameter(torch.zeros(1000, 2000)))])
    optimizer = Optimizer([stage], OptimizerConfig())
    gradient = torch.randn(1000, 2000, generator=torch.Generator().manual_seed(1))
    stage.gradients["large"].copy_(gradient)
    expected = math.sqrt(math.fsum((gradient.double() ** 2).flatten().tolist()))
    # A sum of 2 million float64 squares, in whatever order.
    assert optimizer.step().grad_norm == pytest.approx(expected, rel=1e-12)


@pytest.mark.shows(89, 93)
def test_a_tied_copy_is_stepped_but_not_counted() -> None:
    owner, copy = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    stage = GradientBuckets([("owner", owner), ("copy", copy)])
    for gradient in stage.gradients.values():
        gradient.fill_(0.5)
    update = Optimizer([stage], CONFIG, ties={"copy": "owner"}).step()
    assert update.grad_norm == 2.0 and torch.equal(owner, copy) and not torch.equal(owner, torch.ones(4, 4))


@pytest.mark.shows(91)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_parameters_are_rounded_copies_of_fp32_masters(dtype: torch.dtype) -> None:
    config = OptimizerConfig(LearningRate(peak=1e-5), weight_decay=WeightDecay(0.0), clip_norm=0)
    stage, reference = _stage(list(SHAPES), dtype), _stage(list(SHAPES), torch.float32)
    with torch.no_grad():
        for name, parameter in reference.parameters.items():
            parameter.copy_(stage.parameters[name])
    # Steps far below a 16-bit ulp of most weights: without masters nearly all would be lost.
    seen, expected = _train([stage], config, 20), _train([reference], config, 20)
    for name in SHAPES:
        assert torch.equal(seen[f"optimizer.master.{name}"], expected[name])
        assert torch.equal(seen[name], expected[name].to(dtype))


@pytest.mark.shows(163)
def test_a_step_begins_with_what_was_written_past_any_counter_of_versions() -> None:
    stage, untouched = _stage(list(SHAPES), torch.bfloat16), OptimizerConfig(weight_decay=WeightDecay(0.0))
    optimizer = Optimizer([stage], untouched)
    for parameter in stage.parameters.values():
        parameter.data.fill_(2.0)
    stage.zero_()
    assert optimizer.step().success
    assert all(bool((_state(optimizer)[f"optimizer.master.{name}"] == 2.0).all()) for name in SHAPES)
    assert all(bool((parameter == 2.0).all()) for parameter in stage.parameters.values())


@pytest.mark.shows(92, 93)
@pytest.mark.parametrize("clip_norm", [0.0, 0.7])
def test_the_loss_scale_changes_nothing_but_the_gradients_before_the_step(clip_norm: float) -> None:
    config = OptimizerConfig(CONFIG.learning_rate, weight_decay=CONFIG.weight_decay, clip_norm=clip_norm)
    plain, scaled = _stage(list(SHAPES), torch.float16), _stage(list(SHAPES), torch.float16)
    scaler = LossScaler(256.0, num_growth_steps=2)
    one, other = Optimizer([plain], config), Optimizer([scaled], config, scaler=scaler)
    scales = []
    for step in range(5):
        _set_gradients([plain], step)
        _set_gradients([scaled], step, factor=other.loss_scale)
        scales.append(other.loss_scale)
        assert one.step() == other.step()
        assert all(torch.equal(plain.gradients[name], scaled.gradients[name]) for name in SHAPES)
    assert scales == [256.0, 256.0, 512.0, 512.0, 1024.0]
    assert all(torch.equal(plain.parameters[name], scaled.parameters[name]) for name in SHAPES)


@pytest.mark.shows(92)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: torch.dtype, value: float) -> None:
    stage = _stage(list(SHAPES), dtype)
    optimizer = Optimizer([stage], CONFIG)
    _set_gradients([stage], 0)
    first = optimizer.step()
    before = {n: t.clone() for n, t in [*_state(optimizer).items(), *stage.parameters.items()]}
    _set_gradients([stage], 1)
    stage.gradients["c.weight"][1, 0] = value
    skipped = optimizer.step()
    after = {**_state(optimizer), **stage.parameters}
    assert not skipped.success and math.isnan(skipped.grad_norm) and skipped.learning_rate == first.learning_rate
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    _set_gradients([stage], 2)
    later = optimizer.step()
    assert later.success and later.learning_rate == CONFIG.learning_rate(3)  # pyright: ignore[reportCallIssue, reportOptionalCall]


@pytest.mark.shows(92)
def test_a_step_can_be_given_its_absolute_number() -> None:
    stage = _stage(list(SHAPES), torch.float32)
    config = OptimizerConfig(LearningRate(peak=1.0, num_warmup_steps=100))
    optimizer = Optimizer([stage], config)
    assert [optimizer.step(number).learning_rate for number in (40, None, 7)] == [0.4, 0.41, 0.07]


@pytest.mark.shows(96)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_state_and_progress_continue_a_run_bit_for_bit(dtype: torch.dtype) -> None:
    names = list(SHAPES)

    def make(cut: list[list[str]]) -> tuple[list[GradientBuckets], Optimizer]:
        stages = [_stage(part, dtype) for part in cut]
        scaler = LossScaler(2.0, num_growth_steps=2) if dtype is torch.float16 else None
        return stages, Optimizer(stages, CONFIG, scaler=scaler)

    def run(stages: list[GradientBuckets], optimizer: Optimizer, steps: range) -> list[float]:
        rates = []
        for step in steps:
            # The third is skipped, so that the number of steps and that of updates differ.
            _set_gradients(stages, step, math.nan if step == 2 else optimizer.loss_scale)
            rates.append(optimizer.step().learning_rate)
        return rates

    stages, optimizer = make([names])
    run(stages, optimizer, range(4))
    other_stages, other = make([names[3:], names[:3]])
    saved, progress = _state(optimizer), optimizer.progress()
    assert saved.keys() == _state(other).keys()
    for name, view in _state(other).items():
        view.copy_(saved[name])
    if dtype is torch.float32:
        with torch.no_grad():
            for stage in other_stages:
                for name, parameter in stage.parameters.items():
                    parameter.copy_(stages[0].parameters[name])
    other.load_progress(progress)
    assert run(stages, optimizer, range(4, 7)) == run(other_stages, other, range(4, 7))
    ours = {name: p for stage in other_stages for name, p in stage.parameters.items()}
    assert all(torch.equal(ours[name], stages[0].parameters[name]) for name in names)
    assert other.progress() == optimizer.progress()
