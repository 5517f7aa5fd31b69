"""What ranks hold at their peak, tapes and bytes, is what the simulation says: every schedule, few and many parts."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import schedule
from penstock.data import MicroBatchSpec
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal import units as rehearsed
from penstock.engine.rehearsal.step import RehearsedBatch, rehearse
from penstock.engine.rehearsal.units import units_alone
from penstock.model import NOTHING_GIVEN, Given, Lane, Sequences, WeightGradients, decoder_units, defer
from penstock.model.linear import TORCH
from penstock.runtime import (
    Boundary,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Message,
    Pairs,
    Recorder,
    Stage,
    Tape,
    run_together,
)
from penstock.runtime.stage import Finish, GraphSegment
from penstock.schedule import Costs, Op
from penstock.schedule.recording import Record
from penstock.schedule.rehearsal import MemoryKind
from penstock.settings import Layout, ModelConfig, OptimizerConfig, OptimizerName, ParameterGroup
from penstock.settings.optimizer import Arguments

NAMES = [name for name in schedule.names() if name != "inference"]
# Fewer microbatches than ranks, one, and more.
SIZES = [(2, 1), (2, 5), (3, 2), (3, 7), (4, 3), (4, 9)]
HIDDEN = 32
CONFIG = ModelConfig(
    vocab_size=64, hidden_size=HIDDEN, intermediate_size=80, num_layers=7, num_heads=4, num_kv_heads=2, max_length=64
)


class Kept:
    """A tensor that autograd keeps; gone when autograd lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MeasuredStage(Stage):
    """Knows the bytes that its tapes, and the graph behind them, hold now; calls `seen` behind every forward."""

    seen: Callable[[], None]

    def forward(
        self,
        tape: Tape | None,
        x: Message,
        sequences: Sequences,
        finish: Finish | None = None,
        given: Given = NOTHING_GIVEN,
    ) -> Lane[Message]:
        assert tape is not None
        if not hasattr(self, "tapes"):
            self.tapes: list[weakref.ref[Tape]] = []
            self.kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.tapes.append(weakref.ref(tape))
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
            output = yield from super().forward(tape, x, sequences, finish, given)
        self.seen()  # in a pair the backward comes before the action's end
        return output

    def _keep(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        self.kept.add(kept)
        return kept

    def num_bytes(self) -> int:
        if not hasattr(self, "tapes"):
            return 0
        held = [kept.tensor for kept in self.kept]
        for tape in filter(None, (reference() for reference in self.tapes)):
            segments = [entry for entry in tape.segments if isinstance(entry, GraphSegment)]
            held += [leaf for entry in segments for leaf in entry.leaves if leaf is not None]
            held += [factor for pending in tape.weight_gradients for factor in (pending.x_TI, pending.grad_TO)]
        not_counted = {parameter.untyped_storage()._cdata for _, parameter in self.named_parameters()}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in held}
        return sum(storage.nbytes() for place, storage in storages.items() if place not in not_counted)


class MeasuredRank(Recorder):
    """Looks at a rank's stages whenever it ends an action."""

    def __init__(self, rank: int, stages: Sequence[MeasuredStage]) -> None:
        super().__init__(rank)
        self.stages, self.peak_bytes = stages, 0
        for stage in stages:
            stage.seen = self.look

    def end(self, record: Record) -> None:
        super().end(record)
        self.look()

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(stage.num_bytes() for stage in self.stages))


def run(program: schedule.Program, modules: Sequence[Sequence[tuple[str, nn.Module]]], feeds: Sequence[Feed]):
    """Run a program on stages made of these modules: the executors and the recorders by rank."""
    hub, executors, recorders = InProcessHub(), [], []
    for rank in range(program.placement.num_ranks):
        stages = {}
        for number in program.placement.stages_of(rank):
            owner = WeightGradients()
            for _, module in modules[number]:
                defer(module, owner)
            stages[number] = MeasuredStage(number, modules[number], Boundary(HIDDEN, torch.float32), owner)
        recorders.append(MeasuredRank(rank, list(stages.values())))
        # Overlapped, the halves of a pair without collectives follow each other, backward first: that takes less.
        pairs, transport = Pairs(overlap=False), InProcessTransport(hub, rank)
        executors.append(Executor(program, stages, transport, recorders[rank], pairs=pairs))
    run_together(executors, [feeds] * len(executors))
    return executors, recorders


class Emulated(nn.Module):
    """Keeps nothing but what any stage keeps: the message that came in."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


@pytest.mark.parametrize("name", NAMES)
def test_peaks_of_an_emulated_model_are_the_simulated_ones(name: str):
    for ranks, microbatches in SIZES:
        program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))
        placement, lengths = program.placement, [3 + m % 4 for m in range(microbatches)]
        modules = [[("layer", Emulated())] for _ in range(placement.num_stages)]
        feeds = [Feed(n, Sequences.from_lengths([n]), torch.ones(n, HIDDEN), torch.sum) for n in lengths]
        executors, recorders = run(program, modules, feeds)
        whole = [4 * HIDDEN] * placement.stages_per_route
        costs = Costs(microbatch_bytes=whole, weight_memory_share=0.0, lengths=lengths)
        simulated = schedule.simulate(program, costs)
        tapes = [live * placement.stages_per_microbatch for live in schedule.simulate(program).peak_live_microbatches]
        assert [executor.peak_live_tapes for executor in executors] == tapes
        assert tapes == list(schedule.verify(program).peak_live_tapes)
        assert [recorder.peak_bytes for recorder in recorders] == pytest.approx(list(simulated.peak_live_bytes))
        assert min(recorder.peak_bytes for recorder in recorders) > 0 or microbatches < placement.num_routes


@cache
def decoder(recompute: str):
    return decoder_units(CONFIG, matmul=TORCH), EngineOptions(recompute=recompute, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_decoder_are_within_a_twentieth_of_the_estimated_ones(name: str):
    for ranks, microbatches in ((2, 5), (3, 2)):
        program = schedule.lower(schedule.build(name, ranks=ranks, microbatches=microbatches))
        units, options = decoder("none")
        cut = schedule.partition([1.0] * len(units), program.placement.stages_per_route)
        modules = []
        for number in range(program.placement.num_stages):
            members = [units[i] for i in cut[number % len(cut)]]
            modules.append([(unit.name, unit.build()) for unit in members])
            for unit, (_, module) in zip(members, modules[-1], strict=True):
                unit.initialise(module, 0)
        lengths = [[17, 8 + 4 * m] for m in range(microbatches)]
        typical = lengths[microbatches // 2]
        feeds = []
        for length in lengths:
            tokens = torch.zeros(sum(length), dtype=torch.int64)
            loss = lambda logits, tokens=tokens: nn.functional.cross_entropy(logits, tokens)  # noqa: E731
            feeds.append(Feed(sum(length), Sequences.from_lengths(length), tokens, loss))
        _, recorders = run(program, modules, feeds)
        found = units_alone(units, HIDDEN, typical, options)
        kept, for_weights = (
            [sum(found[i].of(op).kept_bytes for i in members) for members in cut] for op in (Op.F, Op.I)
        )
        shares = [left / whole for left, whole in zip(for_weights, kept, strict=True)]
        factors = [sum(length) / sum(typical) for length in lengths]
        costs = Costs(microbatch_bytes=kept, weight_memory_share=shares, lengths=factors)
        simulated = schedule.simulate(program, costs).peak_live_bytes
        for recorder, expected in zip(recorders, simulated, strict=True):
            assert recorder.peak_bytes == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "num_states"),
    [
        (OptimizerConfig(), 2),
        (OptimizerConfig(name=OptimizerName.SGD), 0),
        (OptimizerConfig(name=OptimizerName.SGD, arguments=Arguments({"momentum": 0.9})), 1),
        (OptimizerConfig(groups=(ParameterGroup("*", frozen=True),)), 0),
    ],
)
def test_state_of_each_stage_follows_the_optimizer(settings: OptimizerConfig, num_states: int) -> None:
    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=2, max_length=32)
    options = EngineOptions(optimizer=settings, device="cpu")
    batch = RehearsedBatch([16] * 4, MicroBatchSpec(num=4))
    for rank in range(2):
        found = rehearse(lambda groups: decoder_units(config, groups=groups), 32, Layout(pp=2), options, batch, rank)
        state = found.state_bytes
        assert state[MemoryKind.PARAMETERS] > 0
        assert state[MemoryKind.OPTIMIZER] == num_states * state[MemoryKind.GRADIENTS]
        assert (state[MemoryKind.GRADIENTS] == 0) == bool(settings.groups)


def test_units_that_are_alike_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=12, num_heads=2, max_length=32)
    runs, run = [], rehearsed._costs_alone

    def counted(unit: Any, *others: Any) -> Any:
        runs.append(unit)
        return run(unit, *others)

    monkeypatch.setattr(rehearsed, "_costs_alone", counted)
    found = units_alone(decoder_units(config), 32, (8, 8), EngineOptions(device="cpu", recompute=(4,)))
    # Embedding, attention and MLP, both under recompute, head.
    assert len(found) == 26 and len(runs) == 6
    assert found[2].actions == found[4].actions == found[24].actions != found[10].actions
    # What W needs waits for it: at least the input of each product, and the gradient of its output.
    assert found[2].of(Op.I).kept_bytes >= 4 * 16 * (32 + 2 * 64 + 64 + 32)
    assert all(unit.of(Op.W).kept_bytes <= unit.of(Op.I).kept_bytes for unit in found)
