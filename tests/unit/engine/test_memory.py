"""What stages hold besides tapes follows the optimizer, and units that are alike are rehearsed once."""

from typing import Any

import pytest

from penstock.data import MicroBatchSpec
from penstock.engine.options import EngineOptions
from penstock.engine.rehearsal import units as rehearsed
from penstock.engine.rehearsal.step import RehearsedBatch, rehearse
from penstock.model import decoder_units
from penstock.schedule import Op
from penstock.schedule.rehearsal import MemoryKind
from penstock.settings import Layout, ModelConfig, OptimizerConfig, OptimizerName, ParameterGroup
from penstock.settings.optimizer import Arguments


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
    runs, costs_alone = [], rehearsed._costs_alone

    def counted(unit: Any, *others: Any) -> Any:
        runs.append(unit)
        return costs_alone(unit, *others)

    monkeypatch.setattr(rehearsed, "_costs_alone", counted)
    batch = RehearsedBatch([8, 8], MicroBatchSpec(num=1))
    options = EngineOptions(device="cpu", recompute=(4,))
    found = rehearse(lambda groups: decoder_units(config, groups=groups), 32, Layout(), options, batch, 0).units
    # Embedding, attention and MLP, both under recompute, head.
    assert len(found) == 26 and len(runs) == 6
    assert found[2].actions == found[4].actions == found[24].actions != found[10].actions
    # What W needs waits for it: at least the input of each product, and the gradient of its output.
    assert found[2].of(Op.I).kept_bytes >= 4 * 16 * (32 + 2 * 64 + 64 + 32)
    assert all(unit.of(Op.W).kept_bytes <= unit.of(Op.I).kept_bytes for unit in found)
