"""Rows without a label get no final norm, no logits and no loss, and nothing else changes.

The reference of bits is a plain loop in one process that takes the labelled rows of the last layer's output by
indexing. That of layouts whose ranks share layers is one process with a loss that asks for all rows, in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch, PerToken, labelled_rows, token_scores
from penstock.data import NO_LABEL, split
from penstock.engine.cut import cut_units, times_here
from penstock.model import Numbers, Sequences, cross_entropy_sum, decoder_units, token_log_probs
from penstock.model.linear import Linear
from penstock.schedule import Placement, PlacementKind
from penstock.settings import ModelConfig, OptimizerConfig, Precision
from penstock.settings.run import from_values
from tests.covering import pairs_of
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(43, 16, 24, num_layers=3, num_heads=4, num_kv_heads=2)
# Tokens of each text, and the places of those with a label: an answer, scattered ones, none at all, and all.
TEXTS = [(12, range(9, 12)), (7, range(0, 7, 3)), (9, ()), (5, range(5)), (11, range(1, 2)), (6, range(6))]
PARTS = MicroBatchSpec(num=4)
# Of sums in another order, in fp64.
TOLERANCE = 1e-12


def batch_of(texts: Any = TEXTS) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    tokens, labels, weights = [], [], []
    for length, answer in texts:
        tokens.append(torch.randint(0, 43, (length,), generator=generator))
        labels.append(torch.full((length,), NO_LABEL))
        labels[-1][list(answer)] = torch.randint(0, 43, (len(answer),), generator=generator)
        weights.append(torch.rand(length, generator=generator))
    steps = [weight[1:] for weight in weights]
    numbers = [[float(number)] for number in range(len(texts))]
    return PackedBatch.from_sequences(
        {"tokens": tokens, "labels": labels, "weights": weights, "steps": steps, "numbers": numbers}
    )


def labelled_of(labels: Tensor) -> Tensor:
    """The rows that count, of all where hardly any has no label, and one where none has any."""
    rows = (labels != NO_LABEL).nonzero().squeeze(1)
    if 10 * len(rows) > 9 * len(labels):
        return torch.arange(len(labels))
    return rows if len(rows) else torch.tensor([0])


def of_all_rows(output: Any, microbatch: PackedBatch) -> Tensor:
    """The default loss, as one of a user's own that says nothing."""
    return cross_entropy_sum(output, microbatch["labels"])


DEFAULT_AND_OWN: list[list[Any]] = [[], [of_all_rows]]
"""The arguments that give a step its loss."""


def counted(engine: Engine) -> list[int]:
    """The numbers of rows that enter the projection from now on, where this rank has it."""
    seen: list[int] = []
    for stage in engine.pipeline.model.stages.values():
        name, unit = stage.units[-1]
        if name == "head":
            assert isinstance(unit.projection, Linear)
            unit.projection.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    return seen


# ---- bits: stages alone


def steps_of(rank: int, cases: list[tuple[Any, ...]], pp: int) -> list[Any]:
    found = []
    for schedule, recompute, precision in cases:
        optimizer = OptimizerConfig(clip_norm=0)
        options = EngineOptions(schedule, recompute=recompute, precision=precision, optimizer=optimizer, timeout_s=60.0)
        engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=pp), options)
        seen = counted(engine)
        result = engine.train_batch(batch_of(), micro_batches=PARTS)
        gradients = {name: engine.gradient(name).clone() for name in engine.parameters()}
        found.append((result.loss, gradients, seen))
        engine.close()
        engine.grid.close()
    return found


@cache
def plainly(precision: Precision) -> tuple[float, dict[str, Tensor], list[int]]:
    """Loss, gradients, and by microbatch the number of rows that count."""
    units = decoder_units(CONFIG)
    modules = [unit.build() for unit in units]
    dtype = torch.float32 if precision is Precision.FP32 else torch.bfloat16
    for unit, module in zip(units, modules, strict=True):
        unit.initialise(module, 0)
        module.to(dtype)
    weight = float((batch_of()["labels"] != NO_LABEL).sum())
    named = {f"{u.name}.{n}": p for u, m in zip(units, modules, strict=True) for n, p in m.named_parameters()}
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in named.items()}
    losses, counts = [], []
    for microbatch in split(batch_of(), PARTS).microbatches:
        h, sequences = microbatch["tokens"], Sequences.from_lengths(microbatch.sequence_lengths())
        for module in modules[:-1]:
            h = module(h, sequences)
        rows = labelled_of(microbatch["labels"])
        counts.append(len(rows))
        logits = modules[-1](h if len(rows) == len(h) else h[rows], sequences)
        loss = cross_entropy_sum(logits, microbatch["labels"][rows]) * (1.0 / weight)
        loss.backward()
        losses.append(loss.detach())
        for name, parameter in named.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
                parameter.grad = None
    return float(torch.stack(losses).sum()), sums, counts


STAGES: dict[int, list[tuple[Any, ...]]] = {}
SCHEDULES = {1: ("1f1b",), 2: ("1f1b", "zb-h1", "zb-v", "combined-1f1b", "dualpipe-v")}
for pp, number, *ways in pairs_of((1, 2), range(5), ("none", "full"), (Precision.FP32, Precision.BF16)):
    STAGES.setdefault(pp, []).append((SCHEDULES[pp][number % len(SCHEDULES[pp])], *ways))


@pytest.mark.shows(187)
@pytest.mark.parametrize("pp", STAGES)
def test_the_bits_are_those_of_a_loop_that_leaves_the_rows_out(pp: int) -> None:
    by_rank = run_ranks(pp, steps_of, STAGES[pp], pp, timeout_s=120.0)
    for number, (_, recompute, precision) in enumerate(STAGES[pp]):
        loss, gradients, counts = plainly(precision)
        assert 1 in counts and len(set(counts)) > 2
        found: dict[str, Tensor] = {}
        seen: list[int] = []
        for rank in range(pp):
            assert by_rank[rank][number][0] == loss
            found |= by_rank[rank][number][1]
            seen += by_rank[rank][number][2]
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)
        again = 1 if recompute == "none" else 2
        assert sorted(seen) == sorted(counts * again)


# ---- layouts whose ranks share layers or sequences, and further predicted tokens


def shared_step(rank: int, layout: Layout, num_predictions: int, all_rows: bool) -> dict[str, Any]:
    """A step, an evaluation and scores in fp64."""
    config = replace(CONFIG, num_predictions=num_predictions)
    schedule = "zb-h1" if layout.tp == 1 else "combined-1f1b"
    options = EngineOptions(schedule if layout.pp > 1 else "1f1b", precision=Precision.FP64, timeout_s=60.0)
    engine = Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)
    loss, seen = DEFAULT_AND_OWN[all_rows], counted(engine)
    evaluated = engine.evaluate([batch_of()], *loss, micro_batches=PARTS)
    evaluation, seen[:] = list(seen), []
    hook = PerToken(lambda logits, own: {"log_probs": token_log_probs(logits, own["labels"])})
    scores = engine.forward(batch_of(), hook if all_rows else token_scores(), micro_batches=PARTS, broadcast=True)
    scoring, seen[:] = list(seen), []
    result = engine.train_batch(batch_of(), *loss, micro_batches=PARTS)
    found = {
        "loss": result.loss,
        "norm": result.grad_norm,
        "evaluated": float(evaluated),
        "scores": scores["log_probs"],
        "rows": (evaluation, scoring, list(seen)),
        **result.aux_losses.losses,
    }
    engine.close()
    return found


@cache
def alone(num_predictions: int, all_rows: bool) -> Mapping[str, Any]:
    return run_ranks(1, shared_step, Layout(), num_predictions, all_rows)[0]


@pytest.mark.shows(187)
@pytest.mark.parametrize(
    ("layout", "num_predictions"),
    [
        (Layout(), 0),
        (Layout(), 2),
        (Layout(tp=2), 0),
        (Layout(cp=2), 2),
        (Layout(pp=2, tp=2), 2),
        (Layout(cp=2, tp=2), 0),
        (Layout(pp=2, dp=2), 0),
    ],
    ids=str,
)
def test_every_layout_gives_the_numbers_of_all_rows(layout: Layout, num_predictions: int) -> None:
    by_rank = run_ranks(layout.world_size, shared_step, layout, num_predictions, False, timeout_s=90.0)
    expected = alone(num_predictions, True)
    assert len(expected) - num_predictions // 2 == 5 and bool(expected["scores"].any())
    for found in by_rank:
        assert found.keys() == expected.keys()
        for name in found.keys() - {"rows"}:
            difference = torch.as_tensor(found[name]) - torch.as_tensor(expected[name])
            assert float(difference.abs().max()) < TOLERANCE, name
    # Whatever holds the last stage computes few rows, each once, and those of all ranks that share a text are all.
    lengths = [length for length, _ in TEXTS]
    for place, all_rows in enumerate(expected["rows"]):
        assert sum(all_rows) >= sum(lengths)
        computed = [sum(found["rows"][place]) for found in by_rank if found["rows"][place]]
        assert len(computed) == layout.world_size // layout.pp
        assert all(0 < own < 0.65 * sum(all_rows) for own in computed)


# ---- what a loss and a hook are given


def given_to(loss: Any) -> list[tuple[int, PackedBatch]]:
    """The rows of the output and the part that a loss is given, by microbatch."""
    given = []

    def noting(output: Tensor, microbatch: PackedBatch) -> Tensor:
        given.append((len(output), microbatch))
        return of_all_rows(output, microbatch)

    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(), EngineOptions(timeout_s=60.0))
    engine.train_batch(batch_of(), loss(noting), micro_batches=PARTS)
    engine.close()
    return given


@pytest.mark.shows(187)
def test_a_loss_is_given_all_rows_unless_it_says_that_it_reads_labelled_ones() -> None:
    whole, parts = given_to(lambda loss: loss), given_to(labelled_rows)
    assert len(whole) == len(parts) == PARTS.num
    for (num_rows, microbatch), (num_read, part) in zip(whole, parts, strict=True):
        assert num_rows == microbatch.num_tokens
        rows = labelled_of(microbatch["labels"])
        assert num_read == len(rows) == part.num_tokens
        for key in ("tokens", "labels", "weights"):
            assert torch.equal(part[key], microbatch[key][rows])
        assert part.ids == microbatch.ids and torch.equal(part["numbers"], microbatch["numbers"])
        # Row t of "steps" belongs to the step from token t to the next, which the last token has not.
        lengths = microbatch.sequence_lengths()
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        is_last = torch.cat([torch.arange(length) == length - 1 for length in lengths])
        kept = [int(row - numbers[row]) for row in rows if not is_last[row]]
        assert torch.equal(part["steps"], microbatch["steps"][kept])
        counts = [int((numbers[rows][~is_last[rows]] == number).sum()) for number in range(len(lengths))]
        assert part.sequence_lengths("steps") == tuple(counts)


@pytest.mark.shows(187)
def test_where_every_row_has_a_label_nothing_is_gathered_and_no_bit_changes() -> None:
    texts = [(length, range(length)) for length, _ in TEXTS]
    outcomes = []
    for loss in DEFAULT_AND_OWN:
        engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(), EngineOptions(timeout_s=60.0))
        seen = counted(engine)
        result = engine.train_batch(batch_of(texts), *loss, micro_batches=PARTS)
        feeds = [
            engine.pipeline.feed(m, Numbers(0, 1, 1), lambda output, own, _: of_all_rows(output, own), labelled=True)
            for m in split(batch_of(texts), PARTS).microbatches
        ]
        assert all(feed.sequences.read_rows is None for feed in feeds) and sum(seen) == sum(n for n, _ in TEXTS)
        outcomes.append((result.loss, {name: engine.gradient(name).clone() for name in engine.parameters()}))
        engine.close()
    (loss, gradients), (other, others) = outcomes
    assert loss == other and all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.shows(187)
def test_scores_of_entropies_and_hooks_without_a_mark_have_all_rows() -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(), EngineOptions(timeout_s=60.0))
    seen, num_tokens = counted(engine), sum(length for length, _ in TEXTS)
    few = engine.forward(batch_of(), token_scores(), micro_batches=PARTS)
    assert sum(seen) < 0.65 * num_tokens
    seen.clear()
    both = engine.forward(batch_of(), token_scores(entropies=True), micro_batches=PARTS)
    assert sum(seen) == num_tokens and bool((both["entropies"] > 0).all())
    torch.testing.assert_close(few["log_probs"], both["log_probs"])
    assert torch.equal(few["log_probs"] == 0, batch_of()["labels"] == NO_LABEL)
    seen.clear()
    assert len(engine.forward(batch_of(), PerToken(lambda logits, _: logits.argmax(-1)))) == sum(seen) == num_tokens
    marked = PerToken(labelled_rows(lambda logits, _: logits.argmax(-1) + 1))
    best = engine.forward(batch_of(), marked, micro_batches=MicroBatchSpec(num=1))
    assert torch.equal(best > 0, batch_of()["labels"] != NO_LABEL)
    engine.close()


# ---- the cut into stages


@pytest.mark.shows(187)
def test_the_cut_knows_the_share_of_labels() -> None:
    config = replace(CONFIG, vocab_size=4000, num_layers=8)
    units, two = decoder_units(config), Placement(PlacementKind.LOOP, num_ranks=2)
    whole, few = (EngineOptions(device="cpu", label_share=share) for share in (1.0, 0.05))
    assert len(cut_units(units, two, whole)[1]) < len(cut_units(units, two, few)[1])
    ends, cpu = (units[0], units[-1]), torch.device("cpu")
    # The least of several, since the machine has other things to do.
    head = [
        min(times_here(ends, config.hidden_size, [512], own, cpu).totals[-1] for _ in range(3)) for own in (whole, few)
    ]
    assert head[1] < 0.5 * head[0]
    run = {"output": "none", "model.vocab_size": 43, "data.label_share": 0.05}
    assert EngineOptions.of(from_values(run)).label_share == 0.05
