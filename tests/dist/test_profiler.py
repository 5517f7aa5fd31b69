"""In torch's profiler, actions and layers carry their names."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.model import decoder_units
from penstock.settings import ModelConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=2, max_length=64
)
SPLIT = MicroBatchSpec(num=2)


def profiled(rank: int, layout: Layout, own_layers: bool, schedule: str) -> set[str]:
    """Names in the profile of a step, whose actions are those that the program has for this rank."""
    options = EngineOptions(schedule=schedule, device="cpu")
    if own_layers:
        layers = [nn.Embedding(32, 16), *(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 32)]
        engine = Engine.from_layers(layers, 16, layout, options)
    else:
        engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), 16, layout, options)
    batch = PackedBatch.from_documents([torch.arange(6), torch.arange(5)])
    engine.train_batch(batch, micro_batches=SPLIT)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        engine.train_batch(batch, micro_batches=SPLIT)
    names = {event.name for event in found.events() or ()}
    expected = {str(record.action) for record in engine.recorder.records()} - {"STEP"}
    expected |= {name for stage in engine.pipeline.model.stages.values() for name, _ in stage.units}
    assert len(expected) > 4
    assert expected <= names, expected - names
    engine.close()
    return expected


@pytest.mark.shows(116)
@pytest.mark.parametrize(
    "layout, own_layers, schedule",
    [
        (Layout(), True, "1f1b"),
        (Layout(pp=2), True, "zb-h1"),
        (Layout(pp=2), False, "combined-1f1b"),
        (Layout(tp=2), False, "1f1b"),
    ],
    ids=str,
)
def test_a_profile_names_every_action_and_layer_of_a_rank(layout: Layout, own_layers: bool, schedule: str) -> None:
    args = (layout, own_layers, schedule)
    ranks = [profiled(0, *args)] if layout.world_size == 1 else run_ranks(layout.world_size, profiled, *args)
    every = set().union(*ranks)
    assert {"0F0", "0F1"} <= every
