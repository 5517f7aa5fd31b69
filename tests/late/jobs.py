"""What is run in late worlds and in a plain one, and compared bit for bit: training, scoring, generation, checkpoints.

Groups have two ranks, so that a sum is the same in whatever order its terms come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.generation.options import GenerateOptions
from penstock.model import decoder_units
from penstock.settings import ContextForm, LearningRate, ModelConfig, OptimizerConfig, Precision, ScheduleConfig
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks
from tests.late.operations import Lateness
from tests.late.world import run

NUM_STEPS = 2
NUM_MICROBATCHES = 3


class Part(Enum):
    """A part of a job besides training."""

    SCORE = "score"
    GENERATE = "generate"
    SAVE = "save"


@dataclass(frozen=True)
class Job:
    """One layout with one schedule, and what is done on it after two steps."""

    layout: Layout
    schedule: ScheduleConfig
    parts: tuple[Part, ...] = ()
    sparse: bool = False
    tied: bool = False
    zero: bool = False
    packed: bool = True
    recompute: str = "none"
    attention: ContextForm = ContextForm.RING
    precision: Precision = Precision.FP32

    @property
    def config(self) -> ModelConfig:
        return replace(SPARSE if self.sparse else DENSE, num_layers=2, tie_embeddings=self.tied)

    def engine(self, seed: int = 0) -> Engine:
        options = EngineOptions(
            schedule=self.schedule,
            recompute=self.recompute,
            precision=self.precision,
            attention=self.attention,
            optimizer=OptimizerConfig(LearningRate(1e-2), clip_norm=0.5, zero=self.zero),
            timeout_s=60.0,
            seed=seed,
        )
        config = self.config
        return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, self.layout, options)

    def __str__(self) -> str:
        kinds = [self.schedule.name, str(self.layout), *(part.value for part in self.parts)]
        kinds += [name for name in ("sparse", "tied", "zero") if getattr(self, name)]
        kinds += [] if self.packed else ["unpacked"]
        return ", ".join(kinds)


def schedule(name: str, stages_per_rank: int | None = None, **options: Any) -> ScheduleConfig:
    return ScheduleConfig(name, stages_per_rank, **options)


JOBS = (
    Job(Layout(pp=2, dp=2), schedule("interleaved", 2), (Part.SAVE,), tied=True, zero=True),
    Job(Layout(pp=2, tp=2), schedule("zb-h1"), (Part.GENERATE,), recompute="full"),
    Job(Layout(pp=2, cp=2), schedule("1f1b"), (Part.SCORE,)),
    Job(Layout(cp=2), schedule("1f1b"), (Part.SCORE,), attention=ContextForm.ALL_TO_ALL),
    Job(Layout(pp=2, dp=2, ep=2), schedule("combined-1f1b"), (Part.GENERATE,), sparse=True, zero=True),
    # Packing would be the first to read the weights.
    Job(Layout(dp=2), schedule("1f1b"), (Part.GENERATE,), zero=True, packed=False),
    Job(Layout(dp=2, ep=2), schedule("combined", early_release=True), (Part.SCORE,), sparse=True),
    Job(Layout(pp=4), schedule("dualpipe", 2), (Part.GENERATE,), tied=True),
    Job(Layout(pp=2), schedule("zb-v", 2), (Part.SCORE, Part.GENERATE, Part.SAVE), precision=Precision.BF16),
)


def done(job: Job, folder: Path | None = None) -> dict[str, Any]:
    """Train, then do the job's parts; all that this rank has of it. Checkpoints go to the folder."""
    engine = job.engine()
    taken = [engine.train_batch(batch, micro_batches=spec(job)) for batch in batches(job, engine, NUM_STEPS)]
    found: dict[str, Any] = {"losses": [one.loss for one in taken], "norms": [one.grad_norm for one in taken]}
    for part in job.parts:
        if part is Part.SAVE:
            assert folder is not None
            found["saved"] = saved(job, engine, folder)
        else:
            found[part.value] = {Part.SCORE: scored, Part.GENERATE: generated}[part](job, engine)
    found["weights"] = copies(engine)
    engine.close()
    engine.grid.close()
    return found


def spec(job: Job) -> MicroBatchSpec:
    return MicroBatchSpec(num=NUM_MICROBATCHES * (2 if job.schedule.name == "dualpipe" else 1))


def batches(job: Job, engine: Engine, number: int, first: int = 0) -> list[PackedBatch]:
    """A batch a step, of unequal lengths."""
    found = []
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(2, 10, (12,), generator=generator).tolist()
        documents = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]
        found.append(PackedBatch.from_documents(documents[engine.grid.dp_rank :: job.layout.dp]))
    return found


def copies(engine: Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.parameters().items()}


def scored(job: Job, engine: Engine) -> Any:
    (batch,) = batches(job, engine, 1, first=NUM_STEPS)
    loss = engine.evaluate([batch], micro_batches=spec(job))
    return float(loss), engine.forward(batch, micro_batches=spec(job))


def generated(job: Job, engine: Engine) -> Any:
    """Sampled answers by fewer rows than prompts, so that rows are refilled, and what the listeners were given."""
    streamed: dict[int, list[int]] = {}
    ended: dict[int, tuple[int, ...]] = {}
    prompts = [[(5 * n + i) % VOCABULARY for i in range(length)] for n, length in enumerate((5, 1, 7, 2, 3))]
    found = engine.generate(
        prompts,
        [SamplingParams(max_new_tokens=2 + n % 3, temperature=0.8, top_k=9) for n in range(len(prompts))],
        GenerateOptions(num_slots=2, rows_per_slot=1, prefill_tokens=3, packed=job.packed),
        on_token=lambda number, token: streamed.setdefault(number, []).append(token),
        on_answer=lambda number, answer: ended.update({number: tuple(answer.tokens)}),
    )
    answers = [(tuple(answer.tokens), tuple(answer.log_probs)) for answer in found]
    if streamed:
        assert [tuple(streamed[n]) for n in range(len(prompts))] == [tokens for tokens, _ in answers]
        assert [ended[n] for n in range(len(prompts))] == [tokens for tokens, _ in answers]
    return answers, sorted(streamed)


def saved(job: Job, engine: Engine, folder: Path) -> Any:
    """Save while a step is taken, and go on from there with another engine."""
    checkpointer = Checkpointer(folder, engine.grid, {"job": str(job)})
    checkpointer.save(engine.step, engine.state())
    (batch,) = batches(job, engine, 1, first=NUM_STEPS)
    straight = engine.train_batch(batch, micro_batches=spec(job)).loss
    checkpointer.finish()
    info = checkpointer.latest()
    assert info is not None and info.step == NUM_STEPS
    other = job.engine(seed=1)
    checkpointer.load(info, other.state())
    other.pipeline.continue_from(info.step)
    other.pipeline.model.casts.renew()
    weights = copies(other)
    again = other.train_batch(batch, micro_batches=spec(job)).loss
    other.close()
    other.grid.close()
    return straight, again, weights


def late(job: Job, folder: Path, lateness: Lateness) -> list[dict[str, Any]]:
    """The job in a late world, by rank."""
    return run(job.layout.world_size, _of_rank, job, folder, lateness=lateness)


def _of_rank(rank: int, job: Job, folder: Path) -> dict[str, Any]:
    return done(job, folder)


def plain(jobs: Sequence[Job], folder: Path) -> list[list[dict[str, Any]]]:
    """The jobs in real processes, which must all be of one number of ranks; by job and rank."""
    (world_size,) = {job.layout.world_size for job in jobs}
    by_rank = run_ranks(world_size, _all_of_rank, jobs, folder, timeout_s=100.0)
    return [list(by_job) for by_job in zip(*by_rank, strict=True)]


def _all_of_rank(rank: int, jobs: Sequence[Job], folder: Path) -> list[dict[str, Any]]:
    return [done(job, folder / str(number)) for number, job in enumerate(jobs)]


def first_difference(one: Any, other: Any, place: str = "") -> str | None:
    """Where two outcomes differ in a bit or are not numbers; None where they are the same."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
        return None if same else place
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return place
        pairs = [(name, one[name], other[name]) for name in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return place
        pairs = [(str(n), mine, theirs) for n, (mine, theirs) in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other else place
    found = (first_difference(mine, theirs, f"{place}/{name}") for name, mine, theirs in pairs)
    return next((difference for difference in found if difference is not None), None)
