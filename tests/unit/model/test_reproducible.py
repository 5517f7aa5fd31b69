"""Layers whose bits for a token depend on its sequence alone: their values, their check, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock import Engine, EngineOptions, Layout, ModelConfig
from penstock.model import Draw, Sequences, cross_entropy_sum, decoder_units, draw_tokens, token_log_probs
from penstock.model.attention.kernels import AttentionKernel
from penstock.model.cpu import fixed_tiles, gate
from penstock.model.cpu.blocked_cache import BlockedAttention
from penstock.model.cpu.reproducible import make_reproducible
from penstock.model.kv_cache import CachedRows, CacheSize
from penstock.schedule import BatchItem
from penstock.settings import CompileMode, ConfigError, ExpertConfig, Precision, Quantize, SamplingParams
from tests.hugging_face import make_model

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_layers": 1,
    "num_heads": 4,
    "max_length": 256,
}


def engine(**options: Any) -> Engine:
    config = ModelConfig(**SIZES)
    return Engine(decoder_units(config), config.hidden_size, Layout(), EngineOptions(device="cpu"), **options)


@pytest.mark.parametrize("heads, groups, width", [(4, 4, 16), (6, 2, 24), (4, 1, 64)])
@pytest.mark.parametrize("lengths", [(300, 1, 31), (128, 128), (5,)])
def test_attention_by_tiles_has_the_values_and_gradients_of_attention(
    heads: int, groups: int, width: int, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    shapes = [(sum(lengths), number, width) for number in (heads, groups, groups)]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    sequences = Sequences.from_lengths(lengths)
    tiled = fixed_tiles.TiledAttention(heads, groups, width).packed(q, k, v, sequences)
    plain = AttentionKernel(heads, groups, width).packed(q, k, v, sequences)
    grad = torch.randn_like(plain)
    # Sums of up to 300 terms around 1, in another order.
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(means, (q, k, v), grad) for means in (tiled, plain))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.shows(128)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("width", [96, 100])
def test_silu_of_each_row_is_that_of_the_row_alone(width: int, num_threads: int) -> None:
    x, threads = 3 * torch.randn(1001, width, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = gate.silu_of_each(x)
        assert all(torch.equal(gate.silu_of_each(row), found) for row, found in zip(x.split(1), together.split(1)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("heads, groups, width", [(4, 4, 16), (6, 2, 24), (8, 4, 64), (3, 1, 128), (9, 1, 16)])
@pytest.mark.parametrize("lengths", [(300, 1, 31, 257, 128), (128, 128, 128, 128), (5,), (64, 63, 65, 129), (700, 20)])
def test_attention_by_tiles_over_a_cache_has_the_values_of_attention(
    heads: int, groups: int, width: int, lengths: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    size = CacheSize(len(lengths), fixed_tiles.rounded_up(max(lengths)), torch.float32, torch.device("cpu"))
    kernels = [kind(heads, groups, width) for kind in (fixed_tiles.TiledAttention, BlockedAttention)]
    caches = [kernel.new_cache(size) for kernel in kernels]
    for row, length in enumerate(lengths):
        keys, values = 2 * torch.randn(2, length, groups, width)
        for cache in caches:
            cache.put(row, slice(0, length), keys, values)
    chunks = [BatchItem(row, row, length - 1, 1, sampled=True) for row, length in enumerate(lengths)]
    # A text that goes on, after single tokens of others.
    if lengths[0] > 20:
        chunks = [*chunks[1:], BatchItem(0, 0, lengths[0] - 20, 20, sampled=True)]
    rows = CachedRows.of(chunks)
    q, k, v = (torch.randn(rows.num_tokens, number, width) for number in (heads, groups, groups))
    tiled, plain = (kernel.cached(q, k, v, cache, rows) for kernel, cache in zip(kernels, caches))
    torch.testing.assert_close(tiled, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.shows(128)
def test_cross_entropy_scores_and_samples_are_of_one_function() -> None:
    torch.manual_seed(0)
    logits, tokens = 5 * torch.randn(40, 131), torch.randint(131, (40,))
    scores = token_log_probs(logits, tokens)
    for row, score in enumerate(scores):
        alone = logits[row : row + 1]
        assert -cross_entropy_sum(alone, tokens[row : row + 1]) == score
    drawn = draw_tokens(logits, [Draw(SamplingParams(), 0, row) for row in range(40)])
    assert torch.equal(drawn.log_probs, token_log_probs(logits, drawn.tokens))


@pytest.mark.shows(128)
@pytest.mark.parametrize("fault", ["one row", "other ends of tensors"])
def test_a_machine_on_which_bits_depend_on_the_batch_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine(reproducible=True).close()
    if fault == "one row":
        monkeypatch.setattr(fixed_tiles, "FEW_ROWS", 1)
        found = r"layers\.0\.attention gives a token other bits"
    else:
        monkeypatch.setattr(gate, "silu_of_each", lambda x: F.silu(x) * (1 + 1e-6 * (len(x) % 2)))
        found = r"layers\.0\.mlp gives a token other bits"
    with pytest.raises(ValueError, match=rf"^reproducible = true is not possible on this machine: {found}.*PyTorch"):
        engine(reproducible=True)


@pytest.mark.shows(128)
@pytest.mark.parametrize(
    "options, told",
    [
        ({"precision": Precision.BF16}, "precision is bf16; possible is fp32"),
        ({"compile": CompileMode.DEFAULT}, "compiled layers"),
        ({"adapter": "folder"}, "LoRA adapters"),
        ({"quantize": Quantize.INT8, "learns": False}, "quantize = int8 changes bits"),
    ],
    ids=str,
)
def test_options_with_other_bits_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^reproducible = true: .*{told}"):
        EngineOptions(reproducible=True, **options)


@pytest.mark.shows(128)
@pytest.mark.parametrize(
    "settings, told",
    [
        ({"sliding_window": 8}, r"layers\.0\.attention sees the last 8 tokens alone"),
        ({"num_predictions": 1}, "head is a MultiTokenHead"),
        ({"experts": {"num_experts": 4, "num_active": 2, "intermediate_size": 16}}, r"layers\.0\.mlp is an Expert"),
    ],
    ids=["window", "further tokens", "experts"],
)
def test_models_with_other_layers_are_refused(settings: dict[str, Any], told: str) -> None:
    if "experts" in settings:
        settings = {"experts": ExpertConfig(**settings["experts"])}
    config = ModelConfig(**SIZES | settings)
    with pytest.raises(ValueError, match=f"^reproducible = true: {told}.*possible"):
        Engine(decoder_units(config), config.hidden_size, Layout(), EngineOptions(device="cpu", reproducible=True))


@pytest.mark.shows(128)
def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^reproducible = true: the device is cuda; possible is cpu$"):
        make_reproducible([], torch.device("cuda"))


@pytest.mark.shows(128)
def test_layers_of_transformers_are_refused(tmp_path: Any) -> None:
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^reproducible = true: .* possible are models of Penstock's own dense"):
        Engine.from_hf(tmp_path, native=False, device="cpu", reproducible=True)
