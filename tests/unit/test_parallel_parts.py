"""Boxes and stretches: every element once, in order, and as few boxes as the dimensions allow."""

import itertools
import math

import pytest
import torch

from penstock.parallel.parts import Box, hold, parts_of, stretch


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2)], ids=str)
def test_a_stretch_is_its_boxes_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for first, last in itertools.combinations(range(numbers.numel() + 1), 2):
        boxes = list(stretch(first, last, shape))
        found = torch.cat([numbers[box.within(Box.whole(shape))].flatten() for box in boxes])
        assert found.tolist() == list(range(first, last))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert list(stretch(0, 0, shape)) == []


def test_common_elements_of_boxes_are_those_of_both() -> None:
    whole = Box.whole((4, 5))
    boxes = [Box((a, b), (n, m)) for a, b, n, m in itertools.product((0, 2), (0, 3), (1, 2), (1, 2))]
    num_common = 0
    for one, other in itertools.product(boxes, boxes):
        marks = torch.zeros(4, 5, dtype=torch.int64)
        marks[one.within(whole)] += 1
        marks[other.within(whole)] += 1
        common = one.common(other)
        assert int((marks == 2).sum()) == (common.num_elements if common else 0)
        if common is not None:
            assert (marks[common.within(whole)] == 2).all()
            num_common += 1
    assert num_common > len(boxes)


def test_what_a_flat_tensor_holds_is_written_through() -> None:
    whole = torch.zeros(4, 6)
    flat = torch.arange(1.0, 8.0)
    held = hold(flat, 2, Box((1, 3), (3, 3)), (4, 6))
    for part in parts_of(held):
        whole[part.box.within(Box.whole((4, 6)))] = part.tensor
        part.tensor.neg_()
    assert whole[1:, 3:].flatten().tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert whole[0].sum() == 0 == whole[:, :3].sum()
    assert flat.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    same = hold(torch.arange(6.0), 0, Box.whole((2, 3)), (2, 3))
    assert isinstance(same, torch.Tensor) and same.shape == (2, 3)
