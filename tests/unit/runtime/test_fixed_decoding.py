"""Decoding over shapes that never change: what a CUDA graph would replay, run as it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Engine, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import CachedRows, CacheSize, KVCache, SlotRows, decoder_units
from penstock.model.attention.kernels import AttentionKernel
from penstock.runtime import Boundary, DecodeForm, DecodeLoop, FixedDecoder, Stage
from penstock.schedule import BatchItem
from penstock.settings import ModelConfig, Precision
from tests import captured
from tests.generation import CONFIG, load, random_prompts, random_weights

GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.3, top_k=40, top_p=0.95, raw_log_probs=True)
SLOTS = range(4, 8)


def make(config: ModelConfig = CONFIG, precision: Precision = Precision.FP32) -> Engine:
    engine = Engine(decoder_units(config), config.hidden_size, options=EngineOptions(precision=precision, device="cpu"))
    load(engine.parameters(), random_weights(config))
    return engine


def params(kind: SamplingParams, count: int) -> list[SamplingParams]:
    """Answers of many lengths, several to a prompt, so that rows die, copy prompts and are refilled."""
    return [replace(kind, seed=i, num_samples=1 + i % 3, max_new_tokens=3 + 5 * (i % 4)) for i in range(count)]


def decoders(engine: Engine) -> list[FixedDecoder]:
    every = (decoder for decoders in engine.generator.decoders.by_form.values() for decoder in decoders)
    return [decoder for decoder in every if isinstance(decoder, FixedDecoder)]


@pytest.mark.shows(72)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP64])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_live_rows_alone(
    kind: SamplingParams, window: int | None, precision: Precision
) -> None:
    prompts = random_prompts()
    engine = make(replace(CONFIG, sliding_window=window), precision)
    for options in (
        GenerateOptions(),
        GenerateOptions(num_slots=2, rows_per_slot=3, prefill_tokens=5),
        GenerateOptions(num_slots=3, rows_per_slot=2, refill=False, prefill_tokens=1),
    ):
        expected = engine.generate(prompts, params(kind, len(prompts)), options)
        found = engine.generate(prompts, params(kind, len(prompts)), replace(options, decode="all-rows"))
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert len({answer.tokens for answer in found}) >= len(prompts)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine.log_probs), torch.tensor(theirs.log_probs), rtol=0, atol=1e-5)
    assert decoders(engine)[0].num_shapes > 0, "nothing was decoded so"


def stage() -> Stage:
    weights, modules = random_weights(), []
    for unit in decoder_units(CONFIG)[1:]:
        module = unit.build()
        load({unit.full_name(name): p for name, p in module.named_parameters()}, weights)
        modules.append((unit.name, module))
    return Stage(1, modules, Boundary(CONFIG.hidden_size, torch.float32))


@contextmanager
def decoder_of_slot(num_tokens: int = 128) -> Iterator[FixedDecoder]:
    """A stage's decoder whose cache holds something in every row."""
    own = stage()
    caches = own.new_caches(CacheSize(8, num_tokens, torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    for cache in caches:
        if isinstance(cache, KVCache):
            for store in (cache.keys, cache.values_RGLK):
                store.copy_(torch.randn(store.shape, generator=generator))
    with torch.inference_mode():
        yield FixedDecoder(own, caches, num_tokens)


def visit(row_starts: dict[int, int]) -> CachedRows:
    return CachedRows.of([BatchItem(row, row, start, 1, True) for row, start in row_starts.items()])


def inputs(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.shows(72)
def test_rows_that_do_not_live_neither_disturb_others_nor_lose_what_they_hold() -> None:
    x = inputs(2)
    with decoder_of_slot() as first, decoder_of_slot() as second:
        expected = first.decode(x, visit({4: 9, 7: 30}), SLOTS)
        dead = [row for row in range(8) if row not in (4, 7)]
        kept, clean = ([c for c in decoder.caches if isinstance(c, KVCache)] for decoder in (second, first))
        second.decode(inputs(4, 2), visit({4: 3, 5: 3, 6: 3, 7: 3}), SLOTS)
        second.decode(inputs(1, 3), visit({5: 20}), SLOTS)
        for cache, like in zip(kept, clean, strict=True):
            for store, other in ((cache.keys, like.keys), (cache.values_RGLK, like.values_RGLK)):
                store[[4, 7]] = other[[4, 7]]
                store[dead] = torch.nan
        assert torch.equal(second.decode(x, visit({4: 9, 7: 30}), SLOTS), expected)
        assert expected.isfinite().all()
        everything = slice(None), slice(0, 128)
        before = [cache.keys_of(*everything).clone() for cache in clean]
        first.decode(x, visit({4: 10, 7: 31}), SLOTS)
        changed = {
            (row, position)
            for old, cache in zip(before, clean, strict=True)
            for row, position in (old != cache.keys_of(*everything)).any(-1).any(1).nonzero().tolist()
        }
        # Rows without life write at the very end, which no sequence ever reads.
        assert changed - {(5, 127), (6, 127)} == {(4, 10), (7, 31)}


def test_what_a_lost_row_has_computed_from_is_gone_from_every_computation() -> None:
    with decoder_of_slot() as decoder:
        spoilt = inputs(2)
        spoilt[0] = torch.nan
        for position in (3, 100):
            decoder.decode(spoilt, visit({4: position, 5: position}), SLOTS)
        assert decoder.num_shapes == 2
        # Row 4 has a new sequence, and no life of its own until its prompt is read.
        items = BatchItem(5, 5, 101, 1, True), BatchItem(9, 4, 0, 3, False, cleaned=101)
        decoder.decode(inputs(4), CachedRows.of(items), SLOTS)
        decoder.decode(inputs(1), visit({5: 102}), SLOTS)
        assert decoder.decode(inputs(2), visit({4: 3, 5: 103}), SLOTS).isfinite().all()


class Operations(TorchDispatchMode):
    """What is computed, with the shapes of all tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        self.seen.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@pytest.mark.shows(72)
def test_every_visit_computes_the_same_operations_on_the_same_shapes_and_waits_for_no_value() -> None:
    seen = []
    with decoder_of_slot() as decoder:
        for number, live in enumerate(({4: 9, 5: 2, 6: 63, 7: 1}, {5: 40}, {4: 10, 7: 31})):
            x, rows = inputs(len(live), number), visit(live)
            decoder.decode(x, rows, SLOTS)
            (fixed,) = decoder._shapes.values()
            with Operations() as operations:
                fixed.run()
            seen.append(operations.seen)
        assert seen[0] == seen[1] == seen[2] and len(seen[0]) > 10 * CONFIG.num_layers
        waits = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal.default")
        assert not [name for name, _ in seen[0] if any(wait in name for wait in waits)]


@pytest.mark.shows(72)
def test_one_computation_a_slot_and_power_of_two_reused_from_call_to_call() -> None:
    engine, prompts = make(), random_prompts([4, 3, 60, 5])
    options = GenerateOptions(num_slots=2, rows_per_slot=2, decode=DecodeForm.ALL_ROWS)
    short = replace(GREEDY, max_new_tokens=8)
    first = [answer.tokens for answer in engine.generate(prompts, short, options)]
    [decoder] = decoders(engine)
    # Both slots look at 64 tokens at first, one of them at 128 later.
    assert decoder.num_shapes == 3
    places = [(fixed.x.data_ptr(), fixed.positions.data_ptr()) for fixed in decoder._shapes.values()]
    assert [answer.tokens for answer in engine.generate(prompts, short, options)] == first
    assert decoders(engine) == [decoder]
    assert [(fixed.x.data_ptr(), fixed.positions.data_ptr()) for fixed in decoder._shapes.values()] == places


@pytest.mark.shows(72)
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_are_captured_before_a_message_is_awaited_and_draw_the_tokens_of_eager_rows(
    kind: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events, prompts = make(), [], random_prompts([4, 3, 60, 5])
    own, options = params(kind, len(prompts)), GenerateOptions(num_slots=2, rows_per_slot=2, prefill_tokens=16)
    eager = engine.generate(prompts, own, replace(options, decode="all-rows"))
    run = DecodeLoop.run
    captured.on_the_cpu(monkeypatch, events)
    monkeypatch.setattr(DecodeLoop, "run", lambda loop: (events.append("run"), run(loop)))
    engine.generator.decoders.captures = True
    found = engine.generate(prompts, own, replace(options, decode="graphs"))
    # Each slot may look at 64 tokens, and at 128.
    assert events == ["capture"] * 4 + ["run"]
    assert [answer.tokens for answer in found] == [answer.tokens for answer in eager]
    assert [answer.log_probs for answer in found] == [answer.log_probs for answer in eager]
    engine.generate(prompts, own, replace(options, decode="graphs"))
    assert events[5:] == ["run"]
    engine.generate(prompts, own, replace(options, decode="graphs", rows_per_slot=3))
    assert events[6:] == ["capture"] * 4 + ["run"]


@pytest.mark.shows(72)
def test_a_capture_writes_where_no_sequence_reads() -> None:
    with decoder_of_slot() as decoder, pytest.MonkeyPatch.context() as patch:
        captured.on_the_cpu(patch, [])
        decoder.capture_stream = torch.cuda.Stream()
        caches = [cache for cache in decoder.caches if isinstance(cache, KVCache)]
        before = [[store[:, :, :127].clone() for store in (cache.keys, cache.values_RGLK)] for cache in caches]
        decoder.prepare([SLOTS])
        assert decoder.num_shapes == 2
        for cache, stores in zip(caches, before, strict=True):
            assert torch.equal(cache.keys[:, :, :127], stores[0])
            assert torch.equal(cache.values_RGLK[:, :, :127], stores[1])


@pytest.mark.shows(72)
def test_memory_is_given_back_on_demand_and_taken_anew() -> None:
    engine, prompts = make(), random_prompts([4, 3])
    options = GenerateOptions(decode="graphs")  # without CUDA nothing is captured
    before = [answer.tokens for answer in engine.generate(prompts, GREEDY, options)]
    [decoder] = decoders(engine)
    assert decoder.num_shapes == 1 and not decoder.captures
    engine.release_caches()
    assert decoders(engine) == [] and decoder.num_shapes == 0
    assert [answer.tokens for answer in engine.generate(prompts, GREEDY, options)] == before


@pytest.mark.shows(72)
def test_weights_that_training_changes_in_place_are_those_that_decode() -> None:
    fixed, live = make(), make()
    prompts, options = random_prompts([4, 3, 7]), GenerateOptions(decode="all-rows")
    batch = PackedBatch.from_documents([torch.randint(0, 97, (n,), generator=torch.manual_seed(0)) for n in (9, 12)])
    found = []
    for _ in range(2):
        found.append([answer.tokens for answer in fixed.generate(prompts, SAMPLED, options)])
        assert found[-1] == [answer.tokens for answer in live.generate(prompts, SAMPLED)]
        for engine in (fixed, live):
            engine.train_batch(batch, micro_batches=MicroBatchSpec(num=1))
    [decoder] = decoders(fixed)
    assert decoder.num_shapes == 1
    assert found[0] != found[1]


def test_a_window_leaves_every_row_something_to_look_at() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(CacheSize(2, 256, torch.float32, torch.device("cpu")), 2, 8)
    rows = SlotRows(0, 64, torch.tensor([6, 255]))
    k, v = torch.randn(2, 2, 2, 8, generator=generator)
    rows.write(cache, k, v)
    q = torch.randn(2, 4, 8, generator=generator)
    assert AttentionKernel(4, 2, 8, window=3).cached(q, k, v, cache, rows).isfinite().all()
