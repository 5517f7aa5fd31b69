"""A rehearsal's bytes are those of a real run: storages without data against storages with data, kind by kind."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.engine.pipeline import Pipeline, Surroundings
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.rehearsal.place import MeteredRecorder
from penstock.engine.rehearsal.step import RehearsedBatch, claim_state, rehearse
from penstock.engine.training.loss import num_loss_tokens, token_cross_entropy
from penstock.engine.training.trainer import Trainer
from penstock.model import decoder_units
from penstock.model.layers.router import Router
from penstock.parallel import Grid
from penstock.runtime import Header, Message, Recorder, Transport
from penstock.runtime.transport import Line, Receipt
from penstock.schedule import Placement
from penstock.schedule.recording import Record
from penstock.schedule.rehearsal import MemoryKind, MemoryPoint
from penstock.settings import ExpertConfig, Layout, ModelConfig, OptimizerConfig, Precision
from tests.covering import EVERY
from tests.dist.launch import run_ranks

pytestmark = pytest.mark.subject("src/penstock/**/*.py")

DENSE = ModelConfig(vocab_size=96, hidden_size=64, intermediate_size=160, num_layers=2, num_heads=4, max_length=64)
EXPERTS = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    max_length=64,
    experts=ExpertConfig(num_experts=4, num_active=2, intermediate_size=48),
)
LENGTHS = [48] * 8
SPEC = MicroBatchSpec(num=4)
KINDS = [kind for kind in MemoryKind if kind not in (MemoryKind.OTHER, MemoryKind.TRANSPORT)]


@dataclass(frozen=True)
class Case:
    layout: Layout
    schedule: str
    model: ModelConfig = DENSE
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine_options(self) -> EngineOptions:
        return EngineOptions(self.schedule, device="cpu", timeout_s=60.0, **self.options)


@dataclass(eq=False)
class MeteredReceipt:
    #: the receipt that is waited for, which the meter is shown
    receipt: Receipt
    meter: Meter

    def ready(self) -> bool:
        return self.receipt.ready()

    def wait(self) -> Message:
        message = self.receipt.wait()
        self.meter.claim(MemoryKind.TRANSIENT, message.tensors)
        return message


class MeteredTransport:
    """A real transport whose buffers a meter counts as the transport's, for the same figures of a real run."""

    #: the real one
    _inner: Transport
    #: the rank in the pipeline
    rank: int
    #: counts the messages' memory
    _meter: Meter

    def __init__(self, inner: Transport, meter: Meter) -> None:
        self._inner, self._meter, self.rank = inner, meter, inner.rank

    def receive(self, channel: Line, header: Header | None) -> Receipt:
        receipt = self._inner.receive(channel, header)
        self._meter.claim(MemoryKind.TRANSPORT, receipt.buffers)  # type: ignore[attr-defined]
        return MeteredReceipt(receipt, self._meter)

    def send(self, channel: Line, message: Message) -> None:
        self._meter.claim(MemoryKind.TRANSPORT, message.tensors)
        self._inner.send(channel, message)

    def num_pending(self) -> int:
        return self._inner.num_pending()

    def settle(self) -> None:
        self._inner.settle()

    def abandon(self) -> None:
        self._inner.abandon()

    def close(self) -> None:
        self._inner.close()


class PatientRecorder(MeteredRecorder):
    """Reads the memory when gloo's threads have had time to let go of what they have summed and sent."""

    def end(self, record: Record) -> None:
        time.sleep(0.002)
        super().end(record)


@dataclass(frozen=True, eq=False)
class MeteredSurroundings(Surroundings):
    """Real surroundings that report the end of each action, and its messages' memory, to a meter."""

    meter: Meter

    def recorder(self, grid: Grid, coordinates: str | None) -> Recorder:
        return PatientRecorder(self.meter, grid.pp_rank, coordinates)

    def transport(self, pipeline: Pipeline, lines: Placement | Sequence[Line], device: torch.device) -> Transport:
        return MeteredTransport(super().transport(pipeline, lines, device), self.meter)


def even_choice(router: Router, scores_TE: torch.Tensor) -> torch.Tensor:
    """Experts in turn, as a rehearsal has them: how many rows each gets is a matter of data, not of memory."""
    num_tokens, num_active = scores_TE.shape[0], router.config.num_active
    choices = torch.arange(num_tokens * num_active, device=scores_TE.device) % router.config.num_experts
    return choices.view(num_tokens, num_active)


def measured(rank: int, case: Case) -> Sequence[MemoryPoint]:
    """The memory of a real step of this rank, measured from its storages."""
    Router._best = even_choice  # type: ignore[method-assign]
    meter = Meter()
    batch = PackedBatch.from_documents([torch.arange(length) % 96 for length in LENGTHS])
    with meter:
        units = lambda groups: decoder_units(case.model, groups=groups)  # noqa: E731
        surroundings = MeteredSurroundings(meter)
        pipeline = Pipeline(units, case.model.hidden_size, case.layout, case.engine_options, surroundings)
        trainer = Trainer(pipeline)
        run = pipeline.run

        def watched(executor: Any, feeds: Any) -> Any:
            claim_state(trainer, meter)
            meter.restart()
            return run(executor, feeds)

        pipeline.run = watched  # type: ignore[method-assign]
        steps = []
        for _ in range(2):
            trainer.train_batch(batch, token_cross_entropy, num_loss_tokens, SPEC)
            steps.append(list(meter.timeline))
    pipeline.close()
    pipeline.grid.close()
    return [least(points) for points in zip(*steps, strict=True)]


def least(points: Sequence[MemoryPoint]) -> MemoryPoint:
    """The least of several steps in one action: gloo's threads let go of what they have sent when they get to it."""
    return replace(points[0], at_peak=fewest(p.at_peak for p in points), after=fewest(p.after for p in points))


def fewest(memories: Iterable[Mapping[MemoryKind, int]]) -> dict[MemoryKind, int]:
    memories = list(memories)
    return {kind: min(memory.get(kind, 0) for memory in memories) for kind in MemoryKind}


def compare(rank: int, cases: Sequence[Case]) -> list[list[tuple[MemoryKind, int, int]]]:
    """For each case (kind, measured, rehearsed)."""
    found = []
    for case in cases:
        real = measured(rank, case)
        units = lambda groups, case=case: decoder_units(case.model, groups=groups)  # noqa: E731
        batch = RehearsedBatch(LENGTHS, SPEC)
        ours = rehearse(units, case.model.hidden_size, case.layout, case.engine_options, batch, rank)
        assert [p.action for p in real] == [p.action for p in ours.timeline]
        found.append([(kind, most(real, kind), ours.most(kind)) for kind in KINDS])
    return found


def most(timeline: Sequence[MemoryPoint], kind: MemoryKind) -> int:
    """As in `Rehearsal.most`."""
    memories = [point.after if kind is MemoryKind.TAPE else point.at_peak for point in timeline]
    return max(memory.get(kind, 0) for memory in memories)


FULL, BF16 = {"recompute": "full"}, {"precision": Precision.BF16}
TIED = replace(DENSE, tie_embeddings=True)
ON_TWO = [
    Case(Layout(pp=2), "1f1b"),
    Case(Layout(pp=2), "1f1b", options=FULL),
    Case(Layout(pp=2), "1f1b", options=BF16),
    Case(Layout(pp=2), "1f1b", options={"precision": Precision.BF16_AUTOCAST}),
    Case(Layout(pp=2), "1f1b", TIED, {"optimizer": OptimizerConfig(clip_norm=0.1)}),
    Case(Layout(pp=2), "afab", options={"recompute": (0,)}),
    Case(Layout(pp=2), "interleaved"),
    Case(Layout(pp=2), "zb-h1"),
    Case(Layout(pp=2), "zb-h1", options=FULL),
    Case(Layout(pp=2), "zb-v", options=BF16),
    Case(Layout(pp=2), "v-half"),
    Case(Layout(pp=2), "dualpipe"),
    Case(Layout(pp=2), "1f1b", EXPERTS),
    Case(Layout(pp=2), "1f1b", EXPERTS, FULL),
    Case(Layout(pp=2), "combined-1f1b", EXPERTS),
    Case(Layout(pp=2), "zb-v", EXPERTS, BF16),
]
# Each schedule's way with tapes, each precision, recomputation and experts once.
FEWER = [case for number, case in enumerate(ON_TWO) if number not in (1, 2, 7, 10, 12, 13, 15)]
ZERO = {"optimizer": OptimizerConfig(zero=True)}
ON_FOUR = [
    Case(Layout(pp=2, dp=2), "zb-h1", options=ZERO),
    Case(Layout(pp=2, tp=2), "1f1b"),
    Case(Layout(pp=2, tp=2), "1f1b", options=FULL),
    Case(Layout(pp=2, cp=2), "1f1b", options=BF16),
    Case(Layout(pp=2, tp=2), "combined-1f1b", EXPERTS),
    Case(Layout(pp=4), "interleaved", EXPERTS, ZERO),
]


@pytest.mark.shows(139)
@pytest.mark.parametrize(
    "cases",
    [ON_TWO, ON_FOUR] if EVERY else [FEWER, [case for case in ON_FOUR[:-1] if case.options or case.model is EXPERTS]],
    ids=["two ranks", "four ranks"],
)
def test_rehearsed_bytes_are_those_of_a_real_run(cases: list[Case]) -> None:
    wrong = []
    for rank, of_rank in enumerate(run_ranks(cases[0].layout.world_size, compare, cases, timeout_s=600.0)):
        for case, kinds in zip(cases, of_rank, strict=True):
            assert kinds[0][1] > 0
            for kind, real, ours in kinds:
                if abs(ours - real) > 0.03 * real:
                    wrong.append(
                        f"rank {rank} of {case.layout}, {case.schedule}, {dict(case.options)}: {kind} {real} {ours}"
                    )
    assert not wrong, "\n".join(wrong)


KEPT = {"recompute": "full", "num_kept_microbatches": 1}
PARTLY = [
    Case(Layout(pp=2), "1f1b", options=KEPT),
    Case(Layout(pp=2), "interleaved", options=KEPT),
    Case(Layout(pp=2), "zb-v", options=KEPT),
    Case(Layout(pp=2), "combined-1f1b", EXPERTS, KEPT),
]


@pytest.mark.shows(188)
def test_the_first_microbatches_keep_all_and_the_others_recompute_as_rehearsed() -> None:
    def peak(case: Case, changed: Mapping[str, Any]) -> int:
        units = lambda groups: decoder_units(case.model, groups=groups)  # noqa: E731
        options = replace(case, options=changed).engine_options
        found = rehearse(units, case.model.hidden_size, case.layout, options, RehearsedBatch(LENGTHS, SPEC))
        return found.most(MemoryKind.TAPE)

    for rank, of_rank in enumerate(run_ranks(2, compare, PARTLY, timeout_s=600.0)):
        for case, kinds in zip(PARTLY, of_rank, strict=True):
            assert not [(case.schedule, rank, one) for one in kinds if abs(one[2] - one[1]) > 0.03 * one[1]]
            if rank == 0:
                kept = next(real for kind, real, _ in kinds if kind is MemoryKind.TAPE)
                assert 1.1 * peak(case, FULL) < kept < 0.95 * peak(case, {}), case.schedule
                assert peak(case, KEPT | {"num_kept_microbatches": 8}) == peak(case, {}), case.schedule
