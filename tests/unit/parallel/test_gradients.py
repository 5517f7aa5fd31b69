"""Gradient buckets on one rank: what they hold equals plain autograd, whatever is done around them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.rehearsal.counted import CountedGroup, TrafficCount
from penstock.engine.rehearsal.units import without_values
from penstock.parallel import GradientBuckets

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ACCUMULATED_IN = {torch.float64: torch.float64}
SHAPES = {
    "wide.weight": (7, 13),
    "norm.weight": (13,),
    "cube": (2, 3, 5),
    "empty": (0, 4),
    "line": (16,),
    "one": (1, 1),
}


def _make(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def _loss(parameters: dict[str, nn.Parameter], microbatch: int) -> Tensor:
    terms = [(p * (i + microbatch + 1)).sin().sum() for i, p in enumerate(parameters.values())]
    return torch.stack(terms).sum()


def _by_autograd(parameters: dict[str, nn.Parameter], num_microbatches: int) -> dict[str, Tensor]:
    """Sum each microbatch's gradients, as autograd alone gives them, in at least fp32."""
    sums = {n: torch.zeros(p.shape, dtype=ACCUMULATED_IN.get(p.dtype, torch.float32)) for n, p in parameters.items()}
    for microbatch in range(num_microbatches):
        gradients = torch.autograd.grad(_loss(parameters, microbatch), list(parameters.values()))
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.add_(gradient)
    return sums


@pytest.mark.shows(36, 91)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_accumulate_in_fp32_and_equal_autograds(dtype: torch.dtype) -> None:
    parameters = _make(dtype)
    expected = _by_autograd(_make(dtype), 3)
    buckets = GradientBuckets(list(parameters.items()))
    for microbatch in range(3):
        _loss(parameters, microbatch).backward()
    for name, gradient in expected.items():
        assert buckets.gradients[name].dtype == gradient.dtype
        assert torch.equal(buckets.gradients[name], gradient), name
        assert parameters[name].grad is buckets.gradients[name]


@pytest.mark.parametrize("dtype, cap_bytes", list(itertools.product(DTYPES, (0, 256, 25 * 2**20))), ids=str)
def test_parameters_and_gradients_are_aligned_views_at_equal_places_and_values_stay(
    dtype: torch.dtype, cap_bytes: int
) -> None:
    parameters, before = _make(dtype), _make(dtype)
    buckets = GradientBuckets(list(parameters.items()), cap_bytes=cap_bytes)
    for bucket in buckets.buckets:
        assert bucket.parameters.shape == bucket.gradients.shape and bucket.parameters.ndim == 1
        for name, view in bucket.views(bucket.parameters).items():
            assert torch.equal(parameters[name], before[name])
            assert parameters[name].data_ptr() == view.data_ptr()
            for flat in (view, bucket.views(bucket.gradients)[name]):
                assert (flat.storage_offset() * flat.element_size()) % 64 == 0
            with torch.no_grad():
                parameters[name].fill_(1)
        assert bucket.parameters.sum() == sum(v.numel() for v in bucket.views(bucket.parameters).values())


@pytest.mark.shows(36)
def test_buckets_fill_in_order_up_to_their_cap_and_an_oversized_parameter_is_alone() -> None:
    sizes = [100, 200, 30_000, 16, 16, 5_000, 4_000]
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(1, size))) for i, size in enumerate(sizes)]
    buckets = GradientBuckets(parameters, cap_bytes=36_000)
    held = [[place.name for place in bucket.places] for bucket in buckets.buckets]
    assert held == [["p0", "p1"], ["p2"], ["p3", "p4", "p5"], ["p6"]]
    for bucket in buckets.buckets:
        assert bucket.gradients.nbytes <= 36_000 or len(bucket.places) == 1


@pytest.mark.shows(209)
def test_on_a_device_buckets_grow_with_the_ranks_that_sum_them() -> None:
    def num_buckets(num_ranks: int, device: str) -> int:
        group = CountedGroup(0, tuple(range(num_ranks)), "dp", TrafficCount())
        with without_values():
            parameters = [(f"p{i}", nn.Parameter(torch.empty(10_000_000, 1, device=device))) for i in range(16)]
            return len(GradientBuckets(parameters, group).buckets)

    # 40 million elements, or a million a rank; on a CPU 25 MiB, and these parameters are larger.
    assert [num_buckets(n, "meta") for n in (1, 40, 80, 160)] == [4, 4, 2, 1]
    assert num_buckets(160, "cpu") == 16


@pytest.mark.shows(94)
def test_a_bucket_never_mixes_decay_or_types_and_every_parameter_is_in_one() -> None:
    parameters = [(f"{dtype}.{name}", p) for dtype in DTYPES for name, p in _make(dtype).items()]
    buckets = GradientBuckets(parameters)
    assert len({(bucket.group, bucket.parameters.dtype) for bucket in buckets.buckets}) == len(buckets.buckets) == 8
    for bucket in buckets.buckets:
        for place in bucket.places:
            assert bucket.group == (place.parameter.ndim < 2) and place.parameter.dtype == bucket.parameters.dtype
    assert sorted(place.name for bucket in buckets.buckets for place in bucket.places) == sorted(
        n for n, _ in parameters
    )


@pytest.mark.shows(35)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unused_parameter_has_the_gradient_zero(dtype: torch.dtype) -> None:
    parameters = _make(dtype)
    buckets = GradientBuckets(list(parameters.items()))
    parameters["line"].sum().backward()
    buckets.launch()
    buckets.wait()
    for name in SHAPES:
        assert bool((buckets.gradients[name] == (name == "line")).all()), name


@pytest.mark.shows(34)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_after_a_failed_one_starts_from_zero(dtype: torch.dtype) -> None:
    parameters = _make(dtype)
    expected = _by_autograd(_make(dtype), 1)
    buckets = GradientBuckets(list(parameters.items()))
    failing = parameters["line"].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (_loss(parameters, 7) + parameters["line"].sum()).backward()
    failing.remove()
    buckets.zero_()
    _loss(parameters, 0).backward()
    assert all(torch.equal(buckets.gradients[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_taken_off_between_steps_are_attached_again(dtype: torch.dtype) -> None:
    parameters = _make(dtype)
    expected = _by_autograd(_make(dtype), 2)
    buckets = GradientBuckets(list(parameters.items()))
    for parameter in parameters.values():
        parameter.grad = None
    buckets.zero_()
    for microbatch in range(2):
        _loss(parameters, microbatch).backward()
    assert all(torch.equal(buckets.gradients[name], gradient) for name, gradient in expected.items())


def test_parameters_that_require_no_gradient_are_left_alone() -> None:
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    storage = frozen.data_ptr()
    buckets = GradientBuckets([("frozen", frozen), ("trained", trained)])
    assert list(buckets.gradients) == ["trained"] and frozen.data_ptr() == storage
