"""Fused pairs over experts that ranks share: the bits of plain execution, whoever waits for whom."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import Exchange, Lane, Sequences, decoder_units
from penstock.model.lanes import Grads, State, Undo
from penstock.model.layers.experts import ExpertBlock
from penstock.schedule import Pair
from penstock.schedule.recording import Record
from penstock.settings import (
    ExpertConfig,
    LearningRate,
    ModelConfig,
    OptimizerConfig,
    Precision,
    ScheduleConfig,
)
from tests.covering import EVERY
from tests.dist.launch import run_ranks

STEPS = 2
EXPERTS = ExpertConfig(
    num_experts=4, num_active=2, intermediate_size=16, shared_size=12, num_dense_first=1, microbatch_loss=0.1
)


@dataclass(frozen=True)
class Run:
    """One way to train the same model on the same microbatches."""

    schedule: str
    num_microbatches: int = 5
    overlap: bool = True
    early_release: bool = False
    recompute: str = "none"
    num_kept: int = 0
    stages_per_rank: int | None = None
    split_backward: bool = False
    num_predictions: int = 0
    precision: Precision = Precision.FP32
    cut: tuple[int, ...] | None = None
    num_steps: int = STEPS


Outcome = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def config(num_layers: int = 3, num_predictions: int = 0, experts: ExpertConfig = EXPERTS) -> ModelConfig:
    return ModelConfig(32, 16, 24, num_layers, 2, experts=experts, num_predictions=num_predictions)


def engine_of(run: Run, layout: Layout, model: ModelConfig | None = None) -> Engine:
    model = model or config(num_predictions=run.num_predictions)
    options = EngineOptions(
        schedule=ScheduleConfig(
            run.schedule,
            run.stages_per_rank,
            overlap=run.overlap,
            early_release=run.early_release,
            split_backward=run.split_backward,
            cut=run.cut,
        ),
        recompute=run.recompute,
        num_kept_microbatches=run.num_kept,
        precision=run.precision,
        optimizer=OptimizerConfig(LearningRate(1e-2)),
        timeout_s=30.0,
    )
    return Engine(lambda groups: decoder_units(model, groups=groups), model.hidden_size, layout, options)


def batches(dp_rank: int, num_microbatches: int, num_steps: int = STEPS) -> list[PackedBatch]:
    """A batch a step, of unequal lengths that differ between the ranks too."""
    generator = torch.Generator().manual_seed(100 * dp_rank + num_microbatches)
    found = []
    for _ in range(num_steps):
        lengths = torch.randint(2, 14, (num_microbatches + 2,), generator=generator).tolist()
        found.append(PackedBatch.from_documents([torch.randint(0, 32, (n,), generator=generator) for n in lengths]))
    return found


def trained(run: Run, layout: Layout) -> Outcome:
    """Losses, the last step's gradients and the final weights of this rank."""
    engine = engine_of(run, layout)
    spec = MicroBatchSpec(num=run.num_microbatches)
    losses = [
        engine.train_batch(batch, micro_batches=spec).loss
        for batch in batches(engine.grid.dp_rank, run.num_microbatches, run.num_steps)
    ]
    gradients = {name: engine.gradient(name).clone() for name in engine.parameters()}
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    engine.close()
    engine.grid.close()
    return losses, gradients, weights


def all_trained(rank: int, runs: list[Run], layout: Layout) -> list[Outcome]:
    return [trained(run, layout) for run in runs]


def merged(outcomes: list[list[Outcome]], number: int, ranks: list[int]) -> Outcome:
    """What the ranks of one pipeline hold together after the run of that number."""
    parts = [outcomes[rank][number] for rank in ranks]
    assert all(losses == parts[0][0] for losses, _, _ in parts)
    gradients = {name: value for _, found, _ in parts for name, value in found.items()}
    return parts[0][0], gradients, {name: value for _, _, found in parts for name, value in found.items()}


def same_bits(one: Outcome, other: Outcome) -> bool:
    losses, *tensors = one
    other_losses, *other_tensors = other
    return losses == other_losses and all(
        mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(tensors, other_tensors, strict=True)
    )


def check(groups: list[list[Run]], layout: Layout) -> None:
    """All runs of a group come to the same bits, on every pipeline."""
    runs = [run for group in groups for run in group]
    outcomes = run_ranks(layout.world_size, all_trained, runs, layout, timeout_s=110.0)
    for pipeline in layout.groups("pp"):
        number = 0
        for group in groups:
            first = merged(outcomes, number, list(pipeline))
            assert len(first[1]) > 10
            for run in group[1:]:
                number += 1
                assert same_bits(first, merged(outcomes, number, list(pipeline))), (run, group[0], pipeline)
            number += 1


@pytest.mark.shows(20, 37, 41, 42, 46)
def test_one_rank_combined_equals_plain():
    plain = (
        Run("1f1b", 1),
        Run("1f1b", 3, num_steps=3),
        Run("1f1b", 2, recompute="full"),
        Run("1f1b", 2, num_predictions=2),
        Run("1f1b", 2, precision=Precision.BF16_AUTOCAST),
    )
    ways: tuple[dict[str, Any], ...] = ({}, {"overlap": False}, {"split_backward": True})
    ways = (*ways, {"early_release": True})
    groups = [
        [
            run,
            *(
                replace(run, schedule="combined", **way)
                for turn, way in enumerate(ways)
                if EVERY or (number + turn) % 2
            ),
        ]
        for number, run in enumerate(plain)
    ]
    check(groups, Layout(dp=2, ep=2))


@pytest.mark.shows(20, 40, 41, 42, 54, 188)
def test_a_pipeline_of_pairs_equals_plain_ones_whatever_the_halves_hold():
    """Stages of unequal numbers of layers, so that one half of a pair has none, or several more than the other."""
    uneven = (1, 5, 1, 1)
    groups = [
        [
            Run("1f1b"),
            Run("combined-1f1b", split_backward=True),
            Run("combined-1f1b", recompute="full", num_kept=1),
            Run("combined-interleaved", stages_per_rank=2, early_release=True, cut=uneven),
            Run("dualpipe-v", cut=uneven),
        ],
        [Run("dualpipe", 4), Run("dualpipe", 4, overlap=False, recompute="full")],
    ]
    # On one rank each of these ways is met with the same pairs.
    others = [
        [
            Run("combined-1f1b"),
            Run("combined-interleaved", stages_per_rank=2, overlap=False),
            Run("combined-interleaved", stages_per_rank=2, early_release=True, split_backward=True),
            Run("dualpipe-v", overlap=False),
        ],
        [Run("dualpipe", 4, overlap=False), Run("dualpipe", 4, recompute="full")],
    ]
    if EVERY:
        groups = [[*group, *more] for group, more in zip(groups, others, strict=True)]
    check(groups, Layout(pp=2, dp=2, ep=2))


@dataclass(frozen=True)
class Noted:
    """A segment that says when it begins, and when what undoes it does; an exchange begins by sending."""

    inner: Any
    what: str
    log: list[str]

    @property
    def name(self) -> str:
        return self.inner.name

    def forward(self, state: State, undo: list[Undo] | None) -> Lane[State]:
        own: list[Undo] = []
        self.log.append(f"f {self.what}")
        state = yield from self.inner.forward(state, None if undo is None else own)
        if undo is not None:
            undo.extend(partial(self.backward, entry) for entry in own)
        return state

    def backward(self, entry: Undo, grads: Grads) -> Lane[Grads]:
        self.log.append(f"b {self.what}")
        return (yield from entry(grads))


def note(engine: Engine) -> list[str]:
    """Have all expert halves of a rank's stages tell of their segments, and the stages of weight gradients."""
    log: list[str] = []
    owners: dict[int, str] = {}
    for stage in engine.pipeline.model.stages.values():
        for name, module in stage.units:
            layer = name.split(".")[1] if name.startswith("layers") else name
            if isinstance(module, ExpertBlock):
                segments_of = module.segments

                def noted(sequences: Sequences, segments_of: Any = segments_of, layer: str = layer) -> list[Noted]:
                    row = list(segments_of(sequences))
                    kinds = {True: "send ", False: ""}
                    return [Noted(s, f"{kinds[isinstance(s, Exchange)]}{s.name} {layer}", log) for s in row]

                module.segments = noted  # type: ignore[method-assign]
                owners |= {id(part): f"experts {layer}" for part in module.experts.modules()}
            owners |= {id(p): f"before {layer}" for p in module.parameters()}

        def weights(tape: Any, original: Any = stage.weight_backward, owners: dict[int, str] = owners) -> None:
            found = {owners[id(getattr(p, "layer", None) or p.weight)] for p in tape.weight_gradients}
            log.extend(f"b weights of {what}" for what in sorted(found))
            original(tape)

        stage.weight_backward = weights
    return log


def noted_pair(rank: int, early_release: bool) -> list[str]:
    """What one pair of a rank does, in order."""
    run = Run("combined", 2, early_release=early_release)
    engine = engine_of(run, Layout(dp=2, ep=2), model=config(3))
    log, of_pair, end = note(engine), [], engine.recorder.end

    def at_end(record: Record) -> None:
        if isinstance(record.action, Pair):
            of_pair.extend(log)
        log.clear()
        end(record)

    engine.recorder.end = at_end  # type: ignore[method-assign]
    engine.train_batch(batches(engine.grid.dp_rank, 2)[0], micro_batches=MicroBatchSpec(num=2))
    engine.close()
    return [what for what in of_pair if "sizes" not in what]


def layer_turns(f: int, b: int, released: list[str]) -> list[str]:
    """A layer of the forward beside one of the backward, as published; what is `released` early comes before experts.

    released: the backward's last steps then; nothing where they come late.
    """
    experts, last = [f"f experts {f}", f"f send combine {f}"], [f"b router {b}"]
    return [
        f"f router {f}",
        f"b experts {b}",
        f"f send dispatch {f}",
        f"b weights of experts {b}",
        f"b send dispatch {b}",
        *(last + released + experts if released else experts + last),
    ]


@pytest.mark.shows(38, 42)
@pytest.mark.parametrize("early_release", [False, True])
def test_the_segments_of_a_pair_take_turns_as_published(early_release: bool):
    """With a layer of the forward beside one of the backward, whose first layer is the other's last.

    The order is that of Megatron Core's combined 1F1B. One launch comes earlier: that of the next layer's combine
    does not wait for the weight gradients of what lies before the experts, which fill its travel instead. With early
    release they are computed at once: the layer is to be gone before the forward's experts compute.
    """
    of_layer_2 = ["b weights of before 2"]
    # Layer 0 is dense: what is left of the backward exchanges nothing.
    of_the_rest = ["b weights of before 0", "b weights of before 1"]
    expected = [
        "b combine 2",
        "b send combine 2",
        "b weights of before head",
        *layer_turns(1, 2, of_layer_2 if early_release else []),
        "b combine 1",
        "b send combine 1",
        *([] if early_release else of_layer_2),
        "f combine 1",
        *layer_turns(2, 1, of_the_rest if early_release else []),
        *([] if early_release else of_the_rest),
        "f combine 2",
    ]
    for found in run_ranks(2, noted_pair, early_release, timeout_s=60.0):
        assert found == expected


class Launched(TorchDispatchMode):
    """Counts what goes out to other ranks, whoever sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def launches_by_kind(rank: int, cases: list[tuple[str, tuple[int, ...]]]) -> list[dict[str, list[int]]]:
    """By kind of action, how much each one of a step launches where these of the three layers are dense."""
    found = []
    for schedule, dense in cases:
        experts = replace(EXPERTS, microbatch_loss=0.0, num_dense_first=0, dense_layers=dense)
        engine = engine_of(Run(schedule, 4), Layout(dp=2, ep=2), model=config(3, experts=experts))
        of_steps: dict[str, list[int]] = {}
        begin, end = engine.recorder.begin, engine.recorder.end
        with Launched() as launched:

            def at_begin(action: Any, begin: Any = begin, launched: Launched = launched) -> Record:
                launched.count = 0
                return begin(action)

            def at_end(record: Record, end: Any = end, launched: Launched = launched, log: Any = of_steps) -> None:
                kind = "pair" if isinstance(record.action, Pair) else record.action.op.name
                log.setdefault(kind, []).append(launched.count)
                end(record)

            engine.recorder.begin, engine.recorder.end = at_begin, at_end  # type: ignore[method-assign]
            engine.train_batch(batches(engine.grid.dp_rank, 4)[0], micro_batches=MicroBatchSpec(num=4))
        engine.close()
        engine.grid.close()
        found.append({kind: of_steps[kind] for kind in ("F", "B", "pair") if kind in of_steps})
    return found


@pytest.mark.shows(39)
def test_dense_layers_launch_nothing_in_a_pair_or_alone():
    cases = [("combined", dense) for dense in ((0, 1, 2), (0, 2), (1,), ())] + [("1f1b", (0, 1, 2)), ("1f1b", (1,))]
    for found in run_ranks(2, launches_by_kind, cases, timeout_s=60.0):
        for (schedule, dense), counts in zip(cases, found, strict=True):
            # A sparse layer: sizes, rows there and back; its gradients there and back.
            num_sparse = 3 - len(dense)
            num_alone, pairs = (1, {"pair": [5 * num_sparse] * 3}) if schedule == "combined" else (4, {})
            alone = {"F": [3 * num_sparse] * num_alone, "B": [2 * num_sparse] * num_alone}
            assert counts == alone | pairs, (schedule, dense)
