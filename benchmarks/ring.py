"""Share of the ring's keys and values that cp = 2 hides on a slow link, with long sequences.

The model has eight query heads for two of keys.
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
    """Measure what the ring sends and receives in a step."""
    return measure_hidden(
        Traffic(
            Layout(cp=2),
            ScheduleConfig("1f1b"),
            CollectiveKind.SEND_RECEIVE,
            ModelConfig(512, 512, 1408, num_layers=4, num_heads=8, num_kv_heads=2, max_length=given.tokens),
            sequence_length=given.tokens,
            num_microbatches=2,
            mbit=given.mbit,
            num_rounds=given.rounds,
        )
    )


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("ring", __doc__, "--tokens 8192")
    parser.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=3, help="steps that are measured")
    parser.add_argument("--mbit", type=float, default=1000.0, help="the link's rate")
    return parser


if __name__ == "__main__":
    sys.exit(main("ring"))
