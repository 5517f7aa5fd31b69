"""Generation on a GPU: one answer at a time from a model of a billion parameters, with graphs and without.

At batch 1 every token reads all weights once, so the share of the memory's bandwidth says how much is left to win. The
bandwidth is measured in the same run, by copying a tensor; transformers runs a model of the same shape.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine import Engine, EngineOptions, Precision
from penstock.engine.generate import GenerateOptions
from penstock.model import ModelConfig, SamplingParams, decoder_units

_COPIED_BYTES = 1 << 30


@dataclass(frozen=True)
class GpuGeneration:
    """The shape of Llama 3.2 1B in bf16, and what it continues."""

    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 128
    num_rounds: int = 3

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            tie_embeddings=True,
            max_length=self.prompt_tokens + self.new_tokens,
        )

    @property
    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (self.prompt_tokens,), generator=generator).tolist()


def check_gpu() -> None:
    """Refuse a machine without a GPU.

    Raises:
        ValueError: saying what is possible there.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "--parts gpu needs a CUDA device, and this machine shows none; transformers, refill and emulated run here"
        )


def on_gpu(generation: GpuGeneration) -> dict[str, Any]:
    """Tokens per second of every side, in turn in one run, and the share of the memory's bandwidth that it reads."""
    check_gpu()
    sides = _penstock(generation) | _transformers(generation)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(generation.num_rounds + 1):
        for name, run in sides.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            # The first round compiles, captures and allocates.
            if round_number:
                rates[name].append(generation.new_tokens / (time.perf_counter() - start))
    median = {name: statistics.median(found) for name, found in rates.items()}
    weight_bytes = 2 * sum(unit.num_parameters for unit in decoder_units(generation.config)[1:])
    bandwidth = _copied_bytes_per_s()
    best = max(rate for name, rate in median.items() if name.startswith("transformers"))
    return {
        "device": torch.cuda.get_device_name(),
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "tokens_per_s": {
            name: {
                "median": median[name],
                "range": [min(found), max(found)],
                "share_of_bandwidth": median[name] * weight_bytes / bandwidth,
            }
            for name, found in rates.items()
        },
        "graphs_over_live_rows": median["penstock, graphs"] / median["penstock, live-rows"],
        "graphs_over_transformers": median["penstock, graphs"] / best,
    }


def _penstock(generation: GpuGeneration) -> dict[str, Callable[[], object]]:
    options = EngineOptions(precision=Precision.BF16, device="cuda", learns=False)
    engine = Engine(decoder_units(generation.config), generation.hidden_size, options=options)
    greedy = SamplingParams(max_new_tokens=generation.new_tokens, temperature=0)

    def side(form: str) -> Callable[[], object]:
        return lambda: engine.generate([generation.prompt], greedy, GenerateOptions(decode=form))

    return {f"penstock, {form}": side(form) for form in ("graphs", "all-rows", "live-rows")}


def _transformers(generation: GpuGeneration) -> dict[str, Callable[[], object]]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    ours = generation.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        max_position_embeddings=ours.max_length,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).eval()
    given = torch.tensor([generation.prompt], device="cuda")

    @torch.inference_mode()
    def generate(cache: str | None) -> None:
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=generation.new_tokens,
            min_new_tokens=generation.new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        assert made.shape[1] == generation.prompt_tokens + generation.new_tokens

    return {
        "transformers, growing cache": lambda: generate(None),
        "transformers, static cache": lambda: generate("static"),
    }


def _copied_bytes_per_s() -> float:
    """Bytes read and written a second by copying a tensor that fits no cache; the median of ten copies."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * _COPIED_BYTES / statistics.median(times[2:])
