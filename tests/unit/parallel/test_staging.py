"""What a device needs of a microbatch goes there in one copy."""

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.parallel.staging import in_one_copy
from tests.device_waits import UPLOAD, DeviceWaits

META = torch.device("meta")
TOKENS, FLAGS = torch.arange(5), torch.tensor([True, False, True])
NARROW, EMPTY = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3), torch.zeros(0, 4)
TABLES: list[dict[str, Tensor]] = [{"tokens": TOKENS, "flags": FLAGS}, {}, {"labels": TOKENS, "x": NARROW, "y": EMPTY}]


def test_tensors_that_are_there_stay_as_they_are() -> None:
    found = in_one_copy(TABLES, torch.device("cpu"))
    assert [list(table) for table in found] == [list(table) for table in TABLES]
    assert all(
        x is there
        for table, kept in zip(TABLES, found, strict=True)
        for x, there in zip(table.values(), kept.values(), strict=True)
    )


@pytest.mark.shows(208)
def test_tables_of_any_dtypes_and_shapes_are_one_copy_that_does_not_block() -> None:
    waits = DeviceWaits()
    with waits.watch():
        first, second, third = in_one_copy(TABLES, META)
    assert waits.of("before") == {UPLOAD: 1}
    assert second == {} and first["tokens"] is third["labels"]
    for name, x in {**TABLES[0], **TABLES[2]}.items():
        copy = {**first, **third}[name]
        assert (copy.device, copy.dtype, copy.shape) == (META, x.dtype, x.shape)


def test_packed_tensors_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second kind of host memory stands for the device."""
    to = Tensor.to

    def arrive(x: Tensor, *arguments: Any, non_blocking: bool = False) -> Tensor:
        return x.clone() if non_blocking else to(x, *arguments)

    monkeypatch.setattr(Tensor, "to", arrive)
    first, _, third = in_one_copy(TABLES, META)
    for name, x in {**TABLES[0], **TABLES[2]}.items():
        copy = {**first, **third}[name]
        assert copy is not x and copy.dtype == x.dtype and torch.equal(copy, x)


def test_a_gpu_copies_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def allocated(*shape: Any, pin_memory: bool, **settings: Any) -> Tensor:
        pinned.append(pin_memory)
        raise MemoryError

    monkeypatch.setattr(torch, "empty", allocated)
    for device in (torch.device("cuda", 0), META):
        with pytest.raises(MemoryError):
            in_one_copy(TABLES, device)
    assert pinned == [True, False]
