"""Batches and arguments that no engine can use: each is refused on all ranks before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions, GenerateOptions
from penstock.engine.scoring import token_scores
from penstock.model import decoder_units
from penstock.runtime import Executor, PipelineError, StepError
from penstock.settings import ModelConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, max_length=12)
GOOD = ([5, 6, 7, 8], [9, 10, 11], [12, 13], [1, 2, 3])
FEW = SamplingParams(max_new_tokens=3)
Call = Callable[[Engine], object]


def batch_of(*documents: list[int], **keys: Any) -> PackedBatch:
    batch = PackedBatch.from_documents(documents or GOOD)
    for key, value in keys.items():
        batch = batch.with_key(key, value)
    return batch


def changed(key: str, place: int, value: int) -> PackedBatch:
    """The good batch with one number changed."""
    batch = batch_of()
    data = {name: batch[name].clone() for name in batch.keys}
    data[key][place] = value
    return batch.with_data(data)


def with_positions(values: list[int]) -> PackedBatch:
    return batch_of(positions=torch.tensor(values))


def relabelled(labels: Any) -> PackedBatch:
    return PackedBatch.from_sequences({"tokens": GOOD, "labels": labels})


def weighing(value: Any) -> Call:
    return lambda engine: engine.train_batch(batch_of(), loss_weight_fn=lambda microbatch: value)


def batches() -> Iterator[tuple[str, Callable[[], Any], str]]:
    """Kind of mistake, how the batch is made, and what the refusal says; for every method that takes a batch."""
    inside = "the model knows 0 to 39"
    labels = "possible are 0 to 39, and -100 for a token without loss"
    yield "token past the vocabulary", lambda: changed("tokens", 5, 40), f"sequence 1 has 40 at its place 1; {inside}"
    yield (
        "negative token",
        lambda: changed("tokens", 0, -1),
        f"data['tokens']: sequence 0 has -1 at its place 0; {inside}",
    )
    yield "label past the vocabulary", lambda: changed("labels", 4, 40), f"sequence 1 has 40 at its place 0; {labels}"
    yield "label -1", lambda: changed("labels", 8, -1), f"data['labels']: sequence 2 has -1 at its place 1; {labels}"
    yield "sequence past the maximum", lambda: batch_of([1] * 3, [2] * 13), "sequence 1 has 13, past max_length=12"
    yield "position past the maximum", lambda: with_positions([*range(11), 12]), "sequence 3 has 12 at its place 2"
    yield "negative position", lambda: with_positions([-1, *range(11)]), "data['positions']: sequence 0 has -1"
    yield (
        "labels of another length",
        lambda: relabelled([[1] * 4, [2] * 3, [3] * 3, [4] * 2]),
        ("lengths['labels']: sequence 2 has 3, but 2 tokens"),
    )
    yield (
        "positions an item",
        lambda: batch_of().with_key("positions", torch.zeros(4, dtype=torch.int64), "item"),
        ("lengths['positions']: sequence 0 has 1, but 4 tokens"),
    )
    yield (
        "tokens in floating point",
        lambda: PackedBatch.from_sequences({"tokens": [[1.0, 2.0]], "labels": [[1, 2]]}),
        ("data['tokens']: torch.float32; token ids are"),
    )
    yield (
        "labels in floating point",
        lambda: relabelled([[0.5] * n for n in (4, 3, 2, 3)]),
        "data['labels']: torch.float32",
    )
    yield (
        "embeddings as tokens",
        lambda: PackedBatch.from_sequences({"tokens": [torch.zeros(3, 2, dtype=torch.int64)], "labels": [[1, 2, 3]]}),
        "data['tokens']: shape [3, 2]",
    )
    yield "no tokens", lambda: PackedBatch.from_sequences({"ids": GOOD, "labels": GOOD}), "no 'tokens'"
    yield "no labels", lambda: PackedBatch.from_sequences({"tokens": GOOD}), "no 'labels'"
    yield "a dict", lambda: {"tokens": torch.arange(4)}, "batch: a dict; give a PackedBatch"
    yield "a list", lambda: [[1, 2, 3]], "batch: a list; give a PackedBatch"


def arguments() -> Iterator[tuple[str, Call, str]]:
    """Kind of mistake, the call that makes it, and what the refusal says."""
    yield "normalize", lambda e: e.train_batch(batch_of(), normalize="tokens"), "normalize = 'tokens': expected"
    yield "loss", lambda e: e.train_batch(batch_of(), loss_fn="mse"), "loss_fn='mse' is a str"  # type: ignore[arg-type]
    yield "no loss", lambda e: e.train_batch(batch_of(), loss_fn=None), "loss_fn=None is a NoneType"  # type: ignore[arg-type]
    yield "weight", lambda e: e.train_batch(batch_of(), loss_weight_fn=2.0), "loss_weight_fn=2.0 is a float"  # type: ignore[arg-type]
    yield "step 0", lambda e: e.train_batch(batch_of(), step=0), "step = 0 is not the number of a step"
    yield "microbatches", lambda e: e.train_batch(batch_of(), micro_batches=4), "micro_batches=4 is an int"  # type: ignore[arg-type]
    yield "too many", lambda e: e.train_batch(batch_of(), micro_batches=MicroBatchSpec(num=9)), "at most 4 microbatches"
    yield "too long", lambda e: e.train_batch(batch_of(), micro_batches=MicroBatchSpec(max_tokens=3)), "max_tokens=3"
    yield "weight NaN", weighing(float("nan")), "loss_weight_fn gave nan for microbatch 0"
    yield "negative weight", weighing(-1.0), "loss_weight_fn gave -1.0 for microbatch 0"
    yield "no weight", weighing(None), "loss_weight_fn gave a NoneType"
    yield "zero weight", weighing(0.0), "at least one token must carry loss"
    yield "hook", lambda e: e.forward(batch_of(), 5), "post_hook=5 is an int"  # type: ignore[arg-type]
    yield "aggregate", lambda e: e.forward(batch_of(), aggregate_fn="mean"), "aggregate_fn='mean' is a str"  # type: ignore[arg-type]
    yield "lengths", lambda e: e.forward(batch_of(), output_seqlens=[1]), "1 output lengths for 4 items"
    yield "negative lengths", lambda e: e.forward(batch_of(), output_seqlens=[1, -1, 1, 1]), "an output length is -1"
    yield "text", lambda e: e.generate("hello"), "prompts = 'hello': expected list, got str"  # type: ignore[arg-type]
    yield "texts", lambda e: e.generate(["hello"]), "prompts[0] = 'hello': expected list, got str"  # type: ignore[list-item]
    yield "a flat list", lambda e: e.generate([1, 2, 3]), "prompts[0] = 1: expected list, got int"  # type: ignore[list-item]
    yield "half a token", lambda e: e.generate([[1, 2.5]]), "prompts[0][1] = 2.5: expected int, got float"  # type: ignore[list-item]
    yield "text in a prompt", lambda e: e.generate([[1], [2, "3"]]), "prompts[1][1] = '3': expected int, got str"  # type: ignore[list-item]
    yield (
        "params of a dict",
        lambda e: e.generate([[1]], {"temperature": 1}),  # type: ignore[arg-type]
        "expected SamplingParams or list",
    )
    yield "a list of dicts", lambda e: e.generate([[1]], [{}]), "params[0] = {}: expected SamplingParams, got dict"  # type: ignore[list-item]
    yield (
        "options",
        lambda e: e.generate([[1]], options={"refill": True}),  # type: ignore[arg-type]
        "expected GenerateOptions, got dict",
    )
    yield "listener", lambda e: e.generate([[1]], on_token="print"), "on_token='print' is a str"  # type: ignore[arg-type]
    yield (
        "skipped",
        lambda e: e.generate([[1]], FEW, GenerateOptions(skip=frozenset({5}))),
        "skip names the answer 5",
    )


def calls() -> list[tuple[str, Call, str]]:
    found: list[tuple[str, Call, str]] = []
    for name, make, text in batches():
        found.append((f"train_batch: {name}", lambda engine, make=make: engine.train_batch(make()), text))
    for name, make, text in batches():
        hook = token_scores()
        found.append((f"forward: {name}", lambda engine, make=make, hook=hook: engine.forward(make(), hook), text))
    return found + list(arguments())


def answers(engine: Engine, call: Call) -> tuple[str, str]:
    try:
        call(engine)
    except Exception as error:
        return type(error).__name__ if isinstance(error, PipelineError) else "ValueError" * isinstance(
            error, ValueError
        ), str(error)
    return "none", ""


def refusals(rank: int, layout: Layout, only: int | None) -> dict[str, tuple[str, str]]:
    """What each call is answered with; where `only` is given, that rank alone makes the mistake."""
    options = EngineOptions(timeout_s=60.0)
    engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, options)
    run, found = Executor.run, {}

    def forbidden(executor: Executor, feeds: Any) -> Any:
        raise AssertionError("something was computed")

    Executor.run = forbidden  # type: ignore[method-assign]
    good: Call = lambda engine: engine.train_batch(batch_of())  # noqa: E731
    for name, call, _ in calls():
        if only is not None and ("generate" in name or name in OTHERS):
            continue
        found[name] = answers(engine, call if only in (None, rank) else good)
    Executor.run = run  # type: ignore[method-assign]
    loss = engine.train_batch(batch_of()).loss
    assert loss == loss, "the engine goes on"
    engine.close()
    return found


# Of these, a rank's mistake differs from the others' call in its method as well.
OTHERS = {name for name, _, _ in arguments()} - {"normalize", "loss", "microbatches", "weight"} | {
    name for name, _, _ in calls() if name.startswith("forward")
}


@pytest.mark.shows(75, 113)
@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=str)
def test_every_rank_refuses_what_no_engine_can_use(layout: Layout) -> None:
    by_rank = run_ranks(layout.world_size, refusals, layout, None, timeout_s=90.0)
    assert len(list(batches())) + len(list(arguments())) >= 35
    for answered in by_rank:
        for name, _, text in calls():
            kind, refusal = answered[name]
            # Weights are asked for on the last stage alone.
            known = kind == "ValueError" or ("weight" in name and kind == "PipelineError")
            assert known and text in refusal, (name, answered[name])
            assert "\n" not in refusal, "one sentence"


@pytest.mark.shows(113)
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(dp=2)], ids=str)
def test_a_mistake_on_one_rank_is_named_on_all(layout: Layout) -> None:
    first, second = run_ranks(2, refusals, layout, 1, timeout_s=90.0)
    texts = {name: text for name, _, text in calls()}
    assert first.keys() == second.keys() and len(first) >= 20
    for name, (kind, refusal) in first.items():
        assert second[name][0] == "ValueError" and texts[name] in second[name][1], name
        assert kind == "PipelineError" and texts[name] in refusal and "rank 1" in refusal, (name, refusal)


def differing(rank: int, folder: Path) -> dict[str, tuple[str, str]]:
    """What is answered where ranks of one pipeline are called differently, or one with what cannot be."""
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(pp=2), EngineOptions(timeout_s=60.0))
    modes, other = ("global", "dp"), batch_of([5, 6, 7, 8], [9, 10, 11], [12, 13], [1, 2, 4 if rank else 3])
    found = {
        "step": answers(engine, lambda e: e.train_batch(batch_of(), step=2 + rank)),
        "broadcasts": answers(engine, lambda e: e.forward(batch_of(), broadcast="yes" if rank else True)),  # type: ignore[arg-type]
        "path": answers(engine, lambda e: e.save(5 if rank else folder)),  # type: ignore[arg-type]
        "keep": answers(engine, lambda e: e.save(folder, keep="1" if rank else 1)),  # type: ignore[arg-type]
        "load": answers(engine, lambda e: e.load("" if rank else folder)),
        "normalize": answers(engine, lambda e: e.train_batch(batch_of(), normalize=modes[rank])),
        "contents": answers(engine, lambda e: e.train_batch(other)),
        "contents in scoring": answers(engine, lambda e: e.forward(other)),
        "method": answers(engine, lambda e: e.evaluate([batch_of()]) if rank else e.forward(batch_of())),
        "broadcast": answers(engine, lambda e: e.forward(batch_of(), broadcast=bool(rank))),
        "sampling": answers(engine, lambda e: e.generate([[1]], SamplingParams(max_new_tokens=2, seed=rank))),
        "slots": answers(engine, lambda e: e.generate([[1]], FEW, GenerateOptions(num_slots=1 + rank))),
        "rows": answers(engine, lambda e: e.generate([[1], [2]], FEW, GenerateOptions(rows_per_slot=1 + rank))),
    }
    engine.train_batch(batch_of())
    engine.close()
    return found


@pytest.mark.shows(81, 113)
def test_ranks_that_are_called_differently_say_how(tmp_path: Path) -> None:
    wrong = {
        "step": "rank 0 made train_batch(step=2, normalize='global') and rank 1 train_batch(step=3, ",
        "broadcasts": "broadcast = 'yes': expected bool, got str",
        "path": "path = 5: expected str or path, got int",
        "keep": "keep = '1': expected int, got str",
        "load": "path = '' is empty; give a path",
    }
    for rank, answered in enumerate(run_ranks(2, differing, tmp_path, timeout_s=90.0)):
        for name, words in wrong.items():
            text = answered.pop(name)[1]
            assert words in text and (rank or name == "step" or "rank 1" in text), (name, text)
        assert all(kind == "PipelineError" for kind, _ in answered.values())
        assert (
            "rank 0 made train_batch(step=1, normalize='global') and rank 1 train_batch(step=1, normalize='dp')"
            in (answered["normalize"][1])
        )
        for name in ("contents", "contents in scoring"):
            text = answered[name][1]
            assert "ranks that share a batch were given different ones" in text
            assert "pp 0" in text and "pp 1" in text and text.count("contents ") == 2
        assert "rank 0 made forward(broadcast=False) and rank 1 evaluate()" in answered["method"][1]
        assert "forward(broadcast=True)" in answered["broadcast"][1]
        assert "other prompts, parameters or options" in answered["sampling"][1]
        assert "other prompts, parameters or options" in answered["rows"][1]
        assert "num_slots=" in answered["slots"][1]


def generate_from_nan(rank: int, layout: Layout) -> tuple[str, list[tuple[int, ...]]]:
    engine = Engine(
        lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, EngineOptions(timeout_s=60.0)
    )
    params, text = SamplingParams(max_new_tokens=3), ""
    kept = {name: p.detach().clone() for name, p in engine.parameters().items()}
    with torch.no_grad():
        for p in engine.parameters().values():
            p.fill_(float("nan"))
    try:
        engine.generate([[1, 2], [3]], params)
    except (StepError, ValueError) as error:
        text = str(error)
    with torch.no_grad():
        for name, p in engine.parameters().items():
            p.copy_(kept[name])
    tokens = [answer.tokens for answer in engine.generate([[1, 2], [3]], params)]
    engine.close()
    return text, tokens


@pytest.mark.shows(113)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_weights_that_are_not_numbers_generate_nothing(layout: Layout) -> None:
    for text, tokens in run_ranks(layout.world_size, generate_from_nan, layout, timeout_s=60.0):
        assert "are not finite: a weight or an activation is NaN or infinite" in text
        assert all(len(answer) == 3 for answer in tokens)
