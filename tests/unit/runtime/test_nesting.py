"""How deep the lanes of a backward are nested: each level is resumed at each collective, and read in each traceback."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from penstock import Engine, PackedBatch
from penstock.engine import EngineOptions
from penstock.model import decoder_units, lanes
from penstock.settings import ExpertConfig, ModelConfig, ScheduleConfig

EXPERTS = ExpertConfig(num_experts=4, num_active=2, intermediate_size=8)


@pytest.mark.parametrize("schedule", ["1f1b", "combined-1f1b"])
@pytest.mark.parametrize("num_predictions", [0, 2])
def test_a_backward_lane_runs_through_at_most_four_nested_generators(
    monkeypatch: pytest.MonkeyPatch, schedule: str, num_predictions: int
) -> None:
    depths: list[int] = []
    enter_graph, drivers = lanes.enter_graph, (lanes.drain.__code__, lanes.zip_lanes.__code__)

    def counted(*arguments: Any) -> None:
        frame, depth = inspect.currentframe(), 0
        while frame is not None and frame.f_code not in drivers:
            depth += bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
            frame = frame.f_back
        depths.append(depth)
        enter_graph(*arguments)

    monkeypatch.setattr(lanes, "enter_graph", counted)
    model = ModelConfig(16, 8, 8, 2, 2, experts=EXPERTS, num_predictions=num_predictions)
    options = EngineOptions(schedule=ScheduleConfig(schedule), device="cpu")
    engine = Engine(decoder_units(model), model.hidden_size, options=options)
    engine.train_batch(PackedBatch.from_documents([torch.arange(6), torch.arange(5)]))
    engine.close()
    # Two microbatches: router, experts and combine of each layer at least.
    assert len(depths) >= 2 * 2 * 3 and max(depths) <= 4
