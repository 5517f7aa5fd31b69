"""A layer that is computed again sees what its forward saw, keeps little for it, and is refused where that is lost."""

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, PackedBatch, PipelineError
from penstock.runtime.layer_state import KeptState

WIDTH = 8


class Reads(nn.Module):
    """Multiplies by a tensor that another layer moves on."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.shared.clone()


class Moves(Reads):
    def forward(self, x: Tensor) -> Tensor:
        self.shared.mul_(0.9)
        return self.linear(x)


def test_a_layer_that_reads_what_another_changes_is_refused_by_name() -> None:
    shared = torch.ones(WIDTH)
    layers = [nn.Embedding(16, WIDTH), Reads(shared), Moves(shared), nn.Linear(WIDTH, 16)]
    engine = Engine.from_layers(layers, WIDTH, options=EngineOptions(recompute=(1, 2), device="cpu"))
    with pytest.raises(PipelineError, match=r"layers.1 keeps a tensor \[8\] that something else has changed since its"):
        engine.train_batch(PackedBatch.from_documents([torch.arange(9)]))
    engine.close()


class Tables(nn.Module):
    """A large constant, and a small count."""

    large: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.ones(1000))
        self.register_buffer("count", torch.zeros(1))

    def forward(self) -> Tensor:
        self.count += 1
        return self.large * self.count


def test_only_what_a_forward_changes_is_kept_as_it_was() -> None:
    layer, states = Tables(), list[KeptState]()
    for _ in range(3):
        states.append(KeptState.of(layer, states[-1].moments if states else {}))
        with states[-1].before_forward():
            layer()
    kept = [moment.values for state in states for moment in state.moments.values() if moment.values is not None]
    assert [float(values) for values in kept] == [0, 1, 2]
    large, memory, version = layer.large, layer.large.data_ptr(), layer.count._version
    for number in (2, 0, 1):
        with states[number].put_back(layer, "layers.0"):
            assert float(layer()[0]) == number + 1
        assert layer.count == 3 and layer.count._version == version
        assert layer.large is large and layer.large.data_ptr() == memory


class Last(nn.Module):
    """Keeps as many values as before, but others."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.by_name, self.kinds = [0], {"last": 0}, {0}

    def forward(self) -> int:
        self.last[0] = self.by_name["last"] = found = self.last[0] + 1
        self.kinds.clear()
        self.kinds.add(found)
        return found


def test_containers_of_as_many_values_as_before_are_put_back_too() -> None:
    layer = Last()
    known = layer.last
    state = KeptState.of(layer, {})
    with state.before_forward():
        layer()
    layer()
    with state.put_back(layer, "layers.0"):
        assert (layer.last, layer.by_name, layer.kinds) == ([0], {"last": 0}, {0})
        assert layer() == 1
    assert (layer.last, layer.by_name, layer.kinds) == ([2], {"last": 2}, {2})
    assert layer.last is known
