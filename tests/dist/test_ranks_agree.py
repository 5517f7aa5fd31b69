"""A rank that is given something else, or fails beside the program, ends the call on all ranks; the next one works."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from penstock import Engine, EngineOptions, Layout, LearningRate, MicroBatchSpec, OptimizerConfig, PackedBatch
from penstock.data import Split, split
from penstock.engine.training import microbatches
from penstock.model import decoder_units
from penstock.runtime.transport import default_store
from penstock.schedule import Schedule, build
from penstock.schedule.text import to_text
from penstock.settings import ScheduleConfig
from tests.dist.grid_cases import SPARSE
from tests.dist.launch import run_ranks

LAYOUTS = [Layout(dp=2), Layout(pp=2, dp=2)]
BATCH = PackedBatch.from_documents([[1, 2, 3], [4, 5]])


def engine_of(layout: Layout, **options: object) -> Engine:
    torch.manual_seed(0)
    layers = [nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)]
    return Engine.from_layers(layers, 8, layout, EngineOptions(**{"timeout_s": 30.0} | options))  # pyright: ignore[reportArgumentType]


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"gave {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def evaluations(rank: int, layout: Layout) -> list[str]:
    """An iterator that fails on the last rank, and one as it should be."""
    engine, last = engine_of(layout), layout.world_size - 1

    def failing() -> Iterator[PackedBatch]:
        yield BATCH
        if rank == last:
            raise OSError("no such shard")
        yield BATCH

    return [outcome(partial(engine.evaluate, batches)) for batches in (failing(), [BATCH])]


@pytest.mark.shows(112)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batches_to_evaluate_that_fail_on_one_rank_end_the_call_on_all(layout: Layout) -> None:
    results = run_ranks(layout.world_size, evaluations, layout)
    for failed, good in results:
        assert failed.startswith("StepError: rank ") and "OSError: no such shard" in failed
        assert good == results[0][1] and good.startswith("gave 3.")


BATCHES = [PackedBatch.from_documents(documents) for documents in ([[1, 2, 3], [4, 5]], [[6, 7, 8, 9]], [[1, 3, 5]])]


def unequal_evaluations(rank: int, layout: Layout, numbers: list[list[int]]) -> list[str]:
    """Evaluate with the batches of these numbers, by rank, and then with equally many."""
    if layout.ep == 1:
        engine = engine_of(layout)
    else:
        engine = Engine(lambda groups: decoder_units(SPARSE, groups=groups), SPARSE.hidden_size, layout)
    given = ([BATCHES[i] for i in own] for own in (numbers[rank], [0]))
    found = [outcome(partial(engine.evaluate, batches)) for batches in given]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [(Layout(dp=2), [[0, 1], [2]]), (Layout(pp=2, dp=2), [[], [], [0, 1, 2], [0, 1, 2]])],
    ids=str,
)
def test_data_parallel_ranks_may_evaluate_unequal_numbers_of_batches(layout: Layout, numbers: list[list[int]]) -> None:
    [(alone, _)] = run_ranks(1, unequal_evaluations, Layout(), [[0, 1, 2]])
    losses = {first for first, _ in run_ranks(layout.world_size, unequal_evaluations, layout, numbers)}
    # The losses are added up in another order.
    assert len(losses) == 1 and float(losses.pop()[5:]) == pytest.approx(float(alone[5:]), rel=1e-6)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=2), "PipelineError: ranks that share a batch were given different ones, or cut it otherwise: "),
        (Layout(dp=2, ep=2), "ValueError: evaluate was given fewer batches on dp 1 than on others, with which ep = 2 "),
    ],
    ids=str,
)
def test_unequal_numbers_of_batches_that_cannot_be_evaluated_are_refused(layout: Layout, message: str) -> None:
    for first, second in run_ranks(2, unequal_evaluations, layout, [[0, 1], [0]]):
        assert first.startswith(message) and second.startswith("gave ")
        assert layout.ep > 1 or "(dp 0, pp 1, cp 0, tp 0) has no batch left" in first


def differing(rank: int, layout: Layout) -> dict[str, str]:
    """What is said where the last rank, or every second one, is given something else; by the field that is named."""
    is_last, is_odd = rank == layout.world_size - 1, rank % 2 == 1

    def order(ranks: int, microbatches: int) -> Schedule:
        return build("1f1b", ranks=ranks, microbatches=microbatches)

    if is_odd:

        def order(ranks: int, microbatches: int) -> Schedule:
            return build("afab", ranks=ranks, microbatches=microbatches)

    # The same path, from another folder.
    os.chdir(tempfile.mkdtemp())
    Path("order.txt").write_text(to_text(order(layout.pp, 4)))
    factory = lambda groups: torch.optim.SGD(groups, lr=0.1)  # noqa: E731
    given: dict[str, dict[str, object]] = {
        "optimizer.learning_rate": {"optimizer": OptimizerConfig(LearningRate(0.2 if is_last else 0.1))},
        "optimizer.clip_norm": {"optimizer": OptimizerConfig(clip_norm=0.2 if is_last else 0.1)},
        "optimizer.": {"optimizer": factory if rank else "sgd"},
        "precision": {"precision": "bf16" if rank else "fp32"},
        "measure_lengths": {"measure_lengths": (4, 4) if is_last else None},
        "schedule.cut": {"schedule": ScheduleConfig(cut=(1, 2) if rank else (2, 1))},
        "schedule": {"schedule": "afab" if rank else "1f1b"},
        "schedule, by its text": {"schedule": "order.txt"},
        "schedule, by its text (": {"schedule": order},
    }
    return {field: outcome(partial(engine_of, layout, **options)) for field, options in given.items()}


@pytest.mark.shows(113)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_with_different_rules_of_learning_are_refused(layout: Layout) -> None:
    first, *others = run_ranks(layout.world_size, differing, layout)
    assert all(other == first for other in others)
    for field, said in first.items():
        assert said.startswith(f"ConfigError: ranks were given different settings: {field}"), (field, said)


def layouts(rank: int) -> str:
    return outcome(lambda: engine_of(Layout(dp=2) if rank else Layout(pp=2)))


def test_ranks_with_different_layouts_are_refused() -> None:
    results = run_ranks(2, layouts)
    assert len(set(results)) == 1
    assert results[0].startswith("ValueError: rank 0 was given dp=1 x pp=2") and "but rank 1 dp=2 x pp=1" in results[0]


def calls(rank: int, folder: str, layout: Layout) -> list[str]:
    """A call of rank 0 alone beside a step or a save of the other, and then a step of both."""
    engine, found = engine_of(layout), []
    of_rank_0 = {
        "save": lambda: engine.save(folder),
        "load": lambda: engine.load(folder),
        "timeline": engine.timeline,
        "save_hf": lambda: engine.save_hf(f"{folder}/exported"),
        "save_adapter": lambda: engine.save_adapter(folder),
    }
    for name, call in of_rank_0.items():
        for other in ("train_batch", "save"):
            if name != other:
                theirs = of_rank_0.get(other, lambda: engine.train_batch(BATCH))
                found.append(outcome(call if rank == 0 else theirs))
                found.append(outcome(lambda: engine.train_batch(BATCH).num_tokens))
    return found


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2)], ids=str)
def test_a_call_of_one_rank_alone_beside_another_is_refused_and_the_next_step_works(
    layout: Layout, tmp_path: Path
) -> None:
    for found in run_ranks(2, calls, str(tmp_path / "run"), layout):
        for alone, step in zip(found[::2], found[1::2], strict=True):
            assert alone.startswith("DifferentCalls: all ranks make the same calls in the same order, but rank 0")
            assert step == f"gave {5 * layout.dp}"


def waiting_alone(rank: int) -> list[str]:
    """Calls that the other rank never makes, as behind `if rank == 0`."""
    engine = engine_of(Layout(pp=2), timeout_s=2.0)
    store = default_store()
    if rank:
        store.wait(["rank 0 is done"])
        return []
    found = [outcome(engine.timeline)]
    store.set("rank 0 is done", "")
    return found


def test_a_call_that_no_other_rank_makes_ends_when_the_time_is_up_and_says_which() -> None:
    [alone], _ = run_ranks(2, waiting_alone)
    assert alone.startswith(
        "TransportError: rank 0, step 0: while the ranks begin timeline, which all ranks call: gave up after "
    )


def layers_by_rank(rank: int) -> list[str]:
    ends = nn.Embedding(16, 8), nn.Linear(8, 16)
    middles = ([nn.Linear(8, 8) for _ in range(2 - rank)], [nn.Linear(8, 8, bias=rank == 0)])
    lists = [[ends[0], *middle, ends[1]] for middle in middles]
    return [outcome(partial(Engine.from_layers, layers, 8, Layout(pp=2))) for layers in lists]


def test_ranks_with_different_lists_of_layers_are_refused() -> None:
    for number, other in run_ranks(2, layers_by_rank):
        said = "ConfigError: ranks were given different settings: the parameters of "
        assert number == f"{said}layers.2 ('72' on rank 0, '144' on rank 1); give all the same"
        assert other == f"{said}layers.1 ('72' on rank 0, '64' on rank 1); give all the same"


def disagreeing_about_messages(rank: int) -> list[str]:
    """Ranks that would expect other messages of each other: other widths, dtypes, lengths; then a step."""

    def backwards(*arguments: Any) -> Split:
        parts = split(*arguments)
        return replace(parts, microbatches=parts.microbatches[::-1])

    batch, parts = PackedBatch.from_documents([[1, 2, 3, 4], [4, 5], [6]]), MicroBatchSpec(num=2)
    layers = [nn.Embedding(16, 8).to(torch.float64 if rank else torch.float32), nn.Linear(8, 16)]
    units = lambda groups: decoder_units(SPARSE, groups=groups)  # noqa: E731
    engine = engine_of(Layout(pp=2))
    with mock.patch.object(microbatches, "split", backwards if rank else split):
        lengths = outcome(lambda: engine.train_batch(batch, micro_batches=parts))
    return [
        outcome(lambda: Engine(units, SPARSE.hidden_size + rank, Layout(pp=2))),
        outcome(lambda: Engine.from_layers(layers, 8, Layout(pp=2))),
        lengths,
        outcome(lambda: engine.train_batch(batch, micro_batches=parts).num_tokens),
    ]


@pytest.mark.shows(12)
def test_ranks_that_would_expect_other_messages_find_out_where_they_agree() -> None:
    for width, dtype, lengths, good in run_ranks(2, disagreeing_about_messages):
        said = "ConfigError: ranks were given different settings: the message between stages ('Boundary("
        assert width.startswith(f"{said}hidden_size={SPARSE.hidden_size}, ")
        assert f")' on rank 0, 'Boundary(hidden_size={SPARSE.hidden_size + 1}, " in width
        assert dtype.startswith(said) and "dtype=torch.float32, num_sharing=1, is_open=True)' on rank 0, " in dtype
        assert "PipelineError: ranks that share a batch were given different ones, or cut it otherwise: (" in lengths
        assert good == "gave 7"
