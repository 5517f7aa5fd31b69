"""`engine.forward`: outputs of any type in the order of the batch, on the last stage, one microbatch's at a time.

All cases of a number of ranks run in the same processes, one engine a schedule.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.data import PartitionError, split
from penstock.engine import Engine, EngineOptions
from penstock.engine.pipeline import ContextShards
from penstock.engine.scoring import PerToken, token_scores
from penstock.model import Logits, Sequences, decoder_units, token_log_probs
from penstock.runtime import PipelineError, StepError
from penstock.settings import ModelConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=48, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2)
LENGTHS = (3, 11, 1, 7, 7, 2, 13, 5, 1)
BUDGET = MicroBatchSpec(num=None, max_tokens=16)
SCHEDULES = {
    1: ("1f1b", "interleaved", "zb-v"),
    2: ("1f1b", "interleaved", "zb-v", "dualpipe"),
    3: ("1f1b", "interleaved", "zb-v"),
    4: ("1f1b", "dualpipe"),
}


def batch_of(lengths: tuple[int, ...], seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_documents([torch.randint(0, 48, (n,), generator=generator) for n in lengths])


def make(layout: Layout, schedule: str = "1f1b") -> Engine:
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size, layout, EngineOptions(schedule, timeout_s=30.0))


@torch.no_grad()
def reference(batch: PackedBatch) -> Tensor:
    """The logits of one process that takes one sequence after another."""
    modules = []
    for unit in decoder_units(CONFIG):
        module = unit.build()
        unit.initialise(module, 0)
        modules.append(module)
    logits = []
    for item in batch.unpack():
        h, sequences = item["tokens"], Sequences.from_lengths(item.sequence_lengths())
        for module in modules:
            h = module(h, sequences)
        logits.append(h)
    return torch.cat(logits)


# ---- what the hooks see and what comes back


class Watching:
    """A hook that asks at each call whether the logits of an earlier microbatch still exist."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []
        self.num_alive: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ids: list[Any] = []

    def __call__(self, logits: Tensor, microbatch: PackedBatch) -> Tensor:
        self.num_alive.append(sum(not ref.expired() for ref in self.seen))
        self.seen.append(StorageWeakRef(logits.untyped_storage()))
        self.shapes.append(tuple(logits.shape))
        self.ids += microbatch.ids
        assert logits.shape[0] == microbatch.num_tokens and not logits.requires_grad
        return logits.argmax(-1)


def hooks() -> dict[str, tuple[Callable[[Tensor, PackedBatch], Any], Callable[[list[Any]], Any] | None, Any]]:
    """By the type of result: hook, aggregate, and `output_seqlens`."""
    transitions = [n - 1 for n in LENGTHS]

    def last_of_each(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return logits[torch.tensor(microbatch.item_lengths()).cumsum(0) - 1]

    def first_of_each(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        kept = [piece[:-1] for piece in logits.split(list(microbatch.item_lengths()))]
        return torch.cat(kept)

    def as_list(logits: Tensor, microbatch: PackedBatch) -> list[str]:
        return [f"{number}: {n}" for number, n in zip(microbatch.ids, microbatch.item_lengths(), strict=True)]

    def as_dict(logits: Tensor, microbatch: PackedBatch) -> dict[str, Any]:
        return {"ids": list(microbatch.ids), "best": logits.argmax(-1), "last": last_of_each(logits, microbatch)}

    def as_object(logits: Tensor, microbatch: PackedBatch) -> frozenset[Any]:
        return frozenset(microbatch.ids)

    return {
        "a tensor per token": (lambda logits, microbatch: logits.clone(), None, None),
        "a tensor per sequence": (last_of_each, None, None),
        "a tensor per transition": (first_of_each, None, transitions),
        "a list": (as_list, None, None),
        "a mapping": (as_dict, None, None),
        "an object": (as_object, None, None),
        "an aggregate of tensors": (lambda logits, microbatch: logits.argmax(-1), lambda items: list(items), None),
        "an aggregate of mappings": (as_dict, lambda items: [item["ids"] for item in items], None),
        "an aggregate of objects": (as_object, lambda objects: [set(ids) for ids in objects], None),
        "an aggregate to a number": (as_list, len, None),
    }


def score(rank: int, pp: int) -> list[dict[str, Any]]:
    found = []
    for name in SCHEDULES[pp]:
        engine, batch, watching = make(Layout(pp=pp), name), batch_of(LENGTHS), Watching()
        results = {
            what: engine.forward(batch, hook, aggregate, BUDGET, lengths)
            for what, (hook, aggregate, lengths) in hooks().items()
        }
        found.append(
            {
                "logits": engine.forward(batch, micro_batches=BUDGET),
                "watched": engine.forward(batch, watching, micro_batches=BUDGET),
                "watching": (watching.num_alive, watching.shapes, watching.ids),
                "all in one": engine.forward(batch, token_scores(), micro_batches=MicroBatchSpec(num=1)),
                "broadcast": engine.forward(batch, hooks()["a mapping"][0], micro_batches=BUDGET, broadcast=True),
                "results": results,
                "pending": engine.pipeline.transport.num_pending(),
            }
        )
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(55, 56, 57, 58, 59, 60)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_results_are_in_the_order_of_the_batch_on_the_last_stage(pp: int) -> None:
    by_rank = run_ranks(pp, score, pp)
    batch, parts = batch_of(LENGTHS), split(batch_of(LENGTHS), BUDGET)
    expected = reference(batch)
    items = expected.split(list(LENGTHS))
    assert len(parts.microbatches) > 2 and parts.forward_indices != tuple(range(len(LENGTHS)))
    for number, schedule in enumerate(SCHEDULES[pp]):
        last = 0 if schedule == "zb-v" else pp - 1
        for rank in range(pp):
            found = by_rank[rank][number]
            assert found["pending"] == 0
            assert found["broadcast"]["ids"] == list(batch.ids), "every rank has it"
            assert torch.equal(found["broadcast"]["best"], expected.argmax(-1))
            if rank != last:
                alone = {found["logits"], found["watched"], *found["results"].values(), found["all in one"]}
                assert alone == {None} and found["watching"] == ([], [], [])
                continue
            results = found["results"]
            torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-5)
            assert torch.equal(results["a tensor per token"], found["logits"])
            torch.testing.assert_close(results["a tensor per sequence"], torch.stack([i[-1] for i in items]))
            torch.testing.assert_close(results["a tensor per transition"], torch.cat([i[:-1] for i in items]))
            assert results["a list"] == [f"{i}: {n}" for i, n in enumerate(LENGTHS)]
            assert results["a mapping"]["ids"] == list(batch.ids)
            assert torch.equal(results["a mapping"]["best"], expected.argmax(-1))
            assert torch.equal(results["a mapping"]["last"], results["a tensor per sequence"])
            assert results["an object"] == [frozenset(part.ids) for part in parts.microbatches]
            best = [item.argmax(-1).tolist() for item in items]
            assert [item.tolist() for item in results["an aggregate of tensors"]] == best
            assert results["an aggregate of mappings"] == list(batch.ids)
            assert results["an aggregate of objects"] == [set(part.ids) for part in parts.microbatches]
            assert results["an aggregate to a number"] == len(LENGTHS)
            assert torch.equal(found["watched"], expected.argmax(-1))
            num_alive, shapes, ids = found["watching"]
            assert num_alive == [0] * len(parts.microbatches), "no two microbatches' logits live together"
            assert shapes == [(part.num_tokens, 48) for part in parts.microbatches], "unpadded, each once"
            assert ids == list(parts.forward_indices)
            log_p = expected.log_softmax(-1).gather(1, batch["labels"].clamp(min=0)[:, None]).squeeze(1)
            wanted = torch.where(batch["labels"] < 0, 0, log_p)
            torch.testing.assert_close(found["all in one"]["log_probs"], wanted, rtol=0, atol=1e-5)


# ---- what does not fit


def refuse(rank: int) -> dict[str, Any]:
    engine, batch = make(Layout(pp=2)), batch_of(LENGTHS)
    calls: list[int] = []

    def failing(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        calls.append(len(microbatch.ids))
        if len(calls) == 2:
            raise ZeroDivisionError("made to fail")
        return logits

    def too_few(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        return logits[1:]

    def attempt(hook: Any = None, **options: Any) -> tuple[str, str]:
        try:
            engine.forward(batch, hook, micro_batches=BUDGET, **options)
        except StepError as error:
            return (type(error.__cause__) if rank == 1 else PipelineError).__name__, str(error)
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""

    told = {
        "lengths of another batch": attempt(output_seqlens=[1, 2]),
        "negative lengths": attempt(output_seqlens=[-1] * len(LENGTHS)),
        "lengths that are too small": attempt(output_seqlens=[n - 1 for n in LENGTHS]),
        "rows that fit nothing": attempt(too_few),
        "a failing hook": attempt(failing),
        "an object for all": attempt(lambda logits, microbatch: object(), broadcast=True),
    }
    fine = engine.forward(batch, token_scores(), micro_batches=BUDGET, broadcast=True)
    engine.close()
    return {"told": told, "calls": len(calls), "fine": fine["log_probs"].shape}


@pytest.mark.shows(58)
def test_all_ranks_hear_of_results_that_do_not_fit_and_the_engine_goes_on() -> None:
    first, last = run_ranks(2, refuse)
    for found in (first, last):
        assert found["told"]["lengths of another batch"] == (
            PartitionError.__name__,
            "2 output lengths for 9 items; expected one per item",
        )
        assert found["told"]["negative lengths"][0] == PartitionError.__name__
        assert found["fine"] == (sum(LENGTHS),)
    expected = {
        "lengths that are too small": (PartitionError.__name__, "rows; expected were"),
        "rows that fit nothing": (PartitionError.__name__, "a row per sequence"),
        "a failing hook": ("ZeroDivisionError", "made to fail"),
        "an object for all": ("TypeError", "an object cannot be saved or sent"),
    }
    for what, (kind, text) in expected.items():
        assert last["told"][what][0] == kind and text in last["told"][what][1], what
        assert first["told"][what][0] == PipelineError.__name__, what
        assert "rank 1" in first["told"][what][1] and text in first["told"][what][1], what
    assert (first["calls"], last["calls"]) == (0, 2), "no hook is called after one that failed"


# ---- several pipelines


def score_shards(rank: int) -> Any:
    layout = Layout(pp=2, dp=2)
    engine = make(layout)
    dp = layout.coordinates(rank).dp
    batch = batch_of(((4, 9, 2, 6), (15, 14, 13, 12))[dp], seed=dp)
    counts: list[int] = []

    def hook(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        counts.append(microbatch.num_items)
        return logits.clone()

    logits = engine.forward(batch, hook, micro_batches=BUDGET)
    try:
        engine.forward(batch, micro_batches=BUDGET, output_seqlens=[1] if dp == 1 else None)
    except (PartitionError, PipelineError) as error:
        refused = type(error).__name__
    else:
        refused = ""
    engine.close()
    return logits, len(counts), refused


@pytest.mark.shows(56)
def test_pipelines_take_equally_many_microbatches_of_their_own_batches() -> None:
    found = run_ranks(4, score_shards)
    assert [count for _, count, _ in found] == [0, 4, 0, 4]
    assert [refused for *_, refused in found] == ["PipelineError", "PipelineError", "PartitionError", "PartitionError"]
    for dp, lengths in enumerate(((4, 9, 2, 6), (15, 14, 13, 12))):
        assert found[2 * dp][0] is None
        torch.testing.assert_close(found[2 * dp + 1][0], reference(batch_of(lengths, dp)), rtol=0, atol=1e-5)


# ---- ranks that share a model


@dataclass
class Shared:
    """What one rank finds of a layout.

    rows: of the logits that a hook sees. logits: whole. by_hook: log-probabilities by that hook; by_token: and
    entropies, by a hook that is called per token. widest: of the rows that travelled for the latter. refused: what this
    rank is told when such a hook fails on rank 1 alone.
    """

    rows: list[int]
    logits: Tensor
    by_hook: Tensor
    by_token: dict[str, Tensor]
    widest: int
    refused: str


def score_shared(rank: int, layouts: list[Layout]) -> list[Shared]:
    found, put_together = [], ContextShards.whole
    for layout in layouts:
        engine = Engine(
            lambda groups: decoder_units(CONFIG, groups=groups),
            CONFIG.hidden_size,
            layout,
            EngineOptions(timeout_s=30.0, device="cpu", learns=False),
        )
        rows: list[int] = []
        widths = [0]

        def hook(logits: Logits, microbatch: PackedBatch, rows: list[int] = rows) -> Tensor:
            rows.append(logits.shape[0])
            return token_log_probs(logits, microbatch["labels"])

        def failing(logits: Logits, microbatch: PackedBatch) -> Tensor:
            return torch.zeros(logits.shape[0] - rank)

        def whole(shares: ContextShards, x: Tensor, microbatch: PackedBatch, widths: list[int] = widths) -> Tensor:
            widths.append(x[0].numel())
            return put_together(shares, x, microbatch)

        batch = batch_of(LENGTHS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ContextShards, "whole", whole)
            by_token = engine.forward(batch, token_scores(entropies=True), micro_batches=BUDGET)
        with pytest.raises((ValueError, PipelineError)) as refused:
            engine.forward(batch, PerToken(failing), micro_batches=BUDGET)
        by_hook = engine.forward(batch, hook, micro_batches=BUDGET)
        logits = engine.forward(batch, micro_batches=BUDGET)
        found.append(Shared(rows, logits, by_hook, by_token, max(widths), str(refused.value)))
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(61)
def test_ranks_that_share_tokens_or_vocabulary_score_what_one_process_does() -> None:
    batch, parts = batch_of(LENGTHS), split(batch_of(LENGTHS), BUDGET).microbatches
    assert any(part.num_tokens % 2 for part in parts), "tokens that two ranks cannot share evenly"
    expected = reference(batch)
    log_p = expected.log_softmax(-1)
    wanted = torch.where(batch["labels"] < 0, 0, log_p.gather(1, batch["labels"].clamp(min=0)[:, None]).squeeze(1))
    layouts = [Layout(tp=2), Layout(cp=2)]
    for rank, by_layout in enumerate(run_ranks(2, score_shared, layouts)):
        for found, layout in zip(by_layout, layouts, strict=True):
            assert found.rows == [part.num_tokens for part in parts], "unpadded"
            torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.by_hook, wanted, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.by_token["log_probs"], wanted, rtol=0, atol=1e-5)
            entropies = -(log_p.exp() * log_p).sum(-1)
            torch.testing.assert_close(found.by_token["entropies"], entropies, rtol=0, atol=1e-5)
            # Where ranks share the tokens a number each travels, and no logits do.
            assert found.widest == (1 if layout.cp > 1 else 0)
            assert ("a hook per token gave" if rank else "rank") in found.refused, found.refused
