"""One model trained, scored in every layout that fits a world, by ranks that hold it against one process themselves."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock import Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.parallel.tensor_slice import Shard
from penstock.settings import (
    ContextForm,
    ExpertConfig,
    LearningRate,
    ModelConfig,
    OptimizerConfig,
    Precision,
    ScheduleConfig,
)

STEPS = 2
MAX_WORLD = 8
VOCABULARY = 37
NUM_NEW_TOKENS = 5
# The first step reads it, and of two ranks that share the vocabulary the second has it.
PADDING_TOKEN = 29
SCHEDULES = {1: ("1f1b", "zb-h1", "combined-1f1b"), 2: ("interleaved", "zb-v", "combined-interleaved")}
"""Three of each kind, by local stages."""

DENSE = ModelConfig(VOCABULARY, 16, 20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=6, qk_norm=True)
"""Eight units, so that it can be cut into four ranks' two local stages; no tp divides its vocabulary."""

SPARSE = replace(
    DENSE,
    experts=ExpertConfig(
        num_experts=5,
        num_active=2,
        intermediate_size=8,
        bias_step=0.05,
        sequence_loss=0.1,
        global_loss=0.1,
        z_loss=0.01,
        shared_size=6,
    ),
)


@dataclass(frozen=True)
class Case:
    """One layout with one schedule, and how the model is: `variant` chooses what else may differ."""

    layout: Layout
    num_local_stages: int
    schedule: str
    sparse: bool = False
    variant: int = 0

    @property
    def config(self) -> ModelConfig:
        return replace(
            SPARSE if self.sparse else DENSE,
            tie_embeddings=self.variant % 2 == 1,
            num_kv_heads=1 if self.variant % 4 >= 2 else 2,
            qkv_bias=self.variant % 4 >= 2,
            sliding_window=5 if self.variant % 3 == 1 else None,
            padding_token=PADDING_TOKEN if self.variant % 4 == 2 else None,
        )

    @property
    def attention(self) -> ContextForm:
        """Heads are exchanged where there are two of keys, which two context-parallel ranks divide between them."""
        return ContextForm.ALL_TO_ALL if self.variant % 4 == 1 and self.layout.tp == 1 else ContextForm.RING

    @property
    def recompute(self) -> str:
        return "full" if self.variant % 3 == 2 else "none"

    @property
    def zero(self) -> bool:
        """Whether the optimizer's step is shared out."""
        return self.variant % 4 == 1

    def __str__(self) -> str:
        kind = "sparse" if self.sparse else "dense"
        return f"{kind} {self.layout}, {self.num_local_stages} local stage(s), {self.schedule}, variant {self.variant}"


def layouts() -> Iterator[tuple[Layout, int]]:
    """All layouts of at most eight processes, pp 1-4, dp, tp, cp, ep 1-2, with one and with two local stages each."""
    for pp, dp, cp, tp, ep in itertools.product(range(1, 5), (1, 2), (1, 2), (1, 2), (1, 2)):
        if pp * dp * cp * tp <= MAX_WORLD and dp * cp % ep == 0:
            for num_local_stages in (1, 2):
                yield Layout(pp, dp, cp, tp, ep), num_local_stages


def cases(sparse: bool) -> list[Case]:
    """Every layout with every schedule of its kind; experts are shared only where there are any."""
    found: list[Case] = []
    for layout, num_local_stages in layouts():
        if layout.ep == 1 or sparse:
            for schedule in SCHEDULES[num_local_stages]:
                found.append(Case(layout, num_local_stages, schedule, sparse, variant=len(found) * 5 % 12))
    return found


def documents() -> list[list[Tensor]]:
    """Documents of unequal lengths, as many for each step as any layout here divides."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 12, (STEPS + 1, 8), generator=generator).tolist()
    return [[torch.randint(0, VOCABULARY, (n,), generator=generator) for n in step] for step in lengths]


@dataclass
class Outcome:
    """Of one rank: what each step told, and by full name what it holds at the start, after the first and the last step.

    scores: logits of the documents that this rank was given, on the ranks that have them. answers: greedy tokens to all
    documents.
    """

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    shards: dict[str, Shard]
    scores: Tensor | None
    answers: list[tuple[int, ...]]
    documents: list[int] = field(default_factory=list)


def run(case: Case) -> Outcome:
    options = EngineOptions(
        schedule=ScheduleConfig(case.schedule, case.num_local_stages),
        recompute=case.recompute,
        attention=case.attention,
        precision=Precision.FP64,
        optimizer=OptimizerConfig(LearningRate(1e-2), clip_norm=0.5, zero=case.zero),
        timeout_s=60.0,
    )
    config = case.config
    engine = Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, case.layout, options)
    initial = {name: p.detach().clone() for name, p in engine.parameters().items()}
    losses, norms, gradients = [], [], {}
    *steps, scored = documents()
    for step in steps:
        batch = PackedBatch.from_documents(step[engine.grid.dp_rank :: case.layout.dp])
        result = engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        # Of a step that is shared out, every rank has the whole gradient of some parameters alone.
        if not gradients and not case.zero:
            trained = [name for buckets in engine.trainer.buckets.values() for name in buckets.gradients]
            gradients = {name: engine.gradient(name).clone() for name in trained}
    own = range(len(scored))[engine.grid.dp_rank :: case.layout.dp]
    scores = engine.forward(PackedBatch.from_documents([scored[i] for i in own]))
    prompts = [document.tolist() for document in scored]
    found = engine.generate(prompts, SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=0))
    answers = [answer.tokens for answer in found]
    weights = {name: p.detach().clone() for name, p in engine.parameters().items()}
    shards = dict(engine.shards)
    engine.close()
    # A process runs many cases, and each group has a thread that never sleeps for long.
    engine.grid.close()
    return Outcome(losses, norms, initial, gradients, weights, shards, scores, answers, list(own))


@dataclass(frozen=True)
class Compared:
    """How far a rank's outcome lies from that of one process, and which parts of which parameters it held.

    held: (name, first element along the dimension that is cut, elements, all elements).
    """

    case: str
    initial_equal: bool
    furthest: dict[str, float]
    held: list[tuple[str, int, int, int]]
    num_scored: int
    answers_equal: bool
    num_generated: int


def compare(rank: int, chosen: list[Case], references: dict[tuple[bool, int], Outcome]) -> list[Compared]:
    """Run all cases of one world, each against its reference, without a GPU."""
    forbid_cuda()
    found = []
    for case in chosen:
        found.append(_compared(case, run(case), references[case.sparse, case.variant]))
        gc.collect()
    return found


def forbid_cuda() -> None:
    def touched(*arguments: Any) -> Any:
        raise AssertionError("CUDA was touched on a run without a GPU")

    torch.cuda.is_available = lambda: False
    for name in ("_lazy_init", "init", "synchronize", "current_stream", "current_device", "Stream", "Event"):
        setattr(torch.cuda, name, touched)


def _compared(case: Case, found: Outcome, expected: Outcome) -> Compared:
    def furthest(values: Iterable[float], wanted: Iterable[float]) -> float:
        return max(abs(value - other) for value, other in zip(values, wanted, strict=True))

    def part(name: str, whole: Tensor) -> Tensor:
        return found.shards[name].of(whole) if name in found.shards else whole

    def apart(held: dict[str, Tensor], whole: dict[str, Tensor]) -> float:
        return max((float((value - part(name, whole[name])).abs().max()) for name, value in held.items()), default=0.0)

    starts = [0, *itertools.accumulate(len(document) for document in documents()[-1])]
    scored = 0.0
    if found.scores is not None:
        assert expected.scores is not None
        rows = torch.cat([expected.scores[starts[i] : starts[i + 1]] for i in found.documents])
        assert found.scores.shape == rows.shape
        scored = float((found.scores - rows).abs().max())
    held = []
    for name, whole in expected.initial.items():
        if name in found.initial:
            shard = found.shards.get(name, Shard("tp", 0, 0, 1, tuple(whole.shape)))
            held.append((name, shard.start, shard.length, whole.shape[shard.dim]))
    return Compared(
        str(case),
        all(torch.equal(value, part(name, expected.initial[name])) for name, value in found.initial.items()),
        {
            "loss": furthest(found.losses, expected.losses),
            "norm": furthest(found.norms, expected.norms),
            "gradient": apart(found.gradients, expected.gradients),
            "weight": apart(found.weights, expected.weights),
            "score": scored,
        },
        held,
        0 if found.scores is None else len(found.scores),
        found.answers == expected.answers,
        sum(map(len, found.answers)),
    )
