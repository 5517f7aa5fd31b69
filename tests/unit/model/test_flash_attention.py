"""What attention asks of a GPU's flash kernels, with a formula in their place: values, gradients, numbers of calls."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Engine, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation import generator
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.rehearsal.place import RehearsedPlace
from penstock.model import CachedRows, CacheSize, Sequences, SlotRows, decoder_units, devices, spare_position
from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.cpu.fixed_tiles import TiledAttention
from penstock.model.cuda.flash import FlashAttention, FlashCache
from penstock.model.devices import use_kernels_of
from penstock.model.kv_cache import KVCache, Rows
from penstock.model.layers.dense import AttentionBlock
from penstock.runtime import Boundary
from penstock.schedule import BatchItem
from penstock.settings import ModelConfig
from tests import captured, flash_reference
from tests.attention_reference import PACKINGS, assert_equal_to_masked, inputs, masked_attention


class Flash(FlashAttention):
    """Takes any dtype, as the formula does."""

    def takes(self, dtype: torch.dtype) -> bool:
        return True


@pytest.fixture(autouse=True)
def formula() -> Iterator[None]:
    with flash_reference.on_the_cpu():
        yield


@pytest.mark.shows(207)
@pytest.mark.parametrize("lengths", PACKINGS, ids=str)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_output_and_gradients_equal_the_masked_reference(
    lengths: tuple[int, ...], num_kv_heads: int, window: int | None
) -> None:
    assert_equal_to_masked(Flash(4, num_kv_heads, 8, window), lengths)


@pytest.mark.shows(207)
def test_queries_and_keys_that_autocast_norms_in_fp32_are_as_narrow_as_the_values() -> None:
    q, k, v = inputs(15, 4, 2, torch.float32)
    q, k = (x.detach().to(torch.bfloat16).float().requires_grad_() for x in (q, k))
    out = FlashAttention(4, 2, 8).packed(q, k, v.to(torch.bfloat16), Sequences.from_lengths((5, 1, 9)))
    assert out.dtype == torch.bfloat16
    exact = masked_attention(q.double(), k.double(), v.double(), (5, 1, 9), None)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)
    assert [x.dtype for x in torch.autograd.grad(out.sum(), (q, k))] == [torch.float32] * 2


# ---- over the KV cache


def cached(kernel: Flash, texts: list[Tensor], batches: list[list[BatchItem]]) -> list[list[Tensor]]:
    """The means that each text gets in these batches: row by row, in parts.

    texts: queries, keys and values side by side [L, H + 2 G, K], by row of the cache.
    """
    heads = [kernel.num_heads, kernel.num_kv_heads, kernel.num_kv_heads]
    cache = kernel.new_cache(CacheSize(len(texts), 64, torch.float64, torch.device("cpu")))
    for store in (cache.keys, cache.values_RGLK):
        # What no row sees is no number.
        store.fill_(torch.nan)
    found: list[list[Tensor]] = [[] for _ in texts]
    for items in batches:
        rows = CachedRows.of(items)
        q, k, v = torch.cat([texts[item.row][item.start : item.end] for item in items]).split(heads, 1)
        rows.write(cache, k, v)
        for item, part in zip(items, kernel.cached(q, k, v, cache, rows).split([item.length for item in items])):
            found[item.row].append(part)
    return found


@pytest.mark.shows(207)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_rows_that_are_read_in_any_parts_have_the_means_of_whole_texts(num_kv_heads: int, window: int | None) -> None:
    lengths, chooser = (40, 17, 1, 9), random.Random(0)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randn(n, 4 + 2 * num_kv_heads, 8, generator=generator, dtype=torch.float64) for n in lengths]
    read, batches = [0] * len(texts), []
    while unread := [row for row, text in enumerate(texts) if read[row] < len(text)]:
        items = []
        for row in chooser.sample(unread, chooser.randint(1, len(unread))):
            length = min(chooser.choice((1, 1, 4, 11)), len(texts[row]) - read[row])
            items.append(BatchItem(row, row, read[row], length, sampled=True))
            read[row] += length
        batches.append(sorted(items, key=lambda item: item.length > 1))
    assert any(len({item.length for item in items}) > 1 for items in batches)
    kernel = Flash(4, num_kv_heads, 8, window)
    for text, parts in zip(texts, cached(kernel, texts, batches), strict=True):
        q, k, v = text.split([4, num_kv_heads, num_kv_heads], 1)
        expected = masked_attention(q, k, v, (len(text),), window)
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.shows(207)
@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_a_slot_have_the_means_of_live_rows_and_dead_ones_are_finite(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    kernel = Flash(4, 2, 8, window)
    cache = kernel.new_cache(CacheSize(6, 128, torch.float64, torch.device("cpu")))
    assert isinstance(cache, FlashCache)
    assert [x.data_ptr() for x in cache.rows_in_one()] == [x.data_ptr() for x in (cache.keys, cache.values_RGLK)]
    for store in (cache.keys, cache.values_RGLK):
        store.copy_(torch.randn(store.shape, generator=generator, dtype=torch.float64))
    q, k, v = (torch.randn(4, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    places = {0: 63, 2: 0, 3: 40}
    positions = [places.get(row, spare_position(128)) for row in range(4)]
    rows = SlotRows(2, 64, torch.tensor(positions))
    rows.write(cache, k, v)
    found = kernel.cached(q, k, v, cache, rows)
    alive = torch.tensor(list(places))
    items = CachedRows.of([BatchItem(row, 2 + row, start, 1, True) for row, start in places.items()])
    assert torch.equal(found[alive], kernel.cached(q[alive], k[alive], v[alive], cache, items))
    assert found.isfinite().all()


@pytest.mark.shows(207)
@pytest.mark.parametrize("form", ["live-rows", "all-rows"])
def test_an_engine_draws_the_tokens_of_attention_row_by_row(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(97, 32, 64, 2, 4, num_kv_heads=2, max_length=128, sliding_window=20)
    prompts = [list(range(1, 1 + n)) for n in (30, 3, 1, 50, 11)]
    options = GenerateOptions(num_slots=2, rows_per_slot=2, prefill_tokens=8, decode=form)
    found = []
    for kind in (BlockedAttention, Flash):
        monkeypatch.setattr(devices, "BlockedAttention", kind)
        engine = Engine(decoder_units(config), config.hidden_size, device="cpu")
        found.append(engine.generate(prompts, SamplingParams(max_new_tokens=30, temperature=1.0), options))
        (cache, *_) = (c for own in engine.generator.decoders.caches.values() for c in own if c is not None)
        assert isinstance(cache, FlashCache) is (kind is Flash)
        engine.close()
    plain, flash = found
    assert [answer.tokens for answer in flash] == [answer.tokens for answer in plain]
    for one, other in zip(flash, plain, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


@pytest.mark.shows(207)
def test_a_slot_is_one_graph_whatever_the_lengths_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config, events = ModelConfig(97, 32, 64, 2, 4, num_kv_heads=2, max_length=512), []
    prompts = [list(range(1, 1 + n)) for n in (30, 3, 1, 90, 11)]
    options = GenerateOptions(num_slots=2, rows_per_slot=2, prefill_tokens=8, decode="all-rows")
    monkeypatch.setattr(devices, "BlockedAttention", Flash)
    engine = Engine(decoder_units(config), config.hidden_size, device="cpu")
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    eager = engine.generate(prompts, params, options)
    captured.on_the_cpu(monkeypatch, events)
    engine.generator.decoders.captures = True
    found = engine.generate(prompts, params, replace(options, decode="graphs"))
    assert events == ["capture"] * 2
    assert [answer.tokens for answer in found] == [answer.tokens for answer in eager]
    assert [answer.log_probs for answer in found] == [answer.log_probs for answer in eager]
    engine.close()


@pytest.mark.shows(207)
def test_under_autocast_keys_and_values_are_kept_in_16_bit_as_products_give_them(monkeypatch: Any) -> None:
    # But for that a CPU widens them.
    monkeypatch.setattr(generator, "cache_dtype", lambda dtype, device: dtype)
    monkeypatch.setattr(devices, "BlockedAttention", FlashAttention)
    config = ModelConfig(97, 32, 64, 2, 4, num_kv_heads=2, max_length=128, qk_norm=True)
    engine = Engine(decoder_units(config), config.hidden_size, device="cpu", precision="bf16-autocast")
    answers = engine.generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=5, temperature=0))
    caches = [c for own in engine.generator.decoders.caches.values() for c in own if c is not None]
    assert [(type(cache), cache.keys.dtype) for cache in caches] == [(FlashCache, torch.bfloat16)] * 2
    assert [len(answer.tokens) for answer in answers] == [5, 5]
    engine.close()


# ---- the calls


class Attentions(TorchDispatchMode):
    """Counts attentions by operation and the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[Any, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        # The plain formula, which PyTorch takes where no kernel does, ends in a softmax.
        if "attention" in name or name in ("_softmax", "_safe_softmax"):
            self.shapes[name, *(tuple(x.shape) for x in args if isinstance(x, Tensor))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> Counter[str]:
        names: Counter[str] = Counter()
        for (name, *_), count in self.shapes.items():
            names[name] += count
        return names


def block(head_dim: int = 64, window: int | None = None) -> AttentionBlock:
    """A layer of attention in 16 bit, without data."""
    config = ModelConfig(32, 2 * head_dim, 64, 1, 2, num_kv_heads=1, max_length=512, sliding_window=window)
    with torch.device("meta"):
        (module,) = (m for m in (unit.build() for unit in decoder_units(config)) if isinstance(m, AttentionBlock))
    return module.to(torch.bfloat16)


@pytest.mark.shows(207)
@pytest.mark.parametrize("window", [None, 100])
def test_a_microbatch_of_many_lengths_is_one_call_each_way(window: int | None) -> None:
    module = block(window=window)
    use_kernels_of(torch.device("meta"), module)
    lengths = (100, 200, 70, 50, 51, 300, 64, 64, 33, 1)
    x = torch.zeros(sum(lengths), 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Attentions() as attentions:
        module(x, Sequences.from_lengths(lengths, "meta")).sum().backward()
    assert attentions.names == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}


def decoded(module: AttentionBlock, num_rounds: int, form: str) -> Attentions:
    """The attentions of a layer that decodes eight rows of unequal lengths, round by round."""
    starts = [100 + 7 * row for row in range(8)]
    cache = module.new_cache(CacheSize(9, 512, torch.bfloat16, torch.device("meta")))
    with Attentions() as attentions, torch.inference_mode():
        for number in range(num_rounds):
            items = [BatchItem(row, row, start + number, 1, sampled=True) for row, start in enumerate(starts)]
            if form == "with a prompt":
                items.append(BatchItem(8, 8, 10 * number, 10, sampled=False))
            rows: Rows = CachedRows.of(items, "meta")
            if form == "all rows":
                rows = SlotRows(0, 256, torch.empty(8, dtype=torch.int64, device="meta"))
            module.decode(torch.empty(rows.num_tokens, 128, dtype=torch.bfloat16, device="meta"), cache, rows)
    return attentions


@pytest.mark.shows(207)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("form", ["live rows", "with a prompt", "all rows"])
def test_a_batch_of_rows_of_any_lengths_is_one_call_whose_shapes_stay(form: str, window: int | None) -> None:
    module = block(window=window)
    if window is None and form == "live rows":
        assert len(decoded(module, 20, form).shapes) >= 20, "PyTorch's own attention has shapes of each length"
    use_kernels_of(torch.device("meta"), module)
    attentions = decoded(module, 20, form)
    assert attentions.names == {"_flash_attention_forward": 20}
    assert len(attentions.shapes) == 1


@pytest.mark.shows(207)
def test_widths_and_dtypes_that_the_kernels_do_not_take_stay_with_pytorch() -> None:
    for module, dtype in ((block(12), torch.bfloat16), (block(264), torch.bfloat16), (block(), torch.float32)):
        use_kernels_of(torch.device("meta"), module.to(dtype))
        x = torch.zeros(9, module.q.weight.shape[1], dtype=dtype, device="meta")
        with Attentions() as attentions:
            assert module(x, Sequences.from_lengths((4, 5), "meta")).dtype == dtype
        assert attentions.names and "_flash_attention_forward" not in attentions.names


@pytest.mark.parametrize(
    ("device", "is_reproducible", "kind"),
    [("cuda", False, FlashAttention), ("cpu", False, BlockedAttention), ("cpu", True, TiledAttention)],
)
def test_a_rehearsal_runs_the_kernels_of_its_device(
    device: Any, is_reproducible: bool, kind: type[AttentionKernel]
) -> None:
    config = ModelConfig(32, 32, 64, 2, 4)
    options = EngineOptions(device=device, reproducible=is_reproducible)
    units, boundary = decoder_units(config), Boundary(config.hidden_size, torch.float32)
    place = RehearsedPlace.of(device)
    stages = place.stages(units, {0: range(len(units))}, boundary, options, place.device)
    blocks = [module for _, module in stages[0].units if isinstance(module, AttentionBlock)]
    assert [type(module.attention) for module in blocks] == [kind] * 2


def test_on_rocm_whose_kernels_refuse_numbers_of_keys_the_cache_stays_with_pytorch(monkeypatch: Any) -> None:
    size = CacheSize(2, 64, torch.bfloat16, torch.device("meta"))
    assert type(FlashAttention(4, 2, 8).new_cache(size)) is FlashCache
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert type(FlashAttention(4, 2, 8).new_cache(size)) is KVCache


@pytest.mark.shows(207)
@pytest.mark.parametrize(("capability", "kind"), [((7, 5), AttentionKernel), ((9, 0), FlashAttention)])
def test_on_a_gpu_that_has_them_flash_kernels_are_chosen_and_cudnn_never_is(
    capability: tuple[int, int], kind: type[AttentionKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module, before = block(), torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        use_kernels_of(torch.device("cuda", 0), module)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert type(module.attention) is kind
    assert (module.attention.num_heads, module.attention.num_kv_heads, module.attention.head_dim) == (2, 1, 64)
