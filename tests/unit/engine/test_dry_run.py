"""A dry run's memory is that of a rehearsal: the same bytes for the same rank, whichever command says them."""

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.dry_run import plan_run
from penstock.data import DataShard
from penstock.engine import Engine
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.run_parts import engine_arguments
from penstock.engine.rehearsal.step import RehearsedRun, rehearse_run
from penstock.engine.run_data import RunData
from penstock.schedule.rehearsal import STATE
from penstock.settings import RunConfig
from penstock.settings.run import from_values
from tests.covering import EVERY

RUN: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.max_length": 64,
    "data.sequence_length": 32,
    "data.num_sequences": 4,
    "data.cache": None,
    "train.num_microbatches": 2,
}
MUON = [{"pattern": "*", "matrices": True, "name": "muon"}]
ZERO, FULL = {"optimizer.zero": True}, {"train.recompute": "full"}
EXPERTS = {"experts.num_experts": 3, "experts.num_active": 2, "experts.intermediate_size": 16}
CASES: dict[str, dict[str, Any]] = {
    "one process": {},
    "1f1b": {"parallel.pp": 2},
    "recomputed, in bf16": {"parallel.pp": 2, "train.precision": "bf16", **FULL},
    "fp16 on four": {"parallel.pp": 4, "train.precision": "fp16", "schedule.name": "zb-h1"},
    "a v in fp64": {"parallel.pp": 2, "train.precision": "fp64", "schedule.name": "zb-v", "parallel.device": "cpu"},
    "autocast": {"parallel.pp": 2, "train.precision": "bf16-autocast", "schedule.name": "interleaved"},
    "both ways": {"parallel.pp": 2, "parallel.dp": 2, "schedule.name": "dualpipe", **ZERO},
    "a cut by hand": {"parallel.pp": 2, "schedule.cut": [1, 5], "train.recompute": [1]},
    "a budget of tokens": {"parallel.dp": 2, "train.max_microbatch_tokens": 32},
    "shared layers": {"parallel.pp": 2, "parallel.tp": 2, "model.tie_embeddings": True, "train.precision": "bf16"},
    "a vocabulary that is not shared evenly": {"parallel.tp": 2, "model.vocab_size": 259},
    "a ring, uneven": {"parallel.pp": 2, "parallel.cp": 2, "data.sequence_length": 30, "parallel.order": "pp-tp-cp-dp"},
    "experts, uneven": {"parallel.dp": 3, "parallel.ep": 3, "data.num_sequences": 6, **EXPERTS},
    "experts in turn": {"parallel.pp": 2, "schedule.name": "combined-1f1b", **EXPERTS},
    "an optimizer of torch": {"parallel.pp": 2, "optimizer.name": "sgd", "optimizer.arguments": {"momentum": 0.9}},
    "whole parameters": {"parallel.dp": 3, "data.num_sequences": 6, "optimizer.groups": MUON, **ZERO},
    "adapters": {"parallel.pp": 2, "adapter.rank": 4, "adapter.target_modules": ["q_proj", "up_proj"]},
}


def config_of(folder: Path, changed: dict[str, Any]) -> RunConfig:
    (folder / "text.txt").write_text("All work and no play makes a dull text. " * 200)
    given = {"output": str(folder / "out"), "data.corpus": str(folder / "text.txt"), **RUN, **changed}
    return check_run(with_pretrained(from_values(given)))


@pytest.mark.shows(139)
@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
def test_every_command_gives_a_rank_the_same_bytes(changed: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, changed)
    plan = plan_run(config, RunData.load(config))
    assert len(plan.memory) == len(plan.states) == config.parallel.world_size
    assert plan.device == ("cpu" if changed.get("train.precision") in ("fp64", "bf16-autocast") else "cuda")
    firsts = sorted(set(plan.peers))
    # The first and the last of all, unless every one is asked for.
    for rank in range(config.parallel.world_size) if EVERY else {0, config.parallel.world_size - 1}:
        found = rehearse_run(config, rank, plan.device)
        assert plan.memory_bytes[rank] == found.peak_bytes > 0, rank
        assert plan.memory[rank] == found.fullest, rank
        assert plan.states[rank].total == sum(found.state_bytes[kind] for kind in STATE), rank
        assert plan.num_microbatches == found.num_microbatches
    assert len(firsts) >= config.parallel.pp and all(plan.peers[rank] == rank for rank in firsts)


def test_a_rank_with_both_ends_holds_a_tied_weight_once(tmp_path: Path) -> None:
    apart = config_of(tmp_path, {})
    tied = config_of(tmp_path, {"model.tie_embeddings": True})
    one, shared = (Engine(*engine_arguments(config, 256)).state_bytes() for config in (apart, tied))
    num_bytes = 4 * 256 * apart.model.hidden_size
    assert one.parameters - shared.parameters == num_bytes
    assert one.optimizer - shared.optimizer == 2 * num_bytes
    # The two uses' gradients are added up once both are whole, so that they have the bits of any other cut.
    assert one.gradients == shared.gradients


def test_peers_that_do_the_same_are_rehearsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, {"parallel.pp": 2, "parallel.dp": 2, "parallel.tp": 2, **ZERO})
    plan = plan_run(config, RunData.load(config))
    assert plan.peers == (0, 0, 2, 2, 0, 0, 2, 2)


def test_stages_say_what_they_keep_of_a_microbatch(tmp_path: Path) -> None:
    changed = {"parallel.pp": 2, "schedule.name": "zb-v"}
    plain, again = (
        plan_run(own, RunData.load(own)) for own in (config_of(tmp_path, changed | more) for more in ({}, FULL))
    )
    for one, other in zip(plain.stages, again.stages, strict=True):
        # The embedding alone keeps the batch's own ids, and nothing besides.
        keeps = one.units != ("embedding",)
        assert (0 < other.microbatch_bytes < one.microbatch_bytes) is keeps
        # A microbatch that waits for its W counts by what is kept for it.
        assert (0 < one.for_weights_bytes <= one.microbatch_bytes) is keeps
    assert sum(one.units != ("embedding",) for one in plain.stages) >= 3
    assert max(plain.peak_live_microbatches) <= 2


@pytest.mark.shows(181)
def test_documents_are_counted_one_by_one_and_the_fullest_batch_is_rehearsed(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(10):
        (tmp_path / "texts" / f"{number}.txt").write_text("all work " * (1 if number else 7))
    changed = {"data.packing": "document", "data.corpus": str(tmp_path / "texts"), "data.validation_fraction": 0.0}
    config = config_of(tmp_path, {**changed, "train.steps": 5, "data.sequence_length": 64, "parallel.dp": 2})
    data = RunData.load(config)
    plan = plan_run(config, data)
    loader = data.loader(DataShard(0, 1))
    taken = [next(loader).sequence_lengths("tokens") for _ in range(5 * 2)]
    fullest = max(taken, key=sum)
    assert max(fullest) == 62 and len(fullest) == 2
    assert data.fullest_lengths() == list(fullest)
    assert plan.step_tokens == round(4 * (9 * 8 + 62) / 10)
    assert (plan.num_items, plan.epochs) == (10, 2.0)
    without = RehearsedRun.of(config, plan.device, lengths=[8, 8]).rehearse(0).peak_bytes
    with_it = RehearsedRun.of(config, plan.device, lengths=list(fullest)).rehearse(0).peak_bytes
    assert plan.memory_bytes[0] == with_it > without
