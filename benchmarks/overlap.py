"""Share of the experts' all-to-all that the combined schedule hides on a slow link, and what hiding it is worth.

Two ranks on a real slow network, each with half of the experts and its own batch. The link runs at a rate at which
plain 1F1B waits 34% of its time for the all-to-all, unless --mbit gives another.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import main, new_parser, options_of, progress, spread
from benchmarks.ranks import Team
from benchmarks.slow_links import LIMIT_S, meet, new_engine, timed_step
from benchmarks.slow_network import SlowNetwork
from penstock.cli.options import Parser
from penstock.data import PackedBatch
from penstock.schedule.recording import CollectiveKind, CollectiveTotal
from penstock.settings import ExpertConfig, Layout, ModelConfig, ScheduleConfig

NUM_RANKS = 2
SHARE = 0.34
"""Share of the plain step's time that the all-to-all is to take."""
LEAST_SHARE, MOST_SHARE = 0.30, 0.40
"""Shares that count: other work on this machine slows compute from round to round, but not the link."""
FASTEST_BITS = 1e9
"""Bits per second of the link at its fastest."""
_NUM_TRIALS = 6
_MOST_LEFT_OUT = 4
_NUM_EXPERTS, _NUM_ACTIVE, _VOCAB_SIZE = 8, 2, 512


@dataclass(frozen=True)
class ModelSize:
    """The trained model: layers of attention and experts."""

    num_layers: int
    hidden_size: int
    expert_size: int
    microbatch_tokens: int
    num_microbatches: int

    def model(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=_VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.expert_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // 64,
            experts=ExpertConfig(_NUM_EXPERTS, _NUM_ACTIVE, self.expert_size, bias_step=0.01),
        )

    def batch(self, rank: int) -> PackedBatch:
        """Random tokens, four sequences a microbatch, so that experts get about equal numbers of rows."""
        generator = torch.Generator().manual_seed(rank)
        length = self.microbatch_tokens // 4
        documents = torch.randint(0, _VOCAB_SIZE, (4 * self.num_microbatches, length), generator=generator)
        return PackedBatch.from_documents(list(documents))


@dataclass(frozen=True)
class Side:
    """One way to run the same step."""

    name: str
    schedule: str
    overlap: bool = True


PLAIN = Side("plain 1F1B", "1f1b")
COMBINED = Side("combined", "combined")
IN_TURN = Side("combined, halves in turn", "combined", overlap=False)


@dataclass(frozen=True)
class Figures:
    """One step of one rank, in seconds; `idle_share` is the share in which it neither computed nor stepped."""

    step_s: float
    idle_share: float
    all_to_all: CollectiveTotal


@dataclass
class Link:
    """The link, whose rate follows the plain step's waiting time, unless it is fixed."""

    #: the two hosts that it joins
    network: SlowNetwork
    #: in bits per second, and True if it stays
    rate: float
    fixed: bool

    def suits(self, plain: Sequence[Figures]) -> bool:
        """Return whether a plain step waited for a share that counts; if not, set the rate at which it would."""
        share = _share(plain)
        if self.fixed or LEAST_SHARE <= share <= MOST_SHARE:
            return True
        # Exposed time grows as the rate falls; the rest stays.
        suiting = min(FASTEST_BITS, self.rate * share / (1 - share) * (1 - SHARE) / SHARE)
        if suiting == self.rate:
            return True
        self.rate = suiting
        self.network.set_rate(_words(self.rate))
        return False


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure each side in its own processes, in turn, over one link; medians and ranges over the rounds.

    A round whose plain step waited for a share that does not count is left out and repeated at another rate, a few
    times at most; `rounds_left_out` is their number.

    Raises: NoSlowNetwork where this machine does not allow one.
    """
    size, flops = options_of(ModelSize, given), None if given.emulate is None else given.emulate * 1e9
    rate = FASTEST_BITS if given.mbit is None else given.mbit * 1e6
    with ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(_words(rate)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = (PLAIN, COMBINED, IN_TURN)
        teams = {side: stack.enter_context(_team(side, size, flops, network, folder)) for side in sides}
        link = Link(network, rate, fixed=given.mbit is not None)
        for team in teams.values():
            _turn(team)  # a first step does more
        for _ in range(_NUM_TRIALS):
            plain = _turn(teams[PLAIN])
            progress(f"at {network.rate} the plain step waits {_share(plain):.0%} for its all-to-all")
            if link.suits(plain):
                break
        rounds, num_left_out = [], 0
        while len(rounds) < given.rounds:
            rate, round_ = link.rate, {}
            for side, team in teams.items():
                round_[side] = _turn(team)
                progress(f"round {len(rounds) + 1} of {given.rounds}, {side.name}: {_share(round_[side]):.0%}")
            if link.suits(round_[PLAIN]) or num_left_out == _MOST_LEFT_OUT:
                rounds.append((rate, round_))
            else:
                num_left_out += 1
    return _summary(rounds) | {"rounds_left_out": num_left_out}


def _team(side: Side, size: ModelSize, flops: float | None, network: SlowNetwork, folder: Path) -> Team:
    team = Team(NUM_RANKS, join=False, limit_s=LIMIT_S)
    team.call(meet, network.hosts, NUM_RANKS, str(folder / side.schedule / side.name.replace(" ", "-")))
    team.prepare(_prepare, side, size, flops)
    team.sleep()
    return team


def _turn(team: Team) -> list[Figures]:
    team.wake()
    try:
        return team.turn()
    finally:
        team.sleep()


def _share(ranks: Sequence[Figures]) -> float:
    """The share of a step that it waits for its all-to-all."""
    return _mean(ranks, lambda f: f.all_to_all.exposed) / _mean(ranks, lambda f: f.step_s)


def _words(rate: float) -> str:
    return f"{rate / 1e6:.0f}mbit"


def _summary(rounds: Sequence[tuple[float, dict[Side, list[Figures]]]]) -> dict[str, Any]:
    """Summarise rounds, each with its link's rate and the figures of every side's ranks."""
    found = {side: [figures[side] for _, figures in rounds] for side in rounds[0][1]}
    sides = {side.name: _side_summary(rounds) for side, rounds in found.items()}
    exposed = {
        side: [_mean(ranks, lambda f: f.all_to_all.exposed) for ranks in rounds] for side, rounds in found.items()
    }
    steps = {side: [max(f.step_s for f in ranks) for ranks in rounds] for side, rounds in found.items()}
    pairs = list(zip(exposed[PLAIN], exposed[COMBINED], strict=True))
    return {
        "link_mbit_per_s": spread([rate / 1e6 for rate, _ in rounds]),
        "plain_waits_for_all_to_all": spread([_share(figures[PLAIN]) for _, figures in rounds]),
        **sides,
        "hidden_of_what_plain_waits": spread([1 - after / before for before, after in pairs]),
        "plain_over_combined": spread([a / b for a, b in zip(steps[PLAIN], steps[COMBINED], strict=True)]),
    }


def _side_summary(rounds: Sequence[Sequence[Figures]]) -> dict[str, Any]:
    return {
        "step_s": spread([max(f.step_s for f in ranks) for ranks in rounds]),
        "waits_for_all_to_all": spread([_share(ranks) for ranks in rounds]),
        "hidden_while_under_way": spread([_mean(ranks, lambda f: f.all_to_all.hidden_share) for ranks in rounds]),
        "idle": spread([_mean(ranks, lambda f: f.idle_share) for ranks in rounds]),
    }


def _mean(ranks: Sequence[Figures], of: Callable[[Figures], float]) -> float:
    return statistics.mean(map(of, ranks))


# ---- in the processes


def _prepare(rank: int, side: Side, size: ModelSize, flops: float | None) -> Callable[[], Figures]:
    schedule = ScheduleConfig(side.schedule, overlap=side.overlap)
    engine = new_engine(size.model(), flops, Layout(dp=NUM_RANKS, ep=NUM_RANKS), schedule)
    batch = size.batch(rank)

    def turn() -> Figures:
        step_s, recording = timed_step(engine, batch, size.num_microbatches)
        ((spent,), (kinds,)) = recording.spent(), recording.collective_totals()
        in_ms = kinds[CollectiveKind.ALL_TO_ALL]
        in_s = replace(in_ms, exposed=1e-3 * in_ms.exposed, hidden=1e-3 * in_ms.hidden)
        return Figures(step_s, spent.idle / recording.makespan, in_s)

    return turn


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("overlap", __doc__, "--emulate 100 --mbit 800")
    parser.add_argument("--layers", type=int, default=3, dest="num_layers", help="layers of the model")
    parser.add_argument("--hidden-size", type=int, default=768, help="width of the model")
    parser.add_argument("--expert-size", type=int, default=768, help="width inside an expert")
    parser.add_argument("--tokens", type=int, default=512, dest="microbatch_tokens", help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=24, dest="num_microbatches", help="microbatches of a step")
    parser.add_argument(
        "--emulate", type=float, metavar="GFLOPS", help="matrix products sleep as long as they would take at this speed"
    )
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side, in turn")
    parser.add_argument("--mbit", type=float, help="the link's rate, kept to")
    return parser


if __name__ == "__main__":
    sys.exit(main("overlap"))
