"""Tokens per second of generation on a GPU: one answer at a time from a model of a billion parameters.

With graphs and without. At batch 1 every token reads all weights once, so the used share of the memory's bandwidth
bounds any further gain. The bandwidth is measured in the same run, by copying a tensor; transformers runs a model of
the same shape.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import main, new_parser, spread
from benchmarks.generate import TRANSFORMERS, Generation, transformers_sides
from penstock.cli.options import Parser
from penstock.engine import Engine, EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import decoder_units
from penstock.runtime import DecodeForm
from penstock.settings import Precision, Quantize, SamplingParams

_COPIED_BYTES = 1 << 30


LLAMA_1B = Generation(
    num_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    vocab_size=128256,
    num_kv_heads=8,
    tie_embeddings=True,
    num_prompts=1,
    prompt_tokens=64,
    new_tokens=128,
    precision=Precision.BF16,
    quantize=Quantize.NONE,
)
"""The shape of Llama 3.2 1B, and one prompt to continue."""


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure every side's tokens per second, in turn in one run, and its share of the memory's bandwidth.

    Raises: ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "this benchmark needs a CUDA device, and this machine shows none; benchmarks.generate needs none"
        )
    generation = LLAMA_1B
    theirs = transformers_sides(generation, "cuda", torch.bfloat16)
    sides = _penstock(generation) | {f"{TRANSFORMERS}, {cache}": generate for cache, generate in theirs.items()}
    num_tokens = generation.num_prompts * generation.new_tokens
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(given.rounds + 1):
        for name, run in sides.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            # The first round compiles, captures and allocates.
            if round_number:
                rates[name].append(num_tokens / (time.perf_counter() - start))
    median = {name: statistics.median(found) for name, found in rates.items()}
    weight_bytes = 2 * sum(unit.num_parameters for unit in decoder_units(generation.config)[1:])
    bandwidth = _copied_bytes_per_s()
    best = max(rate for name, rate in median.items() if name.startswith(TRANSFORMERS))
    return {
        "device": torch.cuda.get_device_name(),
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "tokens_per_s": {
            name: spread(found) | {"share_of_bandwidth": median[name] * weight_bytes / bandwidth}
            for name, found in rates.items()
        },
        "graphs_over_live_rows": median["penstock, graphs"] / median["penstock, live-rows"],
        "graphs_over_transformers": median["penstock, graphs"] / best,
    }


def _penstock(generation: Generation) -> dict[str, Callable[[], object]]:
    options = EngineOptions(precision=generation.precision, device="cuda", learns=False)
    engine = Engine(decoder_units(generation.config), generation.hidden_size, options=options)
    prompts = generation.prompts(generation.num_prompts)
    greedy = SamplingParams(max_new_tokens=generation.new_tokens, temperature=0)

    def side(form: DecodeForm) -> Callable[[], object]:
        return lambda: engine.generate(prompts, greedy, GenerateOptions(decode=form))

    return {f"penstock, {form}": side(form) for form in DecodeForm}


def _copied_bytes_per_s() -> float:
    """Bytes read and written per second when copying a tensor too large for any cache; the median of ten copies."""
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


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("generate_gpu", __doc__, "--rounds 5")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("generate_gpu"))
