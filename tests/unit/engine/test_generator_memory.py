"""What generation keeps: its caches, allocated once, and nothing that grows."""

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock import Engine, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import CachedRows, CacheSize, KVCache, cache_dtype, decoder_units
from penstock.model.cpu.blocked_cache import BlockedAttention, BlockedCache
from penstock.model.cpu.host_memory import lazy_zeros
from penstock.schedule import BatchItem
from penstock.settings import Precision
from tests.generation import CONFIG, load, random_prompts, random_weights

PARAMS = SamplingParams(max_new_tokens=3)


def engine() -> Engine:
    made = Engine(decoder_units(CONFIG), CONFIG.hidden_size)
    load(made.parameters(), random_weights())
    return made


def caches(made: Engine) -> list[KVCache]:
    return [cache for row in made.generator.decoders.caches.values() for cache in row if cache is not None]


def num_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if isinstance(thing, torch.Tensor))


def test_no_memory_grows_over_200_rounds() -> None:
    made, prompts = engine(), random_prompts([5, 2])
    made.generate(prompts, PARAMS)
    kept, counted = [cache.keys.data_ptr() for cache in caches(made)], num_tensors()
    assert len(kept) == CONFIG.num_layers
    for _ in range(200):
        made.generate(prompts, PARAMS)
    assert [cache.keys.data_ptr() for cache in caches(made)] == kept
    assert num_tensors() == counted


def test_released_caches_are_gone_and_made_anew_when_needed() -> None:
    made, prompts = engine(), random_prompts([5, 2])
    before = [answer.tokens for answer in made.generate(prompts, PARAMS)]
    made.release_caches()
    assert caches(made) == []
    assert [answer.tokens for answer in made.generate(prompts, PARAMS)] == before


@pytest.mark.shows(69)
def test_a_cache_is_a_row_a_sequence_and_as_long_as_the_longest_answer() -> None:
    made, prompts = engine(), random_prompts([5, 2, 60])
    made.generate(prompts, SamplingParams(max_new_tokens=30), GenerateOptions(num_slots=2, rows_per_slot=2))
    for cache in caches(made):
        keys, values = cache.keys_of(slice(None), slice(0, 128)), cache.values_RGLK
        # [rows, key heads, tokens rounded up, width of a head]
        assert keys.shape == values.shape == (4, CONFIG.key_heads, 128, CONFIG.head_size)
        assert cache.keys.numel() == values.numel()


@pytest.mark.shows(133)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (4, 90), (7, 200)])
def test_a_cache_takes_the_bytes_that_were_foreseen(precision: Precision, num_rows: int, num_tokens: int) -> None:
    made = Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=EngineOptions(precision=precision, device="cpu"))
    decoders = made.generator.decoders
    foreseen = decoders.cache_bytes(num_rows, num_tokens)
    assert caches(made) == [], "nothing is allocated for the answer"
    decoders.reserve(num_rows, num_tokens)
    taken = sum(values.nbytes for cache in caches(made) for values in (cache.keys, cache.values_RGLK))
    tokens, each = -(-num_tokens // 64) * 64, 4
    heads = CONFIG.num_layers * CONFIG.key_heads * CONFIG.head_size
    assert foreseen == taken == 2 * num_rows * tokens * heads * each


@pytest.mark.shows(215)
def test_a_devices_rows_are_as_many_as_its_free_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = engine().generator.decoders
    row_bytes = decoders.cache_bytes(1, 64)
    assert row_bytes and decoders.room(64) is None, "a CPU's memory is not asked for"
    monkeypatch.setattr(decoders, "device", torch.device("cuda"))
    # 100 rows free, 30 of what torch has reserved unused, and those of a cache from before.
    for name, value in (("mem_get_info", (100 * row_bytes, 0)), ("memory_reserved", 50 * row_bytes)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * row_bytes)
    size = CacheSize(20, 64, torch.float32, torch.device("cpu"))
    decoders.caches = {stage.index: stage.new_caches(size) for stage in decoders.stages}
    assert decoders.room(64) == 120
    assert decoders.room(32) == 120 and decoders.room(128) == 60
    shape = GenerateOptions().shape(1000, 2, room=120)
    assert (shape.num_slots, shape.rows_per_slot) == (2, 60)
    assert GenerateOptions(max_rows_per_slot=5).shape(1000, 2, room=120).rows_per_slot == 5
    assert GenerateOptions().shape(9, 2, room=120).rows_per_slot == 5
    assert GenerateOptions().shape(1000, 2).rows_per_slot == 16


@pytest.mark.shows(215)
def test_all_ranks_take_the_rows_that_the_one_with_the_least_memory_has_room_for() -> None:
    made = engine()
    made.generator.decoders.room = lambda num_tokens: 3  # type: ignore[method-assign]
    answers = made.generate(random_prompts([4] * 7), SamplingParams(max_new_tokens=2))
    assert len(answers) == 7 and {len(cache.keys) for cache in caches(made)} == {3}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.shows(133)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [BlockedCache, partial(KVCache, zeros=lazy_zeros)])
def test_rows_take_the_memory_that_they_are_long(make: Callable[..., KVCache]) -> None:
    before, dtype = resident_bytes(), torch.float32
    cache = make(CacheSize(16, 16384, dtype, torch.device("cpu")), 2, 64)
    for row, length in enumerate([64, 640] * 8):
        new = torch.ones(length, 2, 64, dtype=dtype)
        CachedRows.of([BatchItem(row, row, 0, length, sampled=True)]).write(cache, new, new)
    # Of each row and head, keys and values have whole pages; the tests' own allocations are some megabytes.
    written = 2 * 8 * (64 + 640) * 2 * 64 * dtype.itemsize
    assert written / 2 < resident_bytes() - before < 2 * written + (16 << 20) < cache.num_bytes / 3


@pytest.mark.shows(69)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cuts", [[9], [4, 5], [1] * 9, [3, 1, 1, 4]])
@pytest.mark.parametrize("kind", [BlockedCache, KVCache])
def test_attention_piece_by_piece_is_that_of_the_whole(
    cuts: list[int], window: int | None, kind: type[KVCache]
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=generator) for heads in (4, 2, 2))
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(2, 1)) / 8**0.5
    place = torch.arange(9)
    hidden = (place[None] > place[:, None]) | (place[None] <= place[:, None] - (window or 99))
    expected = torch.einsum(
        "hts,shk->thk", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.repeat_interleave(2, 1)
    )
    cache = kind(CacheSize(3, 16, torch.float32, torch.device("cpu")), 2, 8)
    kernel, found, start = BlockedAttention(4, 2, 8, window), [], 0
    for length in cuts:
        rows = CachedRows.of([BatchItem(0, 1, start, length, sampled=True)])
        part = slice(start, start + length)
        rows.write(cache, k[part], v[part])
        found.append(kernel.cached(q[part], k[part], v[part], cache, rows))
        start += length
    torch.testing.assert_close(torch.cat(found), expected)


@pytest.mark.shows(74)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [70, 300])
def test_rows_that_attend_in_one_call_have_the_bits_of_each_alone(
    num_groups: int, window: int | None, dtype: torch.dtype, start: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    size = CacheSize(7, 320, cache_dtype(dtype, "cpu"), torch.device("cpu"))
    kernel, cache = BlockedAttention(4, num_groups, 32, window), BlockedCache(size, num_groups, 32)
    # What no row sees is no number.
    for store in (cache.keys, cache.values_RGLK):
        store.fill_(torch.nan)
    # Rows 0 to 2 are neighbours and equally long, so are 4 and 5; the last begins a block.
    places = [(0, start), (1, start), (2, start), (4, 9), (5, 9), (6, 128)]
    for row, begin in places:
        k, v = torch.randn(2, begin + 1, num_groups, 32, generator=generator).to(dtype)
        CachedRows.of([BatchItem(0, row, 0, begin + 1, True)]).write(cache, k, v)
    pieces = [BatchItem(i, row, begin, 1, True) for i, (row, begin) in enumerate(places)]
    q = torch.randn(len(pieces), 4, 32, generator=generator).to(dtype)
    nothing = torch.empty(len(pieces), num_groups, 32, dtype=dtype)
    found = kernel.cached(q, nothing, nothing, cache, CachedRows.of(pieces))
    for i, piece in enumerate(pieces):
        alone = kernel.cached(q[i : i + 1], nothing, nothing, cache, CachedRows.of([piece]))
        assert torch.equal(found[i : i + 1], alone)
        seen = slice(max(0, piece.end - (window or 999)), piece.end)
        keys, values = cache.keys_of(piece.row, seen), cache.values_RGLK[piece.row, :, seen]
        k, v = (x.double().repeat_interleave(4 // num_groups, 0) for x in (keys, values))
        weights = ((k @ q[i].double()[..., None])[..., 0] / 32**0.5).softmax(-1)
        exact = (weights[:, None] @ v)[:, 0]
        # Keys and values of 16 bits are kept widened, so only the mean is rounded.
        torch.testing.assert_close(found[i].double(), exact, rtol=5e-3 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [2, 7])
@pytest.mark.parametrize("kind", [BlockedCache, KVCache])
def test_keys_are_written_where_the_items_say(num_rows: int, kind: type[KVCache]) -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [9 + row for row in range(num_rows)]  # so that every row is a run of its own
    items = [BatchItem(row, row, start, 1, True) for row, start in enumerate(starts)]
    # From one block to the next.
    items += [BatchItem(num_rows, num_rows, 60, 7, True)]
    rows, size = CachedRows.of(items), CacheSize(num_rows + 1, 96, torch.float32, torch.device("cpu"))
    cache = kind(size, 2, 8)
    k, v = torch.randn(2, rows.num_tokens, 2, 8, generator=generator)
    rows.write(cache, k, v)
    for store, new in ((cache.keys_of(slice(None), slice(0, 96)), k), (cache.values_RGLK, v)):
        expected = torch.zeros_like(store)
        for token, (row, position) in enumerate(zip(rows.rows_T.tolist(), rows.positions.tolist(), strict=True)):
            expected[row, :, position] = new[token]
        assert torch.equal(store, expected)
