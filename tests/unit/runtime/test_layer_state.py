"""A layer that is computed again sees the buffers that its forward saw, and keeps little for it."""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.layer_state import BufferHistory, BufferValues, ModuleState


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


def test_only_buffers_that_a_forward_changes_are_kept_as_they_were() -> None:
    layer = Tables()
    history, seen = BufferHistory(layer), list[Any]()
    for _ in range(3):
        with history.forward() as buffers:
            layer()
        seen.append(buffers)
    kept = [one.values for buffers in seen for one in buffers.values() if one.values is not None]
    assert [float(values) for values in kept] == [0, 1, 2]
    large, count, version = layer.large, layer.count, layer.count._version
    for number in (2, 0, 1):
        assert float(history.call_again(seen[number], (), {})[0]) == number + 1
        assert layer.count is count and layer.count == 3 and layer.count._version == version
        assert layer.large is large


def test_a_buffer_that_a_later_forward_changes_is_kept_for_the_earlier_one() -> None:
    layer = Tables()
    history = BufferHistory(layer)
    with history.forward() as first:
        pass
    with history.forward():
        layer()
    assert isinstance(first["count"], BufferValues) and float(history.call_again(first, (), {})[0]) == 1


class Declares(Tables):
    """Has extra state, and can take another buffer in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, list[int]] = {"seen": []}

    def get_extra_state(self) -> dict[str, list[int]]:
        return self.rows

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.rows = state


def test_buffers_and_extra_state_are_put_back() -> None:
    layer = Declares()
    count, before = layer.count, ModuleState(layer)
    layer()
    layer.rows["seen"].append(3)
    layer.count = torch.full((2,), 7.0)
    layer.register_buffer("late", torch.ones(1))
    before.restore()
    assert layer.count is count and float(count) == 0 and set(layer._buffers) == {"large", "count"}
    assert layer.rows == {"seen": []}
