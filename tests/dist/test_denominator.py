"""One denominator for all ranks, counted exactly before any backward, and gradients that are only summed."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.engine.training import microbatches
from penstock.model import decoder_units
from penstock.settings import ModelConfig, OptimizerConfig, Precision
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
# More than 32 bits hold, and odd, so that a detour over fp32 would show.
LARGE = 2**40 + 1


def batch(dp_rank: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(dp_rank)
    return PackedBatch.from_documents(
        [torch.randint(0, 40, (n,), generator=generator) for n in (5, 3, 8, 4 + 3 * dp_rank)]
    )


def weight(microbatch: PackedBatch) -> float:
    return float(LARGE * microbatch.num_tokens)


def step(rank: int, layout: Layout) -> dict[str, Any]:
    """One step; what the normalisation was told, and each reduction: its operation, and its tensor before and after."""
    options = EngineOptions(
        precision=Precision.FP64, optimizer=OptimizerConfig(clip_norm=0), timeout_s=30.0, device="cpu"
    )
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, layout, options)
    buckets = {b.gradients.data_ptr(): b.gradients for g in engine.trainer.buckets.values() for b in g.buckets}
    totals: list[list[float]] = []
    reductions: list[tuple[str, Tensor, int]] = []
    check_total, all_reduce = microbatches.check_total, dist.all_reduce

    def spy_on_totals(rank_totals: Any, num_dp: int) -> float:
        assert not any(gradients.any() for gradients in buckets.values()), "before any backward"
        totals.append(list(rank_totals))
        return check_total(rank_totals, num_dp)

    def spy_on_sums(tensor: Tensor, op: Any = dist.ReduceOp.SUM, **rest: Any) -> Any:
        if tensor.data_ptr() in buckets:
            reductions.append((str(op), tensor.clone(), tensor.data_ptr()))
        return all_reduce(tensor, op=op, **rest)

    for gradients in buckets.values():
        gradients.zero_()
    microbatches.check_total, dist.all_reduce = spy_on_totals, spy_on_sums
    # The second pipeline needs three microbatches, so the first one divides its batch again.
    split = MicroBatchSpec(num=None, max_tokens=11)
    assert (
        engine.train_batch(batch(engine.grid.dp_rank), loss_weight_fn=weight, micro_batches=split).num_microbatches == 3
    )
    engine.close()
    return {
        "totals": totals,
        "ops": [op for op, *_ in reductions],
        "before": [before for _, before, _ in reductions],
        "after": [buckets[place].clone() for *_, place in reductions],
        "num_buckets": len(buckets),
    }


@pytest.mark.shows(26)
def test_gradients_are_summed_over_one_exact_count_that_every_stage_knows() -> None:
    layout = Layout(pp=2, dp=2)
    ranks = run_ranks(4, step, layout)
    exact = [float(LARGE * batch(dp).num_tokens) for dp in range(2)]
    assert all(float(int(total)) == total > 2**44 for total in exact)
    for found in ranks:
        assert found["totals"] == [exact], "also where no label is seen"
        assert len(found["ops"]) == found["num_buckets"] >= 1
        assert all("SUM" in op for op in found["ops"])
    for pp in range(2):
        first, second = (ranks[layout.rank_of(dp=dp, pp=pp)] for dp in range(2))
        for left, right, *sums in zip(first["before"], second["before"], first["after"], second["after"], strict=True):
            assert left.any() and right.any()
            assert all(torch.equal(found, left + right) for found in sums), "a plain sum, to the bit"
