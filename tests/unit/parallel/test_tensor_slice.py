"""Slices and runs of elements: every element once, in order, and as few slices as the dimensions allow."""

import itertools
import math

import pytest
import torch

from penstock.parallel.tensor_slice import TensorSlice, local_run, local_slices


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2)], ids=str)
def test_a_run_is_its_slices_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for first, last in itertools.combinations(range(numbers.numel() + 1), 2):
        slices = list(TensorSlice.whole(shape).run(first, last))
        found = torch.cat([one.of(numbers).flatten() for one in slices])
        assert found.tolist() == list(range(first, last))
        assert len(slices) <= max(1, 2 * len(shape) - 1)
    assert list(TensorSlice.whole(shape).run(0, 0)) == []


def test_the_overlap_of_slices_has_the_elements_of_both() -> None:
    slices = [TensorSlice((a, b), (n, m), (4, 5)) for a, b, n, m in itertools.product((0, 2), (0, 3), (1, 2), (1, 2))]
    num_common = 0
    for one, other in itertools.product(slices, slices):
        marks = torch.zeros(4, 5, dtype=torch.int64)
        one.of(marks).add_(1)
        other.of(marks).add_(1)
        common = one.overlap(other)
        assert int((marks == 2).sum()) == (common.num_elements if common else 0)
        if common is not None:
            assert (common.of(marks) == 2).all()
            num_common += 1
    assert num_common > len(slices)


def test_what_a_flat_tensor_holds_is_written_through() -> None:
    whole = torch.zeros(4, 6)
    flat = torch.arange(1.0, 8.0)
    local = local_run(flat, 2, TensorSlice((1, 3), (3, 3), (4, 6)))
    for part, values in local_slices(local).items():
        part.of(whole).copy_(values)
        values.neg_()
    assert whole[1:, 3:].flatten().tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    assert whole[0].sum() == 0 == whole[:, :3].sum()
    assert flat.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    same = local_run(torch.arange(6.0), 0, TensorSlice.whole((2, 3)))
    assert isinstance(same, torch.Tensor) and same.shape == (2, 3)
