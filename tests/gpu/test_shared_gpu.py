"""Two ranks that share a GPU by way of host memory do what they do on the CPU: real streams, and real late sends."""

import os
from functools import partial

import pytest

from penstock import Layout
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from tests.dist import grid_cases
from tests.dist.launch import run_ranks
from tests.dist.test_staged import CASES

pytestmark = pytest.mark.gpu

# In fp64, over two steps.
CLOSE = 1e-9


def furthest_apart(rank: int, case: grid_cases.Case) -> float:
    """The largest difference between the losses, norms and weights of this rank on either device."""
    outcomes = []
    for device in ("cpu", "cuda"):
        grid_cases.EngineOptions = partial(EngineOptions, device=device, transport="host")
        outcomes.append(grid_cases.run(case))
    on_cpu, on_gpu = outcomes
    assert on_cpu.answers == on_gpu.answers
    numbers = zip(on_cpu.losses + on_cpu.norms, on_gpu.losses + on_gpu.norms, strict=True)
    weights = [(on_gpu.weights[name].cpu() - weight).abs().max().item() for name, weight in on_cpu.weights.items()]
    return max(*weights, *(abs(one - other) for one, other in numbers))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_a_gpu_train_and_generate_as_on_the_cpu(case: grid_cases.Case) -> None:
    assert max(run_ranks(2, furthest_apart, case, timeout_s=120.0)) < CLOSE


def refusal(rank: int) -> str:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with pytest.raises(ValueError, match="has the same GPU as rank 0") as refused:
        Engine(decoder_units(grid_cases.DENSE), grid_cases.DENSE.hidden_size, Layout(pp=2), device="cuda")
    return str(refused.value)


def test_without_it_two_ranks_on_one_gpu_are_refused() -> None:
    first, second = run_ranks(2, refusal)
    assert first == second
