"""Time of each kind of unit, and of a linear layer's matrix products under each library, on one core.

`gflops` of a unit is its estimated work over its measured time: the closer the units are to each other, the better the
estimate cuts a model into stages. Times are of the processor, not of the clock on the wall; medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import main, new_parser
from penstock.cli.options import Parser
from penstock.model import Sequences, UnitSpec, cross_entropy_sum, decoder_units
from penstock.model.cpu.onednn import OneDnnMatmul
from penstock.model.linear import TORCH, Matmul
from penstock.settings import ModelConfig

LIBRARIES: dict[str, Matmul] = {"torch": TORCH, "onednn": OneDnnMatmul()}


def median_s(run: Callable[[], object], num_runs: int = 15) -> float:
    times = []
    for _ in range(num_runs + 2):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times[2:])


def time_products(library: Matmul, num_tokens: int, num_in: int, num_out: int) -> dict[str, float]:
    """GFLOP/s of each product."""
    x, weight, grad = torch.randn(num_tokens, num_in), torch.randn(num_out, num_in), torch.randn(num_tokens, num_out)
    giga = 2e-9 * num_tokens * num_in * num_out
    return {
        "output": giga / median_s(lambda: library.output(x, weight, None)),
        "input_gradient": giga / median_s(lambda: library.input_gradient(grad, weight)),
        "weight_gradient": giga / median_s(lambda: library.weight_gradient(grad, x)),
    }


def time_unit(unit: UnitSpec, config: ModelConfig, sequences: Sequences) -> dict[str, float]:
    """Milliseconds of forward and backward, with the loss after the head, and the speed they amount to."""
    module = unit.build()
    unit.initialise(module, 0)
    tokens = torch.randint(config.vocabulary, (sequences.num_tokens,))
    x = torch.randn(sequences.num_tokens, config.hidden_size, requires_grad=True)

    def run() -> None:
        y = module(tokens if unit.name == "embedding" else x, sequences)
        loss = cross_entropy_sum(y, tokens) if unit.name == "head" else y.sum()
        loss.backward()

    seconds = median_s(run)
    return {"ms": seconds * 1e3, "gflops": 3e-9 * unit.flops_per_token * sequences.num_tokens / seconds}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Speeds of products, and time and speed of units, by library."""
    torch.set_num_threads(1)
    sequences = Sequences.from_lengths((given.length,) * given.sequences)
    config = ModelConfig(given.vocabulary, given.hidden, given.inner, 1, given.heads, max_length=given.length)
    return {
        "products_gflops": {
            name: time_products(library, sequences.num_tokens, given.hidden, given.inner)
            for name, library in LIBRARIES.items()
        },
        "units": {
            name: {unit.name: time_unit(unit, config, sequences) for unit in decoder_units(config, library)}
            for name, library in LIBRARIES.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print a line for each library's products, and one for each unit."""
    for library, products in result["products_gflops"].items():
        print(f"{library:8}" + "".join(f"{name} {value:.0f} GFLOP/s   " for name, value in products.items()))
    for library, units in result["units"].items():
        for name, values in units.items():
            print(f"{library:8}{name:20}{values['ms']:8.2f} ms  {values['gflops']:6.0f} GFLOP/s estimated")


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("units", __doc__, "--hidden 1024 --inner 2816 --heads 16")
    parser.add_argument("--vocabulary", type=int, default=260, help="tokens of the vocabulary")
    parser.add_argument("--hidden", type=int, default=512, help="width of the model")
    parser.add_argument("--inner", type=int, default=1408, help="width of its MLPs")
    parser.add_argument("--heads", type=int, default=8, help="heads of attention")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a microbatch")
    return parser


if __name__ == "__main__":
    sys.exit(main("units"))
