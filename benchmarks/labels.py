"""A training step where few tokens have a label, as in fine-tuning on answers alone, over one where all have.

Two stages, in two processes that take batches of both kinds in turn. Times are of the processors, of both ranks
together. What leaving out rows can give at most is the step with all labels, less head and loss of all tokens, plus
those of the labelled ones, which the last rank times beside it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import main, new_parser, options_of, progress, spread
from benchmarks.ranks import Turn, in_turns
from penstock.cli.options import Parser
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import Sequences, cross_entropy_sum, decoder_units
from penstock.settings import Layout, ModelConfig, OptimizerConfig

_ALL, _FEW = "all labels", "few labels"
_HEAD, _HEAD_OF_FEW = "head and loss of all tokens", "head and loss of labelled tokens"


@dataclass(frozen=True)
class Tuning:
    """The model and its batches."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    sequence_tokens: int
    num_microbatches: int
    optimizer: str
    share: float

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // 64,
            max_length=self.sequence_tokens,
        )

    def batch(self, share: float) -> PackedBatch:
        """A text for each microbatch, of whose tokens the last ones have a label."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (self.num_microbatches, self.sequence_tokens), generator=generator)
        labels = tokens.clone()
        labels[:, : self.sequence_tokens - round(share * self.sequence_tokens)] = NO_LABEL
        return PackedBatch.from_sequences({"tokens": tokens.tolist(), "labels": labels.tolist()})


def _prepare(side: str, rank: int, tuning: Tuning) -> Turn:
    torch.set_num_threads(1)
    units = decoder_units(tuning.config())
    options = EngineOptions("1f1b", optimizer=OptimizerConfig.of(tuning.optimizer), device="cpu")
    engine = Engine(units, tuning.hidden_size, Layout(pp=2), options)
    batches = {_ALL: tuning.batch(1.0), _FEW: tuning.batch(tuning.share)}
    spec = MicroBatchSpec(num=tuning.num_microbatches)
    head = engine.pipeline.model.stages[1].units[-1][1] if rank else None
    jobs: dict[str, Callable[[], object]] = {
        name: lambda batch=batch: engine.train_batch(batch, micro_batches=spec) for name, batch in batches.items()
    }
    for name, share in ((_HEAD, 1.0), (_HEAD_OF_FEW, tuning.share)):
        jobs[name] = lambda share=share: head and _head_alone(head, tuning, round(share * tuning.sequence_tokens))

    def turn() -> dict[str, float]:
        found = {}
        for name, job in jobs.items():
            start = time.process_time()
            job()
            found[name] = time.process_time() - start
        return found

    return turn


def _head_alone(head: torch.nn.Module, tuning: Tuning, num_tokens: int) -> None:
    """A step's forwards and backwards of norm, head and loss, of so many tokens of each text."""
    sequences, labels = Sequences.from_lengths([num_tokens]), torch.zeros(num_tokens, dtype=torch.int64)
    for _ in range(tuning.num_microbatches):
        x = torch.randn(num_tokens, tuning.hidden_size, requires_grad=True)
        cross_entropy_sum(head(x, sequences), labels).backward()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The ratio of the two steps, and the least that leaving out rows could give."""
    tuning = options_of(Tuning, given)
    progress(str(tuning))
    turns = in_turns(["penstock"], 2, _prepare, tuning, num_rounds=given.rounds)["penstock"]
    rounds = [{name: sum(rank[name] for rank in ranks) for name in ranks[0]} for ranks in zip(*turns, strict=True)]
    least = [1 - (times[_HEAD] - times[_HEAD_OF_FEW]) / times[_ALL] for times in rounds]
    ratios = [times[_FEW] / times[_ALL] for times in rounds]
    return {
        "parameters": sum(unit.num_parameters for unit in decoder_units(tuning.config())),
        "share of tokens with a label": tuning.share,
        "processor seconds of a step": {name: spread([times[name] for times in rounds]) for name in rounds[0]},
        "head and loss over the step with all labels": spread([times[_HEAD] / times[_ALL] for times in rounds]),
        "step with few labels over that with all": spread(ratios),
        "the least possible": spread(least),
        "over the least possible": spread([ratio / own for ratio, own in zip(ratios, least, strict=True)]),
    }


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("labels", __doc__, "--share 0.3", "--layers 22 --optimizer sgd")
    parser.add_argument("--share", type=float, default=0.1, help="of tokens with a label")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind of step, in turn")
    parser.add_argument("--optimizer", default="adamw", help="of the steps")
    sizes = parser.add_argument_group("the model and its batches")
    sizes.add_argument("--layers", type=int, default=3, dest="num_layers", help="layers of the model")
    sizes.add_argument("--hidden-size", type=int, default=448, help="width of the model")
    sizes.add_argument("--intermediate-size", type=int, default=1216, help="width of its MLPs")
    sizes.add_argument("--vocab-size", type=int, default=32000, help="tokens of its vocabulary")
    sizes.add_argument("--sequence-tokens", type=int, default=512, help="tokens of a text, which is a microbatch")
    sizes.add_argument("--microbatches", type=int, default=4, dest="num_microbatches", help="microbatches of a step")
    return parser


if __name__ == "__main__":
    sys.exit(main("labels"))
