"""Two pipelines side by side: the gradients of both batches, normalised as asked, as one process sums them."""

import pytest
import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import NO_LABEL, SplitError, split
from penstock.engine import Engine, EngineOptions, ZeroLossWeight
from penstock.model import Sequences, cross_entropy_sum, decoder_units
from penstock.runtime import PipelineError
from penstock.settings import ModelConfig, Normalize, OptimizerConfig, Precision
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, tie_embeddings=True
)
MODES = [mode.value for mode in Normalize]
# fp64 sums of a few hundred terms of size one: rounding stays well below.
TOLERANCE = 1e-12


def engine_of(pp: int, dp: int) -> Engine:
    options = EngineOptions(
        precision=Precision.FP64,
        optimizer=OptimizerConfig(clip_norm=0),
        timeout_s=20.0,
    )
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=pp, dp=dp), options)


def batch_of(dp_rank: int) -> PackedBatch:
    """Unequal token counts; on rank 1 all tokens of the first items are masked, enough for a whole microbatch."""
    generator = torch.Generator().manual_seed(dp_rank)
    lengths = [(9, 4, 7, 5, 3), (12, 8, 8, 2, 6)][dp_rank]
    batch = PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in lengths])
    if dp_rank == 1:
        labels = batch["labels"].clone()
        labels[:12] = NO_LABEL
        return relabelled(batch, labels)
    return batch


def relabelled(batch: PackedBatch, labels: Tensor) -> PackedBatch:
    return PackedBatch.from_data({"tokens": batch["tokens"], "labels": labels}, batch.lengths, batch.ids)


def train_in_all_modes(rank: int, pp: int, dp: int) -> dict[str, tuple[float, dict[str, Tensor]]]:
    found = {}
    for mode in MODES:
        engine = engine_of(pp, dp)
        result = engine.train_batch(batch_of(engine.grid.dp_rank), micro_batches=MicroBatchSpec(num=3), normalize=mode)
        found[mode] = (result.loss, {name: engine.gradient(name).clone() for name in engine.parameters()})
        engine.close()
        engine.grid.close()
    return found


def reference(mode: str, dp: int) -> tuple[float, dict[str, Tensor]]:
    """Written from the definition of each mode, not from the engine's factors."""
    units = decoder_units(CONFIG)
    modules = [(unit.name, unit.build().double()) for unit in units]
    for unit, (_, module) in zip(units, modules, strict=True):
        unit.initialise(module, 0)
    per_rank: list[list[tuple[Tensor, float]]] = []
    for r in range(dp):
        sums = []
        for microbatch in split(batch_of(r), MicroBatchSpec(num=3)).microbatches:
            h, sequences = microbatch["tokens"], Sequences.from_lengths(microbatch.sequence_lengths())
            for _, module in modules:
                h = module(h, sequences)
            loss = cross_entropy_sum(h, microbatch["labels"])
            sums.append((loss, float((microbatch["labels"] != NO_LABEL).sum())))
        per_rank.append(sums)
    every = [pair for sums in per_rank for pair in sums]
    if mode == "global":
        total = torch.stack([loss for loss, _ in every]).sum() / sum(n for _, n in every)
    elif mode == "dp":
        means = [torch.stack([loss for loss, _ in sums]).sum() / sum(n for _, n in sums) for sums in per_rank]
        total = torch.stack(means).mean()
    else:
        total = torch.stack([loss / max(n, 1.0) for loss, n in every]).mean()
    assert any(n == 0 for _, n in every), "the batch must hold an all-masked microbatch"
    total.backward()
    parameters = {f"{name}.{p}": value for name, module in modules for p, value in module.named_parameters()}
    gradients = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    tied = gradients["head.projection.weight"] + gradients["embedding.weight"]
    return float(total.detach()), gradients | {"head.projection.weight": tied, "embedding.weight": tied}


@pytest.mark.shows(21, 22, 23, 24, 28, 89)
@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (2, 2)])
def test_gradients_of_two_pipelines_are_those_of_one_process(pp: int, dp: int) -> None:
    by_rank = run_ranks(pp * dp, train_in_all_modes, pp, dp, timeout_s=60.0)
    for mode in MODES:
        loss, gradients = reference(mode, dp)
        seen = set()
        for rank in by_rank:
            its_loss, its_gradients = rank[mode]
            assert its_loss == pytest.approx(loss, abs=TOLERANCE, rel=0)
            for name, gradient in its_gradients.items():
                assert (gradient - gradients[name]).abs().max() <= TOLERANCE, (mode, name)
            seen |= its_gradients.keys()
        assert seen == gradients.keys()


def refusals(rank: int) -> list[tuple[type, str]]:
    """What a rank raises, by name and text, in turn; between the refusals the engine still works."""
    engine = engine_of(2, 2)
    good = PackedBatch.from_documents([torch.arange(6), torch.arange(4)])
    masked = relabelled(good, torch.full((10,), NO_LABEL))
    other = PackedBatch.from_documents([torch.arange(5), torch.arange(5)])
    single = PackedBatch.from_documents([torch.arange(6)])
    # As many tokens in as many sequences, of other documents.
    alike = PackedBatch.from_documents([torch.arange(6), torch.arange(4)], ids=(7, 8))
    raised = []
    for batch in (
        masked,
        other if engine.grid.rank == 1 else good,
        single if engine.grid.dp_rank == 1 else good,
        alike if engine.grid.rank == 3 else good,
    ):
        try:
            engine.train_batch(batch, micro_batches=MicroBatchSpec(num=2))
        except (ValueError, PipelineError) as error:
            raised.append((type(error), str(error)))
        assert engine.train_batch(good, micro_batches=MicroBatchSpec(num=2)).success
    with pytest.raises(ValueError, match="normalize = 'mean': expected"):
        engine.train_batch(good, normalize="mean")
    with pytest.raises(ZeroLossWeight, match="of the whole batch sum to 0 "):
        engine.train_batch(masked, normalize=10.0)
    with pytest.raises(ZeroLossWeight, match="of all batches sum to 0 "):
        engine.evaluate([masked, masked])
    assert engine.evaluate([masked, good]) == engine.evaluate(good)
    engine.close()
    return raised


@pytest.mark.shows(25, 80, 81)
def test_what_one_rank_cannot_do_no_rank_starts() -> None:
    by_rank = run_ranks(4, refusals, timeout_s=60.0)
    assert by_rank == [by_rank[0]] * 4
    (zero, zero_text), (differing, differing_text), (too_few, too_few_text), (alike, alike_text) = by_rank[0]
    assert zero is ZeroLossWeight and "at least one token must carry loss" in zero_text
    assert differing is PipelineError
    assert "(dp 0, pp 0, cp 0, tp 0) has 2 items" in differing_text
    assert "(dp 0, pp 1, cp 0, tp 0) has 2 items" in differing_text
    assert too_few is SplitError and "2 microbatches" in too_few_text
    assert alike is PipelineError and "(dp 0," not in alike_text
    views = [f"(dp 1, pp {pp}, cp 0, tp 0) has 2 items, 10 tokens, asks for 2 microbatches, digest " for pp in range(2)]
    assert all(view in alike_text for view in views)
