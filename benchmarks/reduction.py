"""Share of gradient traffic that dp = 2 x pp = 2 hides on a slow link.

Each stage's gradients are reduced as soon as its last backward is done. With eight local stages a rank, all but the
last have other stages' backwards to hide behind.
"""

import argparse
import sys
from typing import Any

from benchmarks.common import main, new_parser
from benchmarks.slow_links import Traffic, measure_hidden
from penstock.cli.options import Parser
from penstock.schedule.recording import CollectiveKind
from penstock.settings import Layout, ModelConfig, ScheduleConfig


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the reductions of a step."""
    return measure_hidden(
        Traffic(
            Layout(dp=2, pp=2),
            ScheduleConfig("interleaved", stages_per_rank=8),
            CollectiveKind.GRADIENTS,
            ModelConfig(512, 512, 1408, num_layers=8, num_heads=8, num_kv_heads=2),
            sequence_length=512,
            num_microbatches=8,
            mbit=given.mbit,
            num_rounds=given.rounds,
            emulated_flops=given.emulate * 1e9,
            zero=given.zero,
        )
    )


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("reduction", __doc__, "--zero")
    parser.add_argument("--emulate", type=float, default=100.0, metavar="GFLOPS", help="speed of matrix products")
    parser.add_argument("--zero", action="store_true", help="shard the optimizer's step (ZeRO-1)")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are measured")
    parser.add_argument("--mbit", type=float, default=1000.0, help="the link's rate")
    return parser


if __name__ == "__main__":
    sys.exit(main("reduction"))
