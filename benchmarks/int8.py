"""Generation in int8 over fp32 and bf16, with all instructions of this processor and with some of them alone.

The variables that limit what FBGEMM, oneDNN, MKL and PyTorch use stand in for another processor: its instructions, not
its caches and clock. For each set of instructions one process holds a model in each kind of numbers, which take turns;
times are the process's processor time, with one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.common import main, new_parser, progress
from benchmarks.generate import Generation
from penstock.cli.doctor import processor_name
from penstock.cli.options import Parser
from penstock.settings import Layout, SamplingParams

HERE, AVX2 = "all", "AVX2"
INSTRUCTIONS: dict[str, dict[str, str]] = {
    HERE: {},
    AVX2: {
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
"""The variables that leave these instructions alone."""

_BILLION = "--layers 22 --hidden-size 2048 --intermediate-size 5632 --kv-heads 4 --vocab-size 32000 --new-tokens 16"
SIZES = {"small": "", "1.1B": _BILLION}
INT8 = "int8"
_KINDS = {"fp32": "--precision fp32", "bf16": "--precision bf16", INT8: "--quantize int8"}
_HERE = "import json, sys; from benchmarks.int8 import seconds_here; print(json.dumps(seconds_here(*sys.argv[1:])))"


def seconds_here(size: str, num_rounds: str, *kinds: str) -> dict[str, dict[str, float]]:
    """Median seconds of reading the prompts, and of a further step, of each kind of numbers."""
    torch.set_num_threads(1)
    sides = {kind: Generation.of(*f"{_KINDS[kind]} {SIZES[size]}".split()) for kind in kinds}
    engines = {kind: side.engine(Layout()) for kind, side in sides.items()}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for turn in range(int(num_rounds) + 1):
        for kind, engine in engines.items():
            prompts, num_tokens, taken = sides[kind].prompts(sides[kind].num_prompts), sides[kind].new_tokens, []
            for count in (1, num_tokens):
                start = time.process_time()
                engine.generate(prompts, SamplingParams(max_new_tokens=count, temperature=0))
                taken.append(time.process_time() - start)
            if turn:
                found[kind].append((taken[0], (taken[1] - taken[0]) / (num_tokens - 1)))
    return {
        kind: {"first token": statistics.median(first), "step": statistics.median(step)}
        for kind, (first, step) in ((kind, zip(*turns, strict=True)) for kind, turns in found.items())
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds and ratios of each size, by instructions."""
    if given.rounds < 1:
        raise ValueError(f"--rounds {given.rounds}: at least 1 is possible")
    told: dict[str, Any] = {"processor": processor_name()}
    for size in given.sizes:
        for name in given.instructions:
            words = [sys.executable, "-c", _HERE, size, str(given.rounds), *given.against, INT8]
            own = os.environ | INSTRUCTIONS[name]
            done = subprocess.run(words, env=own, stdout=subprocess.PIPE, text=True, check=True)
            seconds = json.loads(done.stdout.splitlines()[-1])
            over = {
                f"{INT8} over {kind}": {part: seconds[kind][part] / took_s for part, took_s in seconds[INT8].items()}
                for kind in given.against
            }
            told[f"{size}, instructions: {name}"] = {"seconds": seconds} | over
            progress(f"{size}, {name}: {over}")
    return told


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("int8", __doc__, "--sizes 1.1B --against fp32 --rounds 1")
    others = [kind for kind in _KINDS if kind != INT8]
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small"], help="of the model")
    parser.add_argument(
        "--instructions",
        nargs="+",
        choices=list(INSTRUCTIONS),
        default=list(INSTRUCTIONS),
        help="that products may use",
    )
    parser.add_argument(
        "--against", nargs="+", choices=others, default=["fp32", "bf16"], help="the other kinds of weights"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("int8"))
