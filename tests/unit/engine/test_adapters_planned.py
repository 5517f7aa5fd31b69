"""Adapters in a dry run and in `penstock convert`: what is planned is what is held, and the base keeps its bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.cli.dry_run import plan_run
from penstock.cli.main import main
from penstock.engine import Engine
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.run_parts import RunData, engine_arguments
from penstock.settings import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from tests.hugging_face import make_model, stored_tensors


def config_of(folder: Path) -> RunConfig:
    (folder / "text.txt").write_text("All work and no play makes a dull text. " * 100)
    make_model("llama", vocab_size=256, pad_token_id=0).save_pretrained(folder / "base")
    return check_run(
        with_pretrained(
            RunConfig(
                output=str(folder / "out"),
                model=ModelConfig(pretrained=str(folder / "base")),
                data=DataConfig(corpus=str(folder / "text.txt"), sequence_length=16, num_sequences=4, cache=None),
                parallel=ParallelConfig(device="cpu"),
                adapter=AdapterConfig(rank=4, target_modules=("q_proj", "up_proj")),
                train=TrainConfig(steps=1, num_microbatches=2),
                checkpoint=CheckpointConfig(every=1),
            )
        )
    )


@pytest.mark.shows(108)
def test_a_dry_run_plans_adapters_as_an_engine_holds_them(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    data = RunData.load(config)
    engine = Engine(*engine_arguments(config, data.corpus.vocab_size))
    held = engine.state_bytes()
    trained = sum(p.numel() for p in engine.parameters().values() if p.requires_grad)
    engine.close()
    plan = plan_run(config, data)
    [planned] = plan.states
    assert planned.parameters == pytest.approx(held.parameters, rel=0.02)
    # Frozen parameters have neither; buckets are whole cache lines.
    assert planned.gradients == held.gradients and planned.optimizer == held.optimizer
    assert 4 * trained <= held.gradients <= 4 * trained * 1.5 and 0 < trained < plan.num_parameters / 4
    # Every rank is planned with the adapters of its own stages.
    apart = plan_run(replace(config, parallel=ParallelConfig(pp=2, device="cpu")), data)
    assert len(apart.states) == 2 and all(own.gradients > 0 for own in apart.states)
    assert sum(own.gradients for own in apart.states) == pytest.approx(planned.gradients, rel=0.3)


@pytest.mark.shows(108)
def test_convert_writes_the_base_of_a_run_with_adapters_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from penstock.cli.processes.meeting import Group
    from penstock.cli.processes.train_worker import train_worker

    config = config_of(tmp_path)
    assert train_worker(config, Group.alone()) == 0
    adapters = stored_tensors(tmp_path / "out" / "adapter-1")
    assert len(adapters) > 2 and all("lora_" in name for name in adapters)
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "converted"), "--json"]) == 0
    before, after = stored_tensors(tmp_path / "base"), stored_tensors(tmp_path / "converted")
    assert before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    # And back: a run that another one begins with.
    assert main(["convert", str(tmp_path / "converted"), str(tmp_path / "run"), "--json"]) == 0
    assert (tmp_path / "run" / "run.toml").is_file()
    capsys.readouterr()
