"""What a dry run says each rank holds is what it does hold."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.dry_run import plan_run
from penstock.engine import Engine
from penstock.engine.folders.run_parts import RunData, engine_arguments
from penstock.parallel.gradients import StateBytes
from penstock.settings import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from tests.dist.launch import run_ranks

pytestmark = pytest.mark.subject("src/penstock/**/*.py")

LAYOUTS = [
    (ParallelConfig(pp=4), "1f1b", False),
    (ParallelConfig(dp=4), "1f1b", False),
    (ParallelConfig(dp=4), "1f1b", True),
    (ParallelConfig(cp=4), "1f1b", True),
    (ParallelConfig(tp=4), "1f1b", False),
    (ParallelConfig(pp=2, dp=2), "interleaved", True),
    (ParallelConfig(pp=2, dp=2), "dualpipe", True),
    (ParallelConfig(pp=2, cp=2), "zb-v", False),
    (ParallelConfig(pp=2, tp=2), "1f1b", False),
    (ParallelConfig(dp=2, tp=2), "1f1b", True),
    (ParallelConfig(cp=2, tp=2, order="pp-tp-cp-dp"), "1f1b", True),
]


def config_of(folder: Path, index: int) -> RunConfig:
    parallel, schedule, zero = LAYOUTS[index]
    return RunConfig(
        model=ModelConfig(
            hidden_size=48, intermediate_size=112, num_layers=3, num_kv_heads=2, tie_embeddings=index % 2 == 0
        ),
        data=DataConfig(corpus=str(folder / "text.txt"), sequence_length=16, num_sequences=16, cache=None),
        parallel=replace(parallel, timeout_s=60.0),
        schedule=ScheduleConfig(schedule),
        optimizer=OptimizerConfig(zero=zero),
        train=TrainConfig(
            precision=Precision.BF16 if index % 3 == 0 else Precision.FP32,
            num_microbatches=4 if schedule == "dualpipe" else 2,
        ),
    )


def held(rank: int, configs: list[RunConfig]) -> list[StateBytes]:
    found = []
    for config in configs:
        engine = Engine(*engine_arguments(config, 256))
        found.append(engine.state_bytes())
        engine.close()
        engine.grid.close()
    return found


def test_a_rank_with_both_ends_holds_a_tied_weight_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play makes a dull text. " * 200)
    config = replace(config_of(tmp_path, 7), parallel=ParallelConfig(), schedule=ScheduleConfig())
    tied = replace(config, model=replace(config.model, tie_embeddings=True))
    num_elements, element_bytes = 256 * config.model.hidden_size, 4
    apart, shared = (Engine(*engine_arguments(one, 256)).state_bytes() for one in (config, tied))
    assert not config.model.tie_embeddings
    assert apart.parameters - shared.parameters == num_elements * element_bytes
    assert apart.optimizer - shared.optimizer == 2 * num_elements * element_bytes
    # The two uses' gradients are added up once both are whole, so that they have the bits of any other cut.
    assert apart.gradients == shared.gradients


def with_zero(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=OptimizerConfig(zero=True))


@pytest.mark.shows(91)
def test_a_dry_run_predicts_what_ranks_hold(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play makes a dull text. " * 200)
    configs = [config_of(tmp_path, index) for index in range(len(LAYOUTS))]
    plans = [plan_run(config, RunData.load(config)) for config in configs]
    by_rank = run_ranks(4, held, configs, timeout_s=120.0)
    assert len(configs) >= 10
    for index, plan in enumerate(plans):
        assert len(plan.states) == 4
        for predicted, measured in zip(plan.states, (of_rank[index] for of_rank in by_rank), strict=True):
            for kind in ("parameters", "gradients", "optimizer"):
                assert getattr(predicted, kind) == pytest.approx(getattr(measured, kind), rel=0.02), LAYOUTS[index]
    off, on = (plan_run(config, RunData.load(config)).states[0] for config in (configs[1], with_zero(configs[1])))
    # Shares are whole cache lines.
    assert off.optimizer / 4 <= on.optimizer <= off.optimizer / 4 * 1.02
